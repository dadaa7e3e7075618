"""Bodies as clients and routers send them: OpenAI's fields one by one, requests that routers pass on, unknown fields.

`openai_fields.json` has each field of the request types of the `openai` package, in the version of the lock: values
that are taken, and values that would change an answer and are refused. `router_requests.json` has what routers sent to
a server that wrote it down.
"""

import json
from pathlib import Path
from typing import get_args, get_type_hints

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat import completion_create_params as chat_create_params

from tests.serve.http.fake import bench, in_loop

HERE = Path(__file__).parent
FIELDS = json.loads((HERE / "openai_fields.json").read_text())
ROUTERS = json.loads((HERE / "router_requests.json").read_text())
CHAT = "/v1/chat/completions"
BASES = {"/v1/completions": {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}


def test_every_field_of_openai_is_in_the_table():
    """After the lock's `openai` changes: decide for each new field what is taken and what is refused."""
    assert openai.__version__ == FIELDS["openai"]
    types = {
        "/v1/completions": [completion_create_params.CompletionCreateParamsStreaming],
        CHAT: [chat_create_params.CompletionCreateParamsStreaming],
        "message": get_args(ChatCompletionMessageParam),
    }
    for where, kinds in types.items():
        assert sorted(FIELDS[where]) == sorted({name for kind in kinds for name in get_type_hints(kind)})


@pytest.mark.parametrize("where", [*BASES, "message"])
@in_loop
async def test_values_that_ask_for_nothing_are_taken_and_others_are_refused_by_name(where):
    async with bench() as b:
        for name, values in FIELDS[where].items():
            for kind in ("taken", "refused"):
                for value in values.get(kind, ()):
                    path, body = (where, {**BASES[where], name: value}) if where in BASES else (CHAT, {})
                    if where == "message":
                        body = {"messages": [*BASES[CHAT]["messages"], {"role": "assistant", name: value}]}
                    answer = await b.post(path, **body)
                    assert answer.status_code == (200 if kind == "taken" else 400), (name, value, answer.text)
                    if kind == "refused":
                        error = answer.json()["error"]
                        assert error["param"] == (name if where in BASES else "messages")
                        assert name in error["message"]
                        assert "\n" not in error["message"]


@pytest.mark.parametrize("number", range(len(ROUTERS["requests"])))
@in_loop
async def test_requests_that_routers_pass_on_are_answered(number):
    row = ROUTERS["requests"][number]
    async with bench() as b:
        given = {"headers": row["headers"], **({"json": row["body"]} if row["body"] else {})}
        answer = await b.client.request(row["method"], row["path"], **given)
        assert answer.status_code == row["status"], answer.text
        for request in b.engine.seen:
            body = row["body"]
            assert request.min_tokens == body.get("min_tokens", 0)
            ends = {*body.get("stop_token_ids", ()), *(() if body.get("ignore_eos") else (1,))}
            assert request.stop_tokens == (ends if request.max_tokens > 1 else request.stop_tokens)


@in_loop
async def test_settings_of_routers_are_honoured():
    async with bench() as b:
        kept = await b.complete("a", stop="de", no_stop_trim=True)
        assert kept.json()["choices"][0]["text"] == "bcde"
        # a router asks the server that computes the prompt for one token, whatever its form
        form = {"response_format": {"type": "json_object"}, "max_tokens": 3}
        assert (await b.complete("a", min_tokens=1, **form)).status_code == 200
        empty = {"structured_outputs": {"regex": "a*"}, "max_tokens": 3}
        for more in ({"min_tokens": 2, **form}, {"min_tokens": 1, **empty}):
            assert "and a grammar exclude each other" in (await b.complete("a", **more)).json()["error"]["message"]
        refused = await b.complete("a", return_hidden_states=True)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "return_hidden_states"


@in_loop
async def test_all_unknown_fields_are_named():
    async with bench() as b:
        said = await b.complete("a", beams=1, min_p=0.1, stream_options={"x": 1, "include_usage": None}, width=[])
        assert said.json()["error"]["message"] == (
            "beams, stream_options.x, width are not fields that this server knows. Leave them out."
        )
        assert said.json()["error"]["param"] == "beams"
        said = await b.complete("a", max_token=1)
        assert said.json()["error"]["message"] == (
            "max_token is not a field that this server knows. Did you mean 'max_tokens'? If not, leave it out."
        )
        messages = [{"role": "user", "content": [{"type": "text", "text": "x"}], "mood": 1}, {"role": "user", "a": 1}]
        said = await b.post(CHAT, messages=messages, n=1, **{f"x{number}": 1 for number in range(9)})
        assert said.json()["error"]["message"].startswith(
            "messages[0].mood, messages[1].a, x0, x1, x2, x3, x4, x5 and 3"
        )
        twice = b'{"prompt": "a", "stream_options": {"x": 1}, "stream_options": null}'
        said = await b.client.post("/v1/completions", content=twice, headers={"content-type": "application/json"})
        assert said.json()["error"]["message"].startswith("stream_options.x is not a field")
