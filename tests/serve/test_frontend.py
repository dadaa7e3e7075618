"""The engine's thread: outputs in order, cancellation, limits, failure, and its end."""

import asyncio
import threading

import pytest

from meshwright.core.errors import InputError
from meshwright.serve.frontend import BusyError, DeadlineError, Frontend, UnavailableError
from meshwright.serve.request import TokenRequest
from tests.serve.http.fake import FakeEngine, in_loop


def asked(last=10, **more):
    return TokenRequest(prompt=(1, last), **{"max_tokens": 4, **more})


async def started(engine=None, **more):
    frontend = Frontend(engine or FakeEngine(), **more)
    frontend.start()
    return frontend


async def at_rest(frontend):
    while frontend.engine.live or frontend.in_system:
        await asyncio.sleep(0.001)


async def all_of(feed):
    found = []
    while arrived := await feed.take():
        found += arrived
    return found


@in_loop
async def test_outputs_come_in_order_and_end():
    frontend = await started()
    with frontend.open([asked()]) as feed:
        found = [output for _, output, _ in await all_of(feed)]
    assert [(one.token, one.finish) for one in found] == [(11, None), (12, None), (13, None), (14, "length")]
    with frontend.open([asked(10), asked(20)]) as feed:
        tokens = {0: [], 1: []}
        while arrived := await feed.take():
            for place, output, _ in arrived:
                tokens[place].append(output.token)
    assert tokens == {0: [11, 12, 13, 14], 1: [21, 22, 23, 24]}
    await frontend.close()


@in_loop
async def test_a_consumer_that_leaves_cancels_its_request():
    engine = FakeEngine(delay_s=0.002)
    frontend = await started(engine)
    with frontend.open([asked(max_tokens=500)]) as feed:
        await feed.take()
    steps = engine.steps
    await at_rest(frontend)
    assert engine.cancelled == [1]
    assert engine.steps <= steps + 2
    # of several, one
    with frontend.open([asked(max_tokens=3), asked(max_tokens=500)]) as feed:
        feed.cancel(1)
        feed.cancel(1)
        while arrived := await feed.take():
            assert {place for place, _, _ in arrived} == {0}
    await at_rest(frontend)
    assert engine.cancelled == [1, 3]
    await frontend.close()


@in_loop
async def test_a_request_that_the_engine_refuses_takes_the_others_with_it():
    frontend = await started()
    with pytest.raises(InputError, match="for the engine"):
        frontend.open([asked(), asked(max_tokens=10_000)])
    assert (frontend.engine.seen, frontend.in_system) == ([], 0)
    await frontend.close()


@in_loop
async def test_no_more_requests_than_allowed():
    frontend = await started(FakeEngine(delay_s=0.005), max_queued=2)
    with frontend.open([asked(max_tokens=300)] * 2):
        with pytest.raises(BusyError, match="2 of at most 2 requests are in the system") as error:
            frontend.open([asked()])
        assert 1 <= error.value.retry_after_s <= 60
    with frontend.open([asked()]) as feed:
        assert await feed.take()
    await frontend.close()


@in_loop
async def test_a_deadline_ends_a_request():
    frontend = await started(FakeEngine(delay_s=0.005), deadline_s=0.05)
    with frontend.open([asked(max_tokens=500)]) as feed, pytest.raises(DeadlineError, match=r"not done in 0.05 s"):
        await all_of(feed)
    await at_rest(frontend)
    assert frontend.engine.cancelled == [1]
    await frontend.close()


@in_loop
async def test_an_engine_that_fails_leaves_nobody_waiting():
    engine = FakeEngine(delay_s=0.002)
    frontend = await started(engine)
    with frontend.open([asked(max_tokens=400)]) as feed:
        await feed.take()
        engine.fails = RuntimeError("out of\nmemory")
        with pytest.raises(UnavailableError, match=r"the engine failed: out of\."):
            await all_of(feed)
    assert not frontend.available
    with pytest.raises(UnavailableError, match="the engine failed"):
        frontend.open([asked()])
    assert not frontend.in_system
    await frontend.close()


@in_loop
async def test_draining_finishes_what_runs():
    frontend = await started(FakeEngine(delay_s=0.002))
    with frontend.open([asked(max_tokens=20)]) as feed:
        frontend.stop_taking()
        with pytest.raises(UnavailableError, match="stopping"):
            frontend.open([asked()])
        found = await all_of(feed)
    assert len(found) == 20
    await frontend.close()


@in_loop
async def test_closing_ends_the_thread_and_tells_consumers():
    frontend = await started(FakeEngine(delay_s=0.002))
    with frontend.open([asked(max_tokens=400)]) as feed:
        await feed.take()
        await frontend.close()
        with pytest.raises(UnavailableError, match="the server stopped before"):
            await all_of(feed)
    assert "engine" not in {thread.name for thread in threading.enumerate()}


@in_loop
async def test_a_front_end_that_never_started_can_be_closed():
    frontend = Frontend(FakeEngine())
    with pytest.raises(UnavailableError):
        frontend.open([asked()])
    await frontend.close()
