"""The `openai` package as a client of `meshwright serve`: every route, streams, errors, cancellation."""

import asyncio
import time
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients.folder import NAME, SPECIAL
from tests.clients.server import Server

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a mesh?"}]


@pytest.fixture
def api(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as made:
        yield made


def test_models(api):
    (one,) = api.models.list().data
    assert (one.id, one.object, one.owned_by) == (NAME, "model", "meshwright")
    assert api.models.retrieve(NAME).id == NAME
    assert one.max_model_len == 1024


def test_a_completion(api):
    done = api.completions.create(model=NAME, prompt="A mesh is", max_tokens=12, temperature=0)
    again = api.completions.create(model=NAME, prompt="A mesh is", max_tokens=12, temperature=0)
    assert done.object == "text_completion"
    assert done.choices[0].text == again.choices[0].text
    assert done.choices[0].finish_reason in ("length", "stop")
    usage = done.usage
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_prompts_of_every_kind_in_one_request_are_those_alone(api):
    texts = ["A mesh is", "Devices", "x"]
    many = api.completions.create(model=NAME, prompt=texts, max_tokens=5, temperature=0)
    alone = [api.completions.create(model=NAME, prompt=one, max_tokens=5, temperature=0) for one in texts]
    assert [one.text for one in many.choices] == [one.choices[0].text for one in alone]
    assert [one.index for one in many.choices] == [0, 1, 2]
    numbers = [[5, 6, 7], [300, 20]]
    many = api.completions.create(model=NAME, prompt=numbers, max_tokens=5, temperature=0)
    alone = [api.completions.create(model=NAME, prompt=one, max_tokens=5, temperature=0) for one in numbers]
    assert [one.text for one in many.choices] == [one.choices[0].text for one in alone]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_streamed_completion_is_the_whole_one(api, temperature):
    given = {"model": NAME, "prompt": "A mesh is", "max_tokens": 40, "temperature": temperature, "seed": 7, "n": 3}
    whole = api.completions.create(**given)
    stream = api.completions.create(**given, stream=True, stream_options={"include_usage": True})
    texts, ends, usage = ["", "", ""], [None] * 3, None
    for chunk in stream:
        for one in chunk.choices:
            texts[one.index] += one.text
            ends[one.index] = one.finish_reason or ends[one.index]
        usage = chunk.usage or usage
    assert texts == [one.text for one in whole.choices]
    assert ends == [one.finish_reason for one in whole.choices]
    assert usage == whole.usage or usage.total_tokens == whole.usage.total_tokens


def test_usage_with_every_chunk(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = api.completions.create(
        **{"model": NAME, "prompt": "A mesh", "max_tokens": 10, "stream": True, "stream_options": options},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    counts = [one.usage.completion_tokens for one in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 10
    assert chunks[-1].choices == []


def test_a_chat(api):
    whole = api.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=20, temperature=0)
    assert whole.object == "chat.completion"
    message = whole.choices[0].message
    assert message.role == "assistant"
    stream = api.chat.completions.create(
        **{"model": NAME, "messages": MESSAGES, "max_tokens": 20, "temperature": 0, "stream": True},
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == whole.choices[0].finish_reason


def test_settings_that_ask_for_nothing_and_settings_that_are_not_supported(api):
    given = {"model": NAME, "messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    nothing = {"modalities": ["text"], "verbosity": "medium", "functions": [], "function_call": "auto", "audio": None}
    plain, more = (api.chat.completions.create(**given, **one) for one in ({}, nothing))
    assert more.choices[0].message == plain.choices[0].message
    for name, value in (("modalities", ["text", "audio"]), ("verbosity", "low"), ("web_search_options", {})):
        with pytest.raises(openai.BadRequestError, match=name) as refused:
            api.chat.completions.create(**given, **{name: value})
        assert refused.value.param == name


def test_the_stream_helper_of_the_package(api):
    with api.chat.completions.stream(model=NAME, messages=MESSAGES, max_tokens=8, temperature=0) as stream:
        kinds = {event.type for event in stream}
        with pytest.raises(openai.LengthFinishReasonError) as ended:  # the package refuses to parse what was cut short
            stream.get_final_completion()
    final = ended.value.completion
    assert "content.delta" in kinds
    whole = api.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=8, temperature=0)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_raw_and_streaming_responses(api):
    raw = api.completions.with_raw_response.create(model=NAME, prompt="A", max_tokens=1)
    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].text is not None
    with api.completions.with_streaming_response.create(model=NAME, prompt="A", max_tokens=3, stream=True) as answer:
        assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"


def test_logprobs_of_a_chat(api):
    given = {"model": NAME, "messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True}
    rows = api.chat.completions.create(**given, top_logprobs=4).choices[0].logprobs.content
    assert len(rows) == 6
    for row in rows:
        assert len(row.top_logprobs) == 4
        assert row.token == row.top_logprobs[0].token  # greedy: the token is the likeliest
        assert row.logprob == pytest.approx(row.top_logprobs[0].logprob, abs=1e-6)
        values = [one.logprob for one in row.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert max(values) <= 0
    streamed = api.chat.completions.create(**given, top_logprobs=4, stream=True)
    found = [row for chunk in streamed for one in chunk.choices if one.logprobs for row in one.logprobs.content]
    assert [row.token for row in found] == [row.token for row in rows]
    assert [row.logprob for row in found] == pytest.approx([row.logprob for row in rows], abs=1e-4)


def test_logprobs_and_echo_of_a_completion(api):
    done = api.completions.create(model=NAME, prompt="A mesh of devices", max_tokens=4, temperature=0, logprobs=3)
    found = done.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 4
    echoed = api.completions.create(
        model=NAME, prompt="A mesh of devices", max_tokens=4, temperature=0, logprobs=3, echo=True
    )
    choice = echoed.choices[0]
    assert choice.text == "A mesh of devices" + done.choices[0].text
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[-4:] == pytest.approx(found.token_logprobs, abs=1e-4)
    assert choice.logprobs.text_offset[0] == 0
    assert choice.logprobs.text_offset[-4] == len("A mesh of devices")
    shown = [one for one in choice.logprobs.tokens if one not in SPECIAL]
    raw = [bytes.fromhex(one[6:].replace(r"\x", "")) if one.startswith("bytes:") else one.encode() for one in shown]
    assert b"".join(raw).decode(errors="replace") == choice.text
    alone = api.completions.create(model=NAME, prompt="A mesh of devices", max_tokens=0, logprobs=1, echo=True)
    assert alone.choices[0].text == "A mesh of devices"
    assert alone.usage.completion_tokens == 0


def test_stop_strings(api):
    whole = api.completions.create(model=NAME, prompt="A mesh is", max_tokens=40, temperature=0).choices[0].text
    place = len(whole) // 2
    stop = whole[place : place + 3]
    cut = api.completions.create(model=NAME, prompt="A mesh is", max_tokens=40, temperature=0, stop=[stop, "\0\0"])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    stream = api.completions.create(
        model=NAME, prompt="A mesh is", max_tokens=40, temperature=0, stop=stop, stream=True
    )
    assert "".join(one.choices[0].text for one in stream) == cut.choices[0].text


def test_n_with_a_seed(api):
    given = {"model": NAME, "messages": MESSAGES, "max_tokens": 8, "n": 4, "seed": 11, "temperature": 1}
    first, again = (api.chat.completions.create(**given) for _ in range(2))
    texts = [one.message.content for one in first.choices]
    assert len(set(texts)) > 1
    assert texts == [one.message.content for one in again.choices]
    assert first.usage.completion_tokens <= 32


def test_errors(api):
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(model="other", prompt="A")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="no_such_field") as unknown:
        api.completions.create(model=NAME, prompt="A", extra_body={"no_such_field": 1})
    assert unknown.value.param == "no_such_field"
    with pytest.raises(openai.BadRequestError) as long:
        api.completions.create(model=NAME, prompt="mesh " * 2_000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as long:
        api.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=5_000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        api.completions.create(model=NAME, prompt="A", temperature=-1)
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError, match="the json schema is not valid"):
        api.chat.completions.create(model=NAME, messages=MESSAGES, response_format=wrong)
    with pytest.raises(openai.NotFoundError):
        api.embeddings.create(model=NAME, input="A")


class Answer(BaseModel):
    kind: Literal["cat", "dog"]
    is_old: bool


def test_answers_follow_a_schema(api):
    found = api.chat.completions.parse(model=NAME, messages=MESSAGES, response_format=Answer, max_tokens=400)
    choice = found.choices[0]
    assert choice.finish_reason == "length" or isinstance(choice.message.parsed, Answer)
    chosen = api.completions.create(
        model=NAME, prompt="A", max_tokens=40, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert chosen.choices[0].text in ("yes", "no")


def test_cancelling_a_stream_frees_what_it_held(api, server):
    aborted = server.rest()
    for _ in range(5):
        stream = api.completions.create(
            model=NAME, prompt="A mesh", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    found = server.rest(5)
    assert found["generation_tokens"] - aborted["generation_tokens"] < 5 * 900


def test_many_at_once(server):
    async def run():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as api:
            given = {"model": NAME, "max_tokens": 16, "temperature": 0}
            prompts = [f"Number {one} is" for one in range(64)]
            many = await asyncio.gather(*(api.completions.create(prompt=one, **given) for one in prompts))
            for prompt, found in list(zip(prompts, many, strict=True))[::16]:
                alone = await api.completions.create(prompt=prompt, **given)
                assert alone.choices[0].text == found.choices[0].text

    asyncio.run(run())
    server.rest()


def test_an_api_key(folder, tmp_path):
    with Server(folder, "--api-key", "one", "--api-key", "two", "--name", "other/name", log=tmp_path / "log") as server:
        for key in ("one", "two"):
            with openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as api:
                assert api.completions.create(model="other/name", prompt="A", max_tokens=1).usage.total_tokens
                assert api.models.retrieve("other/name").id == "other/name"
        with openai.OpenAI(base_url=server.url + "/v1", api_key="three", max_retries=0) as api:
            with pytest.raises(openai.AuthenticationError) as refused:
                api.completions.create(model="other/name", prompt="A", max_tokens=1)
            assert refused.value.code == "invalid_api_key"
        assert server.get("/health")


def test_a_request_that_is_too_many_or_too_late(folder, tmp_path):
    options = ("--max-queued", "2", "--deadline", "0.5", "--max-requests", "2")
    with Server(folder, *options, log=tmp_path / "log") as server:
        api = openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)
        with api:
            given = {"model": NAME, "prompt": "A", "max_tokens": 1_000, "extra_body": {"ignore_eos": True}}
            with pytest.raises(openai.BadRequestError):
                api.completions.create(**given, n=3)
            held = [api.completions.create(**given, stream=True) for _ in range(2)]
            with pytest.raises(openai.RateLimitError) as refused:
                api.completions.create(**given)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            started = time.monotonic()
            for one in held:
                one.close()
            server.rest(5)
            assert time.monotonic() - started < 5
