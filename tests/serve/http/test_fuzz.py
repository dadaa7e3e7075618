"""Thousands of bodies, most of them wrong: never a fault of the server, and nothing is left behind."""

import asyncio
import json
import random
import string

from meshwright.serve.http.bodies import ChatBody, CompletionBody
from tests.serve.http.fake import bench, in_loop

ODD = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3.5,
        -0.0,
        1e308,
        2**31,
        2**63,
        10**40,
        "",
        "a",
        "abc",
        "\u0000",
        "\u2028",
        "é中😀",
    ),
    *(
        [],
        {},
        [0],
        [1, 2],
        ["a"],
        [[1]],
        [None],
        {"a": 1},
        {"1": 1},
        {"type": "text"},
        [{}],
        "a" * 5_000,
        [300],
        "stop",
    ),
    *({"include_usage": True}, [{"role": "user", "content": "x"}], [{"role": "x", "content": [{"type": "text"}]}]),
    *([{"role": "user", "content": [{"type": "text", "text": "y"}]}], [{"role": "", "content": {}}], "auto", "none"),
)
"""Values that any field is given."""
GOOD = {
    **{
        "n": 2,
        "stream": True,
        "stop": ["c", "é"],
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "top_k": 4,
        "user": "me",
    },
    **{
        "ignore_eos": True,
        "stop_token_ids": [70],
        "skip_special_tokens": False,
        "add_special_tokens": True,
        "model": "toy",
    },
    **{
        "include_stop_str_in_output": True,
        "max_completion_tokens": 4,
        "metadata": {"a": [1]},
        "store": False,
        "echo": True,
    },
}
"""Values with which a request is answered."""
FIELDS = {
    "/v1/completions": (CompletionBody.__struct_fields__, {"prompt": "a"}),
    "/v1/chat/completions": (ChatBody.__struct_fields__, {"messages": [{"role": "user", "content": "x"}]}),
    "/tokenize": (("prompt", "messages", "add_special_tokens", "tools", "model"), {"prompt": "a"}),
    "/detokenize": (("tokens", "model"), {"tokens": [1]}),
}


def body_of(chance, fields, base):
    body = {**base, "max_tokens": chance.randint(0, 6)} if chance.random() < 0.8 and len(base) else {}
    for name in chance.choices(fields, k=chance.randint(1, 4)):
        body[name] = GOOD.get(name) if chance.random() < 0.8 else chance.choice(ODD)
    if chance.random() < 0.05:
        body["".join(chance.choices(string.ascii_letters, k=3))] = 1
    raw = json.dumps(body, ensure_ascii=chance.random() < 0.5).encode()
    if chance.random() < 0.15:
        place = chance.randrange(len(raw))
        raw = (
            raw[:place]
            + bytes(chance.choices(range(256), k=chance.randint(0, 3)))
            + raw[place + chance.randint(0, 3) :]
        )
    return raw


@in_loop
async def test_no_body_makes_the_server_fail():
    chance, statuses = random.Random(5), dict[int, int]()
    async with bench() as b:

        async def send(path):
            raw = body_of(chance, *FIELDS[path])
            answer = await b.client.post(path, content=raw, headers={"content-type": "application/json"})
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404), (raw, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["message"].endswith((".", "?")), answer.text
                assert "\n" not in error["message"]

        for _ in range(100):
            await asyncio.gather(*(send(path) for path in FIELDS for _ in range(8)))
        await b.rest()
    assert statuses[200] > 600
    assert statuses[400] > 300
