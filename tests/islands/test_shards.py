"""Islands of several processes with weights sharded inside: one that loses a process is lost as a whole."""

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.islands.trained import TrainedRun, write_plan

STEPS = 120
SETTINGS = ["train.checkpoint_every=20", "train.compare_every=10"]


@pytest.mark.slow
def test_an_island_that_lost_a_shard_is_dropped_and_started_again(tmp_path: Path):
    write_plan(tmp_path, "--on", "2*cpu:2@10Gbit/s", "--axes", "islands=2,fsdp=2", "--batch", "8seq")
    with TrainedRun(tmp_path, ["-n", "4", "--islands", "2"], steps=600, settings=SETTINGS) as run:
        run.until_step(25)
        run.kill(1, process=1)
        run.until("island 1 is out: its process ended")
        run.until("island 1 was killed by SIGKILL; it restarts in 0.4 s")
        run.until("island 1 is in; 2 of 2 islands train", timeout_s=120)
        run.end()
        assert [record["step"] for record in run.records()] == list(range(1, 601))
        assert "differs from the others" not in run.text(), "shards were taken over bit by bit"
        alone = [record for record in run.records() if len(record["islands"]) == 1]
        assert alone


@pytest.mark.slow
def test_islands_of_two_processes_leave_when_one_is_asked_and_end_when_all_are(tmp_path: Path):
    write_plan(tmp_path, "--on", "2*cpu:2@10Gbit/s", "--axes", "islands=2,fsdp=2", "--batch", "8seq")
    with TrainedRun(tmp_path, ["-n", "4", "--islands", "2"], steps=100000) as run:
        run.until_step(25)
        run.kill(1, process=1, number=signal.SIGTERM)
        run.until("island 1 was asked to stop, and leaves")
        run.until("island 1 is in; 2 of 2 islands train", timeout_s=120)
        run.child.send_signal(signal.SIGTERM)
        assert run.child.wait(60) == 75, run.text()
        steps = [record["step"] for record in run.records()]
        assert steps == list(range(1, len(steps) + 1))
        assert (run.run / "checkpoints" / str(steps[-1])).is_dir()


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    write_plan(folder, "--on", "cpu:2", "--axes", "fsdp=2", "--batch", "8seq")
    return folder


@pytest.mark.slow
def test_a_single_island_goes_on_from_its_checkpoint_to_the_same_losses(single: Path):
    launched = ["-n", "2", "--islands", "1", "--min", "1"]
    with TrainedRun(single, launched, steps=STEPS, settings=SETTINGS) as run:
        calm = run.end()["losses"]
    with TrainedRun(single, launched, steps=STEPS, settings=SETTINGS) as run:
        run.until_step(50)
        run.kill(0, process=1)
        run.until("island 0 was killed by SIGKILL; it restarts")
        result = run.end()
        assert [record["step"] for record in run.records()] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(result["losses"], calm, rtol=1e-5)


@pytest.mark.slow
def test_a_single_island_goes_on_from_a_state_in_the_memory_of_its_machine(single: Path):
    """Its checkpoints are older, or none."""
    settings = ["train.local_every=5", f"train.local_folder={single / 'memory'}"]
    with TrainedRun(single, ["-n", "2", "--islands", "1"], steps=600, settings=settings) as run:
        run.until_step(50)
        run.kill(0, process=1)
        run.until("island 0 was killed by SIGKILL; it restarts")
        run.until("going on from the state of step")
        result = run.end()
        assert [record["step"] for record in run.records()] == list(range(1, 601))
    assert result["goodput"]["lost_steps"] <= 10
    assert not any((single / "memory").iterdir())
