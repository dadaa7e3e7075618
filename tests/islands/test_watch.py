"""What is watched while islands train: damaged states, slow islands, and islands that hang."""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.islands.exchange import Timeouts
from meshwright.islands.service import Bounds
from meshwright.islands.supervisor import Programs, Supervisor, service_program
from meshwright.islands.watch import SLOW_STEPS, StepTimeouts, Stragglers, odd_islands
from tests.islands.runs import ToyRun
from tests.test_architecture import ROOT

QUICK = {"beat_s": 1.0, "start_s": 20.0}


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        ([(0, "a"), (1, "a"), (2, "a")], set()),
        ([(0, "a"), (1, "b"), (2, "a")], {1}),
        ([(0, "a"), (1, "b"), (2, "c"), (3, "a")], {1, 2}),
        ([(0, "a"), (1, "b")], {0, 1}),
        ([(0, "a"), (0, "x"), (1, "a"), (1, "y"), (2, "a"), (2, "x")], {1}),  # of two processes each
        ([(0, "a"), (1, ""), (2, "a")], set()),
        ([(0, "a"), (1, "a"), (2, "b"), (3, "b")], {0, 1, 2, 3}),
    ],
)
def test_the_odd_ones_are_those_that_differ_from_most(digests: list[tuple[int, str]], odd: set[int]):
    assert odd_islands(digests) == odd


def test_a_slow_island_is_named_once_and_again_when_it_is_not():
    stragglers, lines = Stragglers(), list[str]()
    for step in range(200):
        is_slow = 50 <= step < 100 or step == 120
        lines += [f"{step}: {line}" for line in stragglers.seen({0: 1.0, 1: 1.6 if is_slow else 1.1, 2: 0.9})]
    assert lines == [
        f"{49 + SLOW_STEPS}: island 1 is slow: it works 1.6 s a step, the others 0.95 s",
        f"{99 + SLOW_STEPS}: island 1 is no longer slow: it works 1.1 s a step, the others 0.95 s",
    ]


def test_timeouts_follow_the_steps_and_nest(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("meshwright.islands.watch.time.monotonic", lambda: now[0])
    for step_s, expected_s in ((0.1, 30.0), (20.0, 200.0), (100.0, 1000.0)):
        pace = StepTimeouts(Timeouts())
        for _ in range(10):
            now[0] += step_s
            pace.step_done()
        timeouts, long = pace.now, pace.long
        assert timeouts.step_s == pytest.approx(expected_s)
        assert timeouts.sum_s < timeouts.step_s < timeouts.start_s
        assert timeouts.step_s < long.step_s < long.start_s
        now[0] += 1e6  # an evaluation, which is no step
        pace.step_done()
        assert pace.now.step_s == pytest.approx(expected_s)


def test_the_odd_one_out_is_named_and_takes_the_state_of_the_others(tmp_path: Path):
    with ToyRun(tmp_path, Bounds(count=3, **QUICK), steps=100) as run:
        run.serve()
        for island in range(3):
            run.start(island)
        run.until_step(20)
        run.kill(1, signal.SIGUSR1)
        run.until("the state of island 1 differs from the others: it copies theirs")
        step = run.lines()[-1]["step"]
        run.kill(0, signal.SIGUSR1)  # the one that decides
        run.until("the state of island 0 differs from the others")
        run.wait()
        run.require_whole()
        assert len({line["generation"] for line in run.lines() if line["step"] >= step}) == 1, "nobody had to leave"


def test_an_island_that_is_often_odd_ends(tmp_path: Path):
    with ToyRun(tmp_path, Bounds(count=3, **QUICK), steps=150) as run:
        run.serve()
        for island in range(3):
            run.start(island)
        for times in (1, 2, 3):
            run.until_step(25 * times)
            run.kill(2, signal.SIGUSR1)
        run.until("the state of this island has differed 3 times")
        run.wait(0, 1)
        run.require_whole()


def test_two_that_differ_go_back_to_what_was_saved(tmp_path: Path):
    with ToyRun(tmp_path, Bounds(count=2, **QUICK), steps=100) as run:
        run.serve()
        for island in range(2):
            run.start(island, every=25)
        run.until_step(32)
        run.kill(1, signal.SIGUSR1)
        run.until("the states of islands 0 and 1 differ without a majority: all return to an earlier step")
        run.wait()
        run.require_whole()
        steps = [line["step"] for line in run.lines() if line["leads"]]
        assert steps.count(26) == 2
        assert steps.count(25) == 1


def test_a_slow_island_is_named_while_it_is(tmp_path: Path):
    with ToyRun(tmp_path, Bounds(count=3, **QUICK), steps=130) as run:
        run.serve()
        for island in range(3):
            run.start(island)
        run.until_step(20)
        run.kill(2, signal.SIGHUP)
        run.until("island 2 is slow: it works 0.09 s a step, the others 0.03 s")
        run.kill(2, signal.SIGHUP)
        run.until("island 2 is no longer slow")
        run.wait()
        run.require_whole()


def test_one_that_hangs_is_named_killed_and_started_again(tmp_path: Path):
    """Its thread goes on to say that it lives."""
    lines = list[str]()
    toy = [sys.executable, "-m", "tests.islands.toy", str(tmp_path), "250", "0.05", "0", "1"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    programs = Programs(island=toy, service=service_program(), environment=lambda process, port: environment)

    async def supervise() -> int:
        bounds = Bounds(count=3, **QUICK)
        keeper = Supervisor(programs, bounds, islands=3, key="k", say=lines.append, show=lambda *_: None)
        hang = asyncio.create_task(_after(lambda: _steps(tmp_path) > 20, lambda: keeper.islands[1].children[0]))
        status = await keeper.run()
        await hang
        return status

    assert asyncio.run(supervise()) == 0
    text = "\n".join(lines)
    assert re.search("island 1 is out: island [02] waited for it too long; 2 of 3 islands train", text)
    assert "island 1 has not rejoined in 8 s and is killed" in text
    assert "island 1 was killed by SIGKILL; it restarts" in text
    assert text.index("island 1 is in") > text.index("it restarts")


async def _after(is_time: Callable[[], bool], child: Callable[[], asyncio.subprocess.Process]) -> None:
    end = time.monotonic() + 60
    while not is_time() and time.monotonic() < end:
        await asyncio.sleep(0.05)
    child().send_signal(signal.SIGUSR2)


def _steps(folder: Path) -> int:
    return max((path.read_bytes().count(b"\n") for path in folder.glob("log-*")), default=0)
