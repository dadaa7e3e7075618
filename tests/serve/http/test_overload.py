"""A server with a real engine under ten times the load that it can take, and what becomes of it afterwards."""

import asyncio
import json
import os
import time
from contextlib import AsyncExitStack
from functools import partial

import httpx
import pytest

from meshwright.serve.frontend import Frontend
from meshwright.serve.opening import open_engine
from meshwright.serve.options import EngineOptions
from meshwright.serve.request import TokenRequest
from tests.clients.folder import NAME, make_folder
from tests.clients.server import Server

pytestmark = pytest.mark.slow
RUNNING, QUEUED = 4, 16
SECONDS = int(os.environ.get("OVERLOAD_SECONDS", "20"))
OPTIONS = ("--max-requests", str(RUNNING), "--max-queued", str(QUEUED), "--max-len", "256", "--token-budget", "64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("overload") / NAME)


@pytest.fixture
def server(folder, tmp_path):
    with Server(folder, *OPTIONS, "--page-len", "16", log=tmp_path / "log") as started:
        yield started


def body(tokens, **more):
    return {"prompt": "A mesh of devices", "max_tokens": tokens, "ignore_eos": True, **more}


async def read(answer, most=None):
    """The text events of a stream, up to ``most`` of them."""
    found = []
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            found.append(line[6:])
            if most is not None and len(found) == most:
                break
    return found


def client_of(server):
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=None))


def test_ten_times_the_capacity(server):
    """Ten times as many clients as may be in the system, each of which asks again at once."""
    counts = {"done": 0, "busy": 0, "gone": 0}
    memory, waiting = [], []

    async def whole(client, number):
        answer = await client.post("/v1/completions", json=body(8 + number % 24))
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            counts["busy"] += 1
            return
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8 + number % 24
        counts["done"] += 1

    async def streamed(client, number):
        given = body(8 + number % 24, stream=True)
        async with client.stream("POST", "/v1/completions", json=given) as answer:
            if answer.status_code == 429:
                counts["busy"] += 1
            elif number % 5 == 0:
                await read(answer, 1)
                counts["gone"] += 1
            else:
                events = await read(answer)
                assert events[-1] == "[DONE]"
                assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
                counts["done"] += 1

    async def work(client, number, until):
        while time.monotonic() < until:
            await (streamed if number % 2 else whole)(client, number)
            await asyncio.sleep(0.05)

    async def watch(client, until):
        while time.monotonic() < until:
            memory.append(server.memory_bytes())
            figures = (await client.get("/metrics")).text
            line = next(one for one in figures.splitlines() if one.startswith("vllm:num_requests_waiting{"))
            waiting.append(float(line.rpartition(" ")[2]))
            assert (await client.get("/health")).status_code == 200
            await asyncio.sleep(0.5)

    async def run():
        async with client_of(server) as client:
            server.compile_all()
            until = time.monotonic() + SECONDS
            work_of_all = (work(client, number, until) for number in range(10 * QUEUED))
            await asyncio.gather(watch(client, until), *work_of_all)

    asyncio.run(run())
    found = server.rest()
    assert server.process.poll() is None
    assert counts["done"] > RUNNING
    assert counts["busy"] > 0
    assert max(waiting) <= QUEUED
    assert found["kv_cache_usage_perc"] == 0
    half = len(memory) // 2
    growth = max(memory[half:]) - max(memory[:half])
    assert growth < 64 * 2**20, f"memory grew: {[one >> 20 for one in memory]} MiB"


def test_what_is_cancelled_frees_its_pages_within_a_step(folder):
    """Their slots and pages are free before the step that follows is planned."""
    options = EngineOptions(max_requests=RUNNING, max_len=256, token_budget=64, page_len=16, mesh={"tensor": 1})
    engine = open_engine(folder, options, in_background=False).engine

    def request(first, tokens):
        return TokenRequest(prompt=(first, *range(100, 140)), max_tokens=tokens)

    async def run():
        frontend = Frontend(engine)
        frontend.start()
        with frontend.open([request(5, 210)]) as stays:
            await stays.take()
            for first in range(6, 10):
                with frontend.open([request(first, 200)] * 2) as goes:
                    await goes.take()
                    assert engine.state().running == 3
                after = asyncio.get_running_loop().create_future()
                frontend.command(lambda to=after: frontend._post(partial(to.set_result, engine.state())))
                state = await after
                assert (state.running, state.waiting) == (1, 0)
                assert state.pages_used <= 256 // 16
        await frontend.close()

    asyncio.run(run())
    assert (engine.state().running, engine.state().waiting, engine.state().pages_used) == (0, 0, 0)


def test_clients_that_go_free_their_pages(server):
    async def run():
        async with client_of(server) as client:
            for _ in range(3):
                async with AsyncExitStack() as streams:  # half of them run, half wait
                    for _ in range(2 * RUNNING):
                        given = body(200, stream=True)
                        await streams.enter_async_context(client.stream("POST", "/v1/completions", json=given))

    before = server.rest()
    asyncio.run(run())
    found = server.rest(5)
    assert found["kv_cache_usage_perc"] == 0
    assert found["generation_tokens"] - before["generation_tokens"] < 3 * 2 * RUNNING * 200


def test_readers_that_are_slow_stall_nobody(server):
    async def run():
        async with client_of(server) as client:
            host, port = server.url.removeprefix("http://").split(":")
            raw = json.dumps(body(200, stream=True, logprobs=20)).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}"
            held = []
            for _ in range(2):  # they never read what they asked for
                reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
                writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + raw)
                held.append((reader, writer))
            await asyncio.sleep(0.5)
            start = time.monotonic()
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body(50)) for _ in range(8)))
            took_s = time.monotonic() - start
            assert [one.status_code for one in answers] == [200] * 8
            for _, writer in held:
                writer.transport.abort()
            await asyncio.sleep(0.1)  # a transport is closed in the loop's next round
            return took_s

    assert asyncio.run(run()) < 30
    server.rest(5)


def test_a_signal_lets_what_was_accepted_finish(folder, tmp_path):
    with Server(folder, *OPTIONS, log=tmp_path / "log") as server:

        async def run():
            async with client_of(server) as client:
                asked = [asyncio.create_task(client.post("/v1/completions", json=body(200))) for _ in range(QUEUED)]
                while server.figures()["num_requests_running"] < RUNNING:
                    await asyncio.sleep(0.01)
                server.process.terminate()
                answers = await asyncio.gather(*asked)
                assert [one.status_code for one in answers] == [200] * QUEUED
                assert {one.json()["usage"]["completion_tokens"] for one in answers} == {200}
                with pytest.raises(httpx.TransportError):
                    await client.post("/v1/completions", json=body(1))

        asyncio.run(run())
        assert server.stop() == 0
