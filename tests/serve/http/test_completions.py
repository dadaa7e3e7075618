"""Completions: forms of prompts, settings as the engine gets them, texts, tokens and ends."""

import random

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from meshwright.serve.drawing.sampling import Sampling
from meshwright.serve.frontend import Frontend
from meshwright.serve.http.app import make_app
from meshwright.serve.http.growing import GrowingText
from meshwright.serve.http.served import ServedModel
from meshwright.serve.model_folder import Text
from meshwright.serve.request import TokenLogprob
from tests.serve.http import fake
from tests.serve.http.fake import FakeEngine, bench, events, in_loop, letters, served, streamed_text


def tokens_of(text):
    return tuple(letters().encode(text).ids)


def texts(answer):
    assert answer.status_code == 200, answer.text
    return [one["text"] for one in answer.json()["choices"]]


@in_loop
async def test_an_answer():
    async with bench() as b:
        answer = await b.complete("abc", max_tokens=3, model="toy", user="me", temperature=0.5, seed=7, top_k=-1)
        assert answer.headers["content-type"] == "application/json"
        found = answer.json()
        assert found.pop("id") == f"cmpl-{answer.headers['x-request-id']}"
        assert found.pop("created") > 1.7e9
        assert found == {
            "object": "text_completion",
            "model": "toy",
            "choices": [{"index": 0, "text": "def", "logprobs": None, "finish_reason": "length"}],
            "usage": {**{"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "prompt_tokens_details": None}},
        }
        assert b.engine.seen[0].sampling == Sampling(temperature=0.5, seed=7)
        assert b.engine.seen[0].stop_tokens == {1}


@in_loop
async def test_forms_of_a_prompt():
    async with bench() as b:
        assert texts(await b.complete("ab", max_tokens=2)) == ["cd"]
        assert texts(await b.complete(["ab", "x"], max_tokens=2)) == ["cd", "yz"]
        assert texts(await b.complete(list(tokens_of("ab")), max_tokens=2)) == ["cd"]
        answer = await b.complete([list(tokens_of("ab")), list(tokens_of("x"))], max_tokens=2, n=2)
        assert texts(answer) == ["cd", "cd", "yz", "yz"]
        assert [one["index"] for one in answer.json()["choices"]] == [0, 1, 2, 3]
        assert answer.json()["usage"]["prompt_tokens"] == 3
        assert answer.json()["usage"]["completion_tokens"] == 8


@in_loop
async def test_defaults_are_those_of_openai():
    async with bench() as b:
        await b.complete("ab", n=2)
        first, second = b.engine.seen
        assert first.max_tokens == 16
        assert first.sampling.temperature == 1.0
        assert first.sampling.seed == second.sampling.seed
        assert (first.sampling.number, second.sampling.number) == (0, 1)
        await b.complete("ab", temperature=None, stop=None, logit_bias=None, max_tokens=None, prompt_logprobs=None)
        assert b.engine.seen[2].sampling.seed != first.sampling.seed
        await b.complete(list(range(2, 100)) * 5, max_tokens=None)
        assert b.engine.seen[-1].max_tokens == 16


@in_loop
async def test_ends():
    async with bench() as b:
        after = tokens_of("e")[0]
        answer = await b.complete("a", stop_token_ids=[after])
        assert answer.json()["choices"][0] == {"index": 0, "text": "bcd", "logprobs": None, "finish_reason": "stop"}
        assert b.engine.seen[-1].stop_tokens == {1, after}
        assert answer.json()["usage"]["completion_tokens"] == 4  # with the one that ended it, as vLLM counts
        streamed = await b.complete(
            "a", stop_token_ids=[after], stream=True, stream_options={"include_usage": True}, n=2
        )
        assert events(streamed.text)[-1]["usage"]["completion_tokens"] == 8
        scored = await b.complete("a", echo=True, logprobs=1, max_tokens=0, stop_token_ids=[tokens_of("b")[0]])
        assert scored.json()["usage"]["completion_tokens"] == 0
        answer = await b.complete("a", stop_token_ids=[after], min_tokens=5, max_tokens=6)
        assert answer.json()["choices"][0]["text"] == "bcdefg"
        await b.complete("a", ignore_eos=True)
        assert b.engine.seen[-1].stop_tokens == frozenset()
        answer = await b.complete("a", stop="de")
        assert answer.json()["choices"][0] == {"index": 0, "text": "bc", "logprobs": None, "finish_reason": "stop"}
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert texts(await b.complete("a", stop="de", include_stop_str_in_output=True)) == ["bcde"]
        assert texts(await b.complete("a", stop=["de"], min_tokens=5, max_tokens=7)) == ["bcdefgh"]
        assert texts(await b.complete("a", stop=["fzz"], max_tokens=5)) == ["bcdef"]
        assert texts(await b.complete("a", max_tokens=6, stop=["cde", "g"])) == ["b"]
        await b.rest()
        assert len(b.engine.cancelled) <= 4


@in_loop
async def test_echo_and_logprobs():
    async with bench() as b:
        assert texts(await b.complete("abc", echo=True, max_tokens=2)) == ["abcde"]
        assert not b.engine.seen[-1].echo
        answer = await b.complete("abc", echo=True, max_tokens=0, logprobs=1)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["choices"][0]["logprobs"] == {
            "tokens": ["a", "b", "c"],
            "token_logprobs": [None, -0.5, -0.5],
            "top_logprobs": [None, {"b": -0.5}, {"c": -0.5}],
            "text_offset": [0, 1, 2],
        }
        answer = await b.complete("a", max_tokens=2, logprobs=2, stream=True)
        chunks = [event["choices"][0]["logprobs"] for event in events(answer.text)]
        assert [one for chunk in chunks for one in chunk["tokens"]] == ["b", "c"]
        assert [one for chunk in chunks for one in chunk["text_offset"]] == [0, 1]
        assert chunks[0]["top_logprobs"][0] == {"b": -0.5, "c": -1.5}
        answer = await b.complete("a", max_tokens=1, logprobs=0)
        assert answer.json()["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -0.5}]
        text = "abc"
        answer = await b.complete(text, echo=True, max_tokens=3, stream=True)
        assert streamed_text(answer.text) == "abcdef"
        assert texts(await b.complete(text, echo=True, max_tokens=0)) == ["abc"]


@in_loop
async def test_a_token_after_a_prompt_that_is_scored_is_reported_whatever_it_is():
    """lm-eval drops the last of the tokens reported: it must not be one of the prompt's."""
    async with bench(FakeEngine(says=[1, 70])) as b:
        answer = await b.complete("abc", echo=True, max_tokens=1, logprobs=1)
        assert answer.json()["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c", "</s>"]
        assert texts(answer) == ["abc"]
        answer = await b.complete("abc", max_tokens=1, logprobs=1)
        empty = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        assert answer.json()["choices"][0]["logprobs"] == empty
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True}
        answer = await b.post("/v1/chat/completions", **chat)
        assert answer.json()["choices"][0]["logprobs"] == {"content": []}


@in_loop
async def test_characters_of_several_tokens_come_whole():
    """Bytes after é's first are wherever the alphabet has them; what is no character is a replacement."""
    async with bench() as b:
        first, last = tokens_of("é")
        b.engine.says = [first, last, first]
        answer = await b.complete("a", max_tokens=3, logprobs=1, stream=True)
        chunks = [event["choices"][0] for event in events(answer.text)]
        assert "".join(one["text"] for one in chunks) == "é\ufffd"
        names = [one for chunk in chunks for one in chunk["logprobs"]["tokens"]]
        assert names == [r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xc3"]
        assert [served().piece(one)[1] for one in (first, last)] == [b"\xc3", b"\xa9"]


def offsets_of(answer):
    return answer.json()["choices"][0]["logprobs"]["text_offset"]


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_offsets_count_the_whole_characters_before_a_token(stream):
    """Of what the text has: a character of several tokens counts from its end, a special token where it is shown."""
    async with bench() as b:
        b.engine.says = [*tokens_of("é中"), 0, *tokens_of("a😀b")]
        body = {"max_tokens": 12, "logprobs": 0, "stream": stream}

        async def offsets(prompt, **more):
            answer = await b.complete(prompt, **body, **more)
            if not stream:
                return offsets_of(answer)
            chunks = [event["choices"][0]["logprobs"] for event in events(answer.text)]
            return [one for chunk in chunks if chunk for one in chunk["text_offset"]]

        #                       é     中       <pad> a  😀          b
        assert await offsets("xy") == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4]
        shown = [0, 0, 1, 1, 1, 2, 7, 8, 8, 8, 8, 9]
        assert await offsets("xy", skip_special_tokens=False) == shown
        assert await offsets("xé", echo=True) == [0, 1, 1, *(2 + one for one in [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4])]
        assert await offsets("x</s>y", echo=True) == [
            0,
            1,
            5,
            *(6 + one for one in [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4]),
        ]
        assert await offsets([70, 1, 71], echo=True) == [
            0,
            1,
            1,
            *(2 + one for one in [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4]),
        ]


def sentence_pieces():
    """A tokenizer as Llama 2's: pieces with "▁" for a space, one before every text, and bytes for what has no piece."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁aefiorstu",
        "tr",
        "ue",
        "true",
        "▁true",
    ]
    merges = [("t", "r"), ("u", "e"), ("tr", "ue"), ("▁", "true")]
    model = models.BPE({word: n for n, word in enumerate(words)}, merges, byte_fallback=True, unk_token="<unk>")
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(words[:3])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


@in_loop
async def test_pieces_of_sentences_keep_their_spaces(monkeypatch):
    tokenizer = sentence_pieces()
    true, spaced = map(tokenizer.token_to_id, ("true", "▁true"))
    monkeypatch.setattr(fake, "letters", sentence_pieces)
    async with bench(FakeEngine(vocab_size=274)) as b:
        b.engine.says = [spaced, true, tokenizer.token_to_id("<0x65>"), spaced]
        asked = {"max_tokens": 4, "logprobs": 1}
        choice = (await b.complete("is it", **asked)).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == [" true", "true", "e", " true"]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == " truetruee true"
        assert choice["logprobs"]["text_offset"] == [0, 5, 9, 10]
        echoed = (await b.complete("is true", **asked, echo=True)).json()["choices"][0]
        assert echoed["logprobs"]["tokens"][:5] == ["<s>", "", "i", "s", " true"]
        assert echoed["logprobs"]["text_offset"][:6] == [0, 0, 0, 1, 2, 7]
        # a prompt without text: the first token begins the text, without its space
        begun = (await b.complete([1], **asked)).json()["choices"][0]
        assert begun["text"] == "truetruee true"
        assert begun["logprobs"]["tokens"] == ["true", "true", "e", " true"]
        assert (await b.complete(None, **asked)).json()["choices"][0]["text"] == begun["text"]
        assert b.engine.seen[-1].prompt == (1,)
        chat = {
            "messages": [{"role": "user", "content": "is it"}],
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": 2,
        }
        (row,) = (await b.post("/v1/chat/completions", **chat)).json()["choices"][0]["logprobs"]["content"]
        assert (row["token"], bytes(row["bytes"])) == (" true", b" true")
        assert row["top_logprobs"][0]["token"] == " true"


def test_what_tokens_add_makes_up_the_text():
    """As `tokenizers` decodes them together, wherever they are."""
    tokenizer, chance = sentence_pieces(), random.Random(3)
    model = ServedModel(name="toy", text=Text(tokenizer), vocab_size=274)
    for _ in range(100):
        tokens = chance.choices(range(259, 274), k=chance.randint(1, 9))
        added = [model.piece(token, first=place == 0) for place, token in enumerate(tokens)]
        assert "".join(text for text, _ in added) == tokenizer.decode(tokens)
        assert b"".join(raw for _, raw in added).decode() == tokenizer.decode(tokens)


@in_loop
async def test_likely_tokens_of_one_text_have_a_name_each(monkeypatch):
    """The token that was drawn has its text as its name, whichever is likelier."""
    tokenizer = sentence_pieces()
    letter, byte = tokenizer.token_to_id("e"), tokenizer.token_to_id("<0x65>")
    monkeypatch.setattr(fake, "letters", sentence_pieces)

    def rows(self, token, most=1):
        return TokenLogprob(token=token, logprob=-2.0, top=((letter, -1.0), (byte, -2.0)))

    monkeypatch.setattr(FakeEngine, "_logprob", rows)
    async with bench(FakeEngine(vocab_size=274)) as b:
        for drawn, names in (
            (byte, {f"token_id:{letter}": -1.0, "e": -2.0}),
            (letter, {"e": -1.0, f"token_id:{byte}": -2.0}),
        ):
            b.engine.says = [drawn]
            answer = await b.complete("is", max_tokens=1, logprobs=2)
            assert answer.json()["choices"][0]["logprobs"]["top_logprobs"] == [names]


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_stop_string_may_have_special_tokens(stream):
    async with bench() as b:
        b.engine.says = [*tokens_of("ab"), 0, *tokens_of("cd")]

        async def said(**more):
            answer = await b.complete("x", max_tokens=5, stream=stream, **more)
            return streamed_text(answer.text) if stream else answer.json()["choices"][0]["text"]

        assert await said() == "abcd"
        assert await said(stop=["<pad>"]) == "ab"
        assert await said(stop=["b<pad>c"], include_stop_str_in_output=True) == "ab<pad>c"
        assert await said(stop=["<pad>d"]) == "abcd"
        assert await said(stop=["<pad>"], skip_special_tokens=False) == "ab"
        assert await said(stop=["<pad>"], min_tokens=4) == "abcd"
        await b.rest()


@in_loop
async def test_special_tokens():
    async with bench() as b:
        b.engine.wraps = 3
        body = {"ignore_eos": True, "max_tokens": 4}
        assert texts(await b.complete([2], **body)) == ["!"]
        assert texts(await b.complete([2], skip_special_tokens=False, **body)) == ["<pad></s>!<pad>"]


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"suffix": "x"}, "suffix is not supported", "suffix"),
        ({"best_of": 3, "n": 2}, "best_of may only equal n", "best_of"),
        ({"n": 0}, "n is 0: expected `int` >= 1", "n"),
        ({"temperature": -1}, "temperature is -1: expected `float` >= 0", "temperature"),
        ({"top_p": 0}, "top_p", "top_p"),
        ({"logprobs": 21}, "logprobs is 21: expected `int` <= 20", "logprobs"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1, or 0 with echo", None),
        ({"max_tokens": 512}, "has 512 positions; the prompt has 1 token and 512 more", "prompt"),
        ({"max_tokens": "3"}, 'max_tokens is "3": expected `int | null`, got `str`', "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens", "max_tokens"),
        ({"min_tokens": 17}, "min_tokens=17 must be between 0 and max_tokens=16", None),
        ({"stop": ""}, 'stop is "": expected `str` of length >= 1', "stop"),
        ({"stop": ["a"] * 65}, "stop: expected `array` of length <= 64", "stop"),
        ({"stop_token_ids": [258]}, "stop_token_ids has token 258; the model has tokens 0 to 257", "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias has 'x', which is not a token", "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias has '300'", "logit_bias"),
        ({"prompt": []}, "prompt is an empty list", "prompt"),
        ({"prompt": ""}, "the prompt is empty", None),
        ({"prompt": [[]]}, "the prompt is empty", None),
        ({"prompt": ["a", 1]}, "prompt mixes texts and tokens", "prompt"),
        ({"prompt": [300]}, "prompt has token 300", "prompt"),
        ({"prompt": [[-1]]}, "prompt", "prompt"),
        ({"prompt": None}, "the prompt is empty", None),
        ({"prompt": 5}, "prompt is 5: expected `str | array | null`", "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream", "stream_options"),
        ({"stream_options": {"x": 1}}, "stream_options.x is not a field", "stream_options.x"),
        ({"beams": 1}, "beams is not a field that this server knows", "beams"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported by this server. Leave it out.", "prompt_logprobs"),
        ({"seed": 2**64}, "seed", "seed"),
        ({"n": 100}, "100 sequences are requested; this server takes 64 sequences at once", "n"),
    ],
)
@in_loop
async def test_what_is_refused(body, said, param):
    async with bench(max_queued=64) as b:
        answer = await b.post("/v1/completions", **{"prompt": "a", **body})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert said in error["message"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert "\n" not in error["message"]
        assert not b.engine.seen
        await b.rest()


@in_loop
async def test_a_prompt_is_needed_and_another_model_is_not_found():
    async with bench() as b:
        answer = await b.post("/v1/completions", max_tokens=1)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
        answer = await b.complete(model="gpt")
        assert answer.status_code == 404
        assert answer.json()["error"] == {
            "message": "the model 'gpt' is not served here; 'toy' is.",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }


@pytest.mark.parametrize(
    ("field", "value"),
    [("min_p", 0.1), ("repetition_penalty", 1.1), ("presence_penalty", 0.5), ("frequency_penalty", -1)],
)
@in_loop
async def test_penalties_reach_the_engine_or_are_refused(field, value):
    async with bench() as b:
        answer = await b.complete(**{field: value})
        if field in Sampling.__struct_fields__:
            assert getattr(b.engine.seen[0].sampling, field) == value
        else:
            assert answer.json()["error"]["param"] == field
            assert answer.status_code == 400


@in_loop
async def test_a_model_without_a_tokenizer_takes_numbers():
    engine = FakeEngine()
    frontend = Frontend(engine)
    app = make_app(frontend, ServedModel(name="numbers", text=Text(), vocab_size=258))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        body = {"prompt": "5, 6", "max_tokens": 3, "logprobs": 1, "stop": " 9"}
        found = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert (found["text"], found["finish_reason"]) == (" 7 8", "stop")
        assert found["logprobs"]["tokens"] == [" 7", " 8", " 9"]
        for prompt in ("x", "9" * 5_000, "-1", "999"):
            assert (await client.post("/v1/completions", json={"prompt": prompt})).status_code == 400
        chat = {"messages": [{"role": "user", "content": "5"}]}
        assert "has no chat template" in (await client.post("/v1/chat/completions", json=chat)).text


@in_loop
async def test_a_fault_of_the_server_is_an_error_of_its_own(monkeypatch, caplog):
    async with bench() as b:
        b.client._transport.raise_app_exceptions = False

        def fault(*_):
            raise RuntimeError("a secret")

        monkeypatch.setattr(GrowingText, "push", fault)
        answer = await b.complete("a")
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the server failed; its log says how."
        assert "a secret" in caplog.text
        answer = await b.complete("a", stream=True)
        assert "the server failed" in answer.text
        await b.rest()
