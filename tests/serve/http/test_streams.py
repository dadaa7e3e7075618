"""Streams say what whole answers say, and a client that goes or is slow harms nobody; over real sockets."""

import asyncio
import json
import random
import time

from meshwright.serve.http.run import MOST_HEAD_BYTES
from tests.serve.http.fake import FakeEngine, bench, in_loop, letters, listening, streamed_text


@in_loop
async def test_streams_equal_whole_answers_for_any_stop_strings():
    chance = random.Random(1)
    alphabet = letters().encode("abé").ids
    async with bench() as b:
        for trial in range(60):
            b.engine.says = chance.choices(alphabet, k=30)
            stop = ["".join(chance.choices("abé", k=chance.randint(1, 5))) for _ in range(chance.randint(0, 3))]
            body = {"max_tokens": 30, "stop": stop, "include_stop_str_in_output": bool(trial % 2)}
            whole = (await b.complete("a", **body)).json()["choices"][0]
            stream = await b.complete("a", **body, stream=True)
            assert streamed_text(stream.text) == whole["text"]
            assert f'"finish_reason":"{whole["finish_reason"]}"' in stream.text
            full = letters().decode(b.engine.says)
            ends = [full.find(one) + len(one) for one in stop if one in full]
            assert whole["finish_reason"] == ("stop" if ends else "length")
            if ends and trial % 2:
                assert whole["text"] == full[: min(ends)]
        await b.rest()


async def opened(port, body, path="/v1/completions"):
    """A connection whose request is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    return reader, writer


@in_loop
async def test_a_client_that_goes_frees_its_request_within_a_step():
    async with listening(FakeEngine(delay_s=0.02)) as (b, port):
        for stream in (True, False):
            body = {"prompt": "a", "max_tokens": 400, "stream": stream, "ignore_eos": True, "n": 2}
            reader, writer = await opened(port, body)
            if stream:
                await reader.readuntil(b"data: ")
            while len(b.engine.live) < 2:
                await asyncio.sleep(0.001)
            writer.close()
            await writer.wait_closed()
            steps = b.engine.steps
            await b.rest()
            assert b.engine.steps <= steps + 2
        assert sorted(b.engine.cancelled) == [1, 2, 3, 4]


@in_loop
async def test_a_slow_reader_stalls_nobody():
    async with listening(FakeEngine(max_len=100_000)) as (b, port):
        body = {"prompt": "a", "max_tokens": 10_000, "stream": True, "ignore_eos": True, "logprobs": 20}
        reader, writer = await opened(port, body)
        await reader.readuntil(b"data: ")
        start = time.perf_counter()
        for _ in range(3):
            answer = await b.complete("a", max_tokens=5, stream=True)
            assert streamed_text(answer.text) == "bcdef"
        assert time.perf_counter() - start < 30  # what stalls does so for ever
        writer.close()
        await b.rest(10)


@in_loop
async def test_many_streams_at_once():
    async with listening(FakeEngine(wraps=90, delay_s=0.001)) as (b, _):

        async def one(letter, tokens):
            answer = await b.complete(letter, max_tokens=tokens, stream=True, ignore_eos=True)
            return streamed_text(answer.text)

        texts = await asyncio.gather(*(one(letter, 3 + place) for place, letter in enumerate("abcdefghij" * 3)))
        for place, text in enumerate(texts):
            first = letters().token_to_id("abcdefghij"[place % 10])
            tokens = [(first + 1 + step) % 90 for step in range(3 + place)]
            assert text == letters().decode(tokens)
        await b.rest()


@in_loop
async def test_headers_without_an_end_are_cut_off():
    """A long body is none of them, also behind an earlier request on its connection."""
    async with listening() as (b, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ")
        for _ in range(MOST_HEAD_BYTES // 1024):
            writer.write(b"a" * 1024)
            await writer.drain()
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"the headers have more than 65,536 bytes." in answer
        whole = {65_000: 200, 66_000: 431, 100_000: 431}  # read at once
        for num_bytes, status in whole.items():
            assert (await b.client.get("/health", headers={"x-long": "a" * num_bytes})).status_code == status
        for _ in range(3):
            asked = await b.client.post("/tokenize", json={"prompt": "a" * 100_000})
            assert asked.status_code == 200, asked.text
        await b.rest()


@in_loop
async def test_what_is_not_http_gets_an_error_in_json():
    async with listening() as (b, port):
        for sent in (b"GARBAGE\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert json.loads(body)["error"]["message"] == "the request is not valid HTTP. Send HTTP/1.1."
        await b.rest()
