"""Chats: the template's text, what is streamed, and what is refused."""

import msgspec
import pytest
from jinja2 import TemplateError

from meshwright.core.errors import InputError
from meshwright.nn.hf.chat_template import ChatTemplates, _compiled, read_chat_templates
from meshwright.serve.http.served import served_model
from meshwright.serve.model_folder import ModelFolder
from tests.parallel.generate_cases import LLAMA
from tests.serve.http import fake
from tests.serve.http.fake import TEMPLATE, bench, events, in_loop, letters, streamed_text
from tests.train.data.chats import TEMPLATES, write_tokenizer

HI = [{"role": "user", "content": "hi a"}]
PATH = "/v1/chat/completions"


def prompt_of(b):
    return letters().decode(list(b.engine.seen[-1].prompt), skip_special_tokens=False)


@in_loop
async def test_an_answer():
    async with bench() as b:
        answer = await b.post(PATH, messages=HI, max_completion_tokens=3)
        found = answer.json()
        assert prompt_of(b) == "<|user|>hi a<|assistant|>"
        assert found["id"] == f"chatcmpl-{answer.headers['x-request-id']}"
        assert found["object"] == "chat.completion"
        message = {"role": "assistant", "content": "?@A", "refusal": None}
        assert found["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
        await b.post(PATH, messages=HI, max_tokens=9)
        assert b.engine.seen[-1].max_tokens == 9
        await b.post(PATH, messages=HI, ignore_eos=True)
        assert b.engine.seen[-1].max_tokens == 512 - len(b.engine.seen[-1].prompt)


@in_loop
async def test_messages_as_the_template_reads_them():
    async with bench() as b:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
        messages = [
            {"role": "system", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None, "audio": None},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            {"role": "user"},
        ]
        answer = await b.post(PATH, messages=messages, max_tokens=1, tools=[{"é": "<a>"}], tool_choice="auto")
        assert answer.status_code == 200, answer.text
        assert prompt_of(b) == '<|system|>one\ntwo<|assistant|><|tool|>3<|user|>[{"é": "<a>"}]<|assistant|>'
        await b.post(PATH, messages=HI, max_tokens=1, add_generation_prompt=False, add_special_tokens=True)
        assert prompt_of(b) == "<|user|>hi a"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TEMPLATE, "well, "),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}", "well, "),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}", "well,"),
        ("{% for m in messages %}<|{{ m.role }}|> {{ m.content | trim }} {% endfor %}", " well, "),
    ],
)
@in_loop
async def test_the_last_message_goes_on(template, said, monkeypatch):
    """The text is that of transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = ChatTemplates({"default": _compiled(template)}, {"default": template}, {})
    model = msgspec.structs.replace(fake.served(), chat=chat)
    monkeypatch.setattr(fake, "served", lambda: model)
    messages = [*HI, {"role": "assistant", "content": "well, "}]
    ((text,), _) = render_jinja_template([messages], chat_template=template, continue_final_message=True)
    assert text.endswith("<|assistant|>" + said)
    async with bench() as b:
        for more in ({}, {"add_generation_prompt": False}):
            answer = await b.post(PATH, messages=messages, max_tokens=1, continue_final_message=True, **more)
            assert answer.status_code == 200, answer.text
            assert prompt_of(b) == text
        tokens = (await b.post("/tokenize", messages=messages, continue_final_message=True)).json()["tokens"]
        assert tokens == list(b.engine.seen[-1].prompt)


@in_loop
async def test_a_stream_begins_with_the_role_and_ends_with_the_usage():
    async with bench() as b:
        options = {"include_usage": True}
        answer = await b.post(PATH, messages=HI, max_tokens=3, stream=True, stream_options=options, n=2)
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer.text)
        for index in (0, 1):
            first, *_ = (one["choices"][0] for one in found if one["choices"] and one["choices"][0]["index"] == index)
            assert first["delta"] == {"role": "assistant", "content": ""}
            assert streamed_text(answer.text, index) == "?@A"
        assert all(one["usage"] is None for one in found[:-1])
        assert found[-1]["choices"] == []
        assert found[-1]["usage"]["completion_tokens"] == 6
        assert {one["object"] for one in found} == {"chat.completion.chunk"}
        ends = [one["choices"][0]["finish_reason"] for one in found[:-1]]
        assert [one for one in ends if one] == ["length"] * 2
        answer = await b.post(
            PATH, messages=HI, max_tokens=3, stream=True, stream_options={"continuous_usage_stats": True}
        )
        assert events(answer.text)[-1]["usage"]["completion_tokens"] == 3


@in_loop
async def test_logprobs():
    async with bench() as b:
        answer = await b.post(PATH, messages=HI, max_tokens=1, logprobs=True, top_logprobs=2)
        assert answer.json()["choices"][0]["logprobs"]["content"] == [
            {
                "token": "?",
                "logprob": -0.5,
                "bytes": [63],
                "top_logprobs": [
                    {"token": "?", "logprob": -0.5, "bytes": [63]},
                    {"token": "@", "logprob": -1.5, "bytes": [64]},
                ],
            }
        ]
        answer = await b.post(PATH, messages=HI, max_tokens=1, logprobs=True)
        assert answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages: expected `array` of length >= 1"),
        ({"messages": [{"content": "x"}]}, "messages[0]: object missing required field `role`"),
        ({"messages": [{"role": "bad"}]}, "the chat template refuses it: roles must be good"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood is not a field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content has a part that is not text",
        ),
        ({"response_format": {"type": "json_schema"}}, "the type json_schema and no json_schema"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "more than once"),
        ({"structured_outputs": {}}, "structured_outputs is empty"),
        ({"structured_outputs": {"regex": "("}}, "the regex is not valid"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens=2 and a grammar exclude each other"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        (
            {"tool_choice": "required"},
            "invalid enum value 'required': give one of auto, none",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "give one of auto, none"),
        ({"temperature": 1e30}, "temperature is 1e30: expected `float` <= 100.0"),
        ({"messages": [{"role": "user", "content": "x" * 9_000}]}, "messages has 9,021 characters; 512 positions hold"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"max_tokens": 500}, "has 512 positions"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "has 512 positions"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs has messages"),
        ({"chat_template_kwargs": {"add_generation_prompt": [], "self": 1, "x y": 2}, "max_tokens": 505}, "positions"),
        ({"prompt": "x"}, "prompt is not a field"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    ],
)
@in_loop
async def test_what_is_refused(body, said):
    async with bench() as b:
        answer = await b.post(PATH, **{"messages": HI, **body})
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
        await b.rest()


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_of_a_folder(name, tmp_path):
    folder = write_tokenizer(tmp_path, TEMPLATES[name])
    found = read_chat_templates(folder)
    text = found.render([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert "hello" in text


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab"]}}}},
        {"structured_outputs": {"choice": ['"ab"', "ac"]}},
        {"structured_outputs": {"json": {"const": "ab"}}},
        {"structured_outputs": {"regex": '"ab"'}},
        {"structured_outputs": {"grammar": "start: /.ab./"}},
    ],
)
@in_loop
async def test_the_form_of_an_answer_goes_to_the_engine(form):
    async with bench() as b:
        assert (await b.post(PATH, messages=HI, max_tokens=3, **form)).status_code == 200
        state = b.engine.seen[-1].grammar.deep_copy()
        assert state.consume_tokens(letters().encode('"ab"').ids)
        assert state.is_accepting()
        free = await b.post(PATH, messages=HI, max_tokens=3, response_format={"type": "text"})
        assert free.status_code == 200
        assert b.engine.seen[-1].grammar is None


def test_a_folder_is_served_under_its_name(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    found = ModelFolder(tmp_path, LLAMA, None, frozenset({3}), "fp32")
    model = served_model(found, "mine")
    assert (model.name, model.end_tokens) == ("mine", {3})
    assert model.chat.render([{"role": "user", "content": "x"}]) == "<|user|>x"
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(InputError, match="is not valid"):
        served_model(found, "mine")
    assert issubclass(TemplateError, Exception)
