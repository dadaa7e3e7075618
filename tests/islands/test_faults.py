"""Islands under faults: real processes, which are killed, stopped, cut off and started again."""

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.islands.service import Bounds
from tests.islands.runs import ToyRun

QUICK = {"beat_s": 1.0, "start_s": 20.0}


@pytest.fixture
def four(tmp_path: Path) -> Iterator[ToyRun]:
    with ToyRun(tmp_path, Bounds(count=4, **QUICK), steps=150) as run:
        run.serve()
        for island in range(4):
            run.start(island)
        yield run


def test_without_a_fault_all_take_part_in_every_step(four: ToyRun):
    four.wait()
    four.require_whole()
    assert {line["total"] for line in four.lines()} == {10.0}


@pytest.mark.parametrize("island", [0, 2])
def test_a_killed_island_is_dropped_and_a_new_start_of_it_comes_back(four: ToyRun, island: int):
    four.until_step(20)
    four.kill(island)
    four.until(f"island {island} is out: its process ended")
    four.start(island)
    four.until(f"island {island} is in")
    four.wait()
    four.require_whole()
    assert {line["total"] for line in four.lines()} == {7.0, 10.0}


def test_a_stopped_island_is_dropped_and_comes_back_without_its_state(four: ToyRun):
    four.until_step(20)
    four.kill(1, signal.SIGSTOP)
    four.until("island 1 is out: no heartbeat")
    time.sleep(0.3)
    four.kill(1, signal.SIGCONT)
    four.until("island 1 is in")
    four.wait()
    four.require_whole()


def test_the_service_is_killed_and_training_goes_on_through_later_faults(four: ToyRun):
    four.until_step(20)
    assert four.service
    four.service.kill()
    step = four.lines()[-1]["step"]
    four.until_step(step + 20)  # no one needs it
    four.serve(restarted=True)
    time.sleep(0.5)
    four.kill(3)
    four.until("island 3 is out")
    four.start(3)
    four.until("island 3 is in")
    four.wait()
    four.require_whole()


def test_the_folder_of_the_run_outlives_the_service_and_then_all_islands(four: ToyRun):
    four.until_step(10)
    assert four.service
    four.service.kill()
    four.serve(restarted=True)
    time.sleep(1)
    for island in range(4):
        four.kill(island)
    for island in range(4):
        four.start(island)
    four.wait()
    assert four.lines()[-1]["run"] == "run of 0 in 1"
    four.require_whole()


def test_islands_that_were_killed_at_their_end_start_again(tmp_path: Path):
    with ToyRun(tmp_path, Bounds(count=2, least=2, **QUICK), steps=20) as run:
        run.serve()
        for _ in range(2):
            for island in range(2):
                run.start(island)
            run.wait()
        run.require_whole()


def test_who_leads_does_so_until_it_leaves(tmp_path: Path):
    with ToyRun(tmp_path, Bounds(count=3, **QUICK), steps=300) as run:
        run.serve()
        for island in range(3):
            run.start(island)
        run.until_step(10)
        for island in (0, 1):
            run.kill(island)
        run.until("1 of 3 islands train")
        for island in (0, 1):
            run.start(island)
            run.until(f"island {island} is in")
        run.wait()
        lines = [json.loads(line) for line in (tmp_path / "log-2-0.jsonl").read_text().splitlines()]
        assert lines[-1]["leads"]
        run.require_whole()


def test_an_island_alone_whose_number_another_takes_ends(tmp_path: Path):
    with ToyRun(tmp_path, Bounds(count=1, **QUICK), steps=300) as run:
        run.serve()
        run.start(0)
        run.until_step(20)
        earlier = run.children[0, 0]
        run.start(0)
        assert earlier.wait(20)
        run.until("island 0 may not join: a later process has its number")
        run.wait()


def test_another_setting_is_refused_in_one_line(four: ToyRun):
    four.until_step(5)
    four.kill(2)
    four.until("island 2 is out")
    four.start(2, settings={"code": "2"})
    four.until("island 2 may not join: its code is 2, island 0 has 1. Start all islands alike.")
    four.wait(0, 1, 3)
    four.require_whole()


def test_with_all_islands_required_a_step_waits_and_the_batch_stays_whole(tmp_path: Path):
    with ToyRun(tmp_path, Bounds(count=3, least=3, **QUICK), steps=100) as run:
        run.serve()
        for island in range(3):
            run.start(island)
        run.until_step(20)
        run.kill(0)
        run.until("2 islands are present and at least 3 are needed; waiting for more")
        run.start(0)
        run.wait()
        run.require_whole()
        assert {line["total"] for line in run.lines()} == {8.0}


def test_islands_of_several_processes_live_and_die_together(tmp_path: Path):
    with ToyRun(tmp_path, Bounds(count=3, **QUICK), steps=120, processes=2) as run:
        run.serve()
        for island in range(3):
            run.start(island)
        run.until_step(20)
        run.children[1, 1].kill()
        run.until("island 1 is out")
        run.kill(1)
        run.start(1)
        run.until("island 1 is in")
        run.wait()
        run.require_whole()


def test_a_run_that_lost_every_island_goes_on_from_what_was_saved(tmp_path: Path):
    with ToyRun(tmp_path, Bounds(count=2, **QUICK), steps=100) as run:
        run.serve()
        for island in range(2):
            run.start(island, every=10)
        run.until_step(35)
        for island in range(2):
            run.kill(island)
        for island in range(2):
            run.start(island, every=10)
        run.wait()
        run.require_whole()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_faults_lose_no_sample(tmp_path: Path, seed: int):
    draw = random.Random(seed)
    with ToyRun(tmp_path, Bounds(count=4, **QUICK), steps=600) as run:
        run.serve()
        for island in range(4):
            run.start(island)
        run.until_step(10)
        for _ in range(8):
            time.sleep(draw.uniform(0.2, 1.5))
            fault, island = draw.choice(["kill", "kill", "stop", "service"]), draw.randrange(4)
            assert run.service
            if fault == "service":
                run.service.kill()
                time.sleep(draw.uniform(0, 0.3))
                run.serve(restarted=True)
            elif fault == "stop":
                run.kill(island, signal.SIGSTOP)
                time.sleep(draw.uniform(0.1, 2))
                run.kill(island, signal.SIGCONT)
            else:
                run.kill(island)
                time.sleep(draw.uniform(0, 0.5))
                run.start(island)
        run.wait(timeout_s=120)
        run.require_whole()
