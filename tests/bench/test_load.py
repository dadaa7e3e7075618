"""The client that loads a server: what it sends and what it notes, over a real socket."""

import asyncio
from statistics import median

import msgspec
import numpy as np
import pytest

from meshwright.batching.record import LatencyTargets
from meshwright.batching.traffic import traffic_of
from meshwright.bench.serving.load import LoadClient, ServerFacts
from meshwright.core.errors import CannotRunError, InputError
from tests.serve.http.fake import FakeEngine, in_loop, letters, listening

STEP_S = 0.02
SAYS = letters().encode("a").ids * 400
"""A letter of the fake's alphabet again and again, so that every token is an event."""


@in_loop
async def test_it_learns_what_the_server_has():
    async with listening() as (_, port):
        client = LoadClient(f"http://127.0.0.1:{port}/v1")
        assert await client.facts() == ServerFacts(name="toy", max_len=512, vocab_size=258)
        client.close()


@in_loop
async def test_every_request_is_sent_when_it_arrives_and_its_tokens_are_timed():
    traffic = traffic_of([0.0, 0.1, 0.15], [5, 3, 7], [4, 1, 6])
    async with listening(FakeEngine(delay_s=STEP_S, says=SAYS)) as (bench, port):
        client = LoadClient(f"http://127.0.0.1:{port}")
        found = await client.send(traffic, await client.facts())
        seen = bench.engine.seen
    assert [(len(one.prompt), one.max_tokens) for one in seen] == [(5, 4), (3, 1), (7, 6)]
    assert all(one.stop_tokens == frozenset() and one.sampling.temperature == 0 for one in seen)
    record = found.record
    assert found.failures == ()
    late_s = record.traffic.arrival_s - traffic.arrival_s
    assert (late_s >= 0).all()
    assert late_s.max() < 0.5
    assert len(record.gaps.gap_s) == 3 + 0 + 5
    assert STEP_S * 0.5 < median(record.gaps.gap_s) < STEP_S * 10
    assert (record.ttft_s > STEP_S * 0.5).all()
    assert np.isnan(record.tpot_s[1])
    assert record.tpot_s[0] == pytest.approx((record.times.ended_s - record.times.first_token_s)[0] / 3)
    summary = record.summary(LatencyTargets(ttft_s=1e-6), warm_up=0)
    assert summary.met == summary.goodput_per_s == 0
    assert summary.output_tokens_per_s == pytest.approx(11 / (summary.end_s - summary.start_s))


@in_loop
async def test_concurrency_bounds_what_is_on_its_way():
    traffic = traffic_of(np.zeros(6), np.full(6, 2), np.full(6, 3))
    async with listening(FakeEngine(delay_s=STEP_S, says=SAYS)) as (_, port):
        client = LoadClient(f"http://127.0.0.1:{port}")
        record = (await client.send(traffic, await client.facts(), concurrency=2)).record
    starts, ends = record.traffic.arrival_s, record.times.ended_s
    assert max(int(((starts <= at) & (ends > at)).sum()) for at in starts) <= 2


@in_loop
async def test_prompts_share_their_prefixes_alone():
    traffic = traffic_of(np.zeros(4), np.full(4, 12), np.full(4, 1), prefix=[7, 7, 8, -1], prefix_len=[8, 4, 8, 0])
    async with listening(FakeEngine(says=SAYS)) as (bench, port):
        client = LoadClient(f"http://127.0.0.1:{port}")
        facts = await client.facts()
        for _ in range(2):
            await client.send(traffic, facts)
        prompts = [one.prompt for one in bench.engine.seen]
    first = {one[:4] for one in prompts}
    assert len(first) == 2 * 3
    assert len(set(prompts)) == 8


@in_loop
async def test_refused_requests_are_failures():
    traffic = traffic_of(np.zeros(3), [5, 600, 5], [2, 2, 2])
    async with listening(FakeEngine(says=SAYS)) as (_, port):
        client = LoadClient(f"http://127.0.0.1:{port}")
        found = await client.send(traffic, await client.facts())
    assert len(found.record.traffic) == 2
    assert found.failures[0].startswith("status 400")


@in_loop
async def test_a_key_is_sent():
    async with listening(FakeEngine(says=SAYS), {"api_keys": ("k",)}) as (_, port):
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(CannotRunError, match="status 401"):
            await LoadClient(url).facts()
        client = LoadClient(url, api_key="k")
        found = await client.send(traffic_of([0.0], [3], [2]), await client.facts())
    assert found.failures == ()


@in_loop
async def test_a_server_that_fails_is_said():
    engine = FakeEngine(says=SAYS, fails=RuntimeError("broken"))
    async with listening(engine) as (_, port):
        client = LoadClient(f"http://127.0.0.1:{port}")
        with pytest.raises(CannotRunError, match="no request was answered"):
            await client.send(traffic_of([0.0], [3], [2]), await client.facts())


def test_nobody_there_is_one_line():
    with pytest.raises(CannotRunError, match="does not answer"):
        asyncio.run(LoadClient("http://127.0.0.1:9").facts())
    with pytest.raises(InputError, match="not the URL"):
        LoadClient("localhost:80")


@in_loop
async def test_events_are_counted_across_pieces():
    """A server may cut its answer anywhere."""
    event = b'data: {"choices":[{"text":"a"}]}\n\n'
    body = event * 3 + b"data: [DONE]\n\n"
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Type: text/event-stream\r\n\r\n%b" % (len(body), body)
    asked, ended = [], asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        asked.append(msgspec.json.decode(await reader.readexactly(length)))
        for start in range(0, len(answer), 7):
            writer.write(answer[start : start + 7])
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()
        await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = LoadClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        record = (await client.send(traffic_of([0.0], [4], [3]), ServerFacts(name="other"))).record
        await ended.wait()
    assert len(record.gaps.gap_s) == 2
    assert asked[0]["model"] == "other"
    assert asked[0]["ignore_eos"] is True
    assert all(10 <= token < 1000 for token in asked[0]["prompt"])
