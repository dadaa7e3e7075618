"""A bit of a state flips, or a gradient is NaN, while islands train: it is seen, and said what follows."""

import re
import signal
from pathlib import Path

import pytest

from tests.islands.trained import TrainedRun, write_plan

STEPS = 150
SETTINGS = ["train.compare_every=5", "train.checkpoint_every=25", "train.keep_checkpoints=10"]


def losses(run: TrainedRun) -> dict[int, float]:
    """Returns the loss of each step. Raises AssertionError if one is there twice."""
    records = run.records()
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return {record["step"]: record["loss"] for record in records}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corruption")
    write_plan(folder, "--on", "2*cpu:1@10Gbit/s", "--batch", "8seq")
    return folder


def test_where_two_differ_both_go_back_and_the_losses_are_those_without_a_fault(folder: Path):
    with TrainedRun(folder, ["-n", "2"], steps=STEPS, settings=SETTINGS) as run:
        run.end()
        calm = losses(run)
    with TrainedRun(folder, ["-n", "2"], steps=STEPS, settings=SETTINGS) as run:
        run.until_step(60)
        run.kill(0, number=signal.SIGUSR1)
        run.until("the states of islands 0 and 1 differ without a majority: all return to an earlier step")
        run.end()
        assert losses(run) == calm
        assert "may hold a damaged state" not in run.text()


def test_checkpoints_since_states_were_last_alike_are_not_trusted(folder: Path):
    settings = ["train.compare_every=40", "train.checkpoint_every=10", "train.keep_checkpoints=20"]
    with TrainedRun(folder, ["-n", "2"], steps=STEPS, settings=settings) as run:
        run.until_step(55)
        run.kill(0, number=signal.SIGUSR1)
        run.until("differ without a majority: all return to an earlier step")
        run.until("checkpoint 80 may hold a damaged state and is kept as 80.damaged")
        run.end()
        losses(run)
        assert (run.run / "checkpoints" / "80").is_dir()
        kept = sorted(int(path.stem) for path in run.run.glob("checkpoints/*.damaged"))
        assert kept == [50, 60, 70, 80]


def test_of_three_the_odd_one_takes_the_state_of_the_others(folder: Path):
    with TrainedRun(folder, ["-n", "3"], steps=STEPS, settings=SETTINGS) as run:
        run.until_step(60)
        run.kill(1, number=signal.SIGUSR1)
        run.until("the state of island 1 differs from the others: it copies theirs")
        run.end()
        losses(run)
        assert run.text().count("differs from the others") == 1


@pytest.mark.parametrize("policy", ["rollback", "skip", "stop"])
def test_a_gradient_that_is_not_finite_has_what_is_set_follow_in_all_islands(folder: Path, policy: str):
    settings = [f"train.on_bad_loss={policy}", "train.checkpoint_every=25"]
    with TrainedRun(folder, ["-n", "2"], steps=STEPS, settings=settings) as run:
        run.until_step(60)
        run.kill(1, number=signal.SIGUSR2)
        fault = r"the loss is [0-9.]+ and the norm of the gradient nan"
        if policy == "stop":
            assert run.child.wait(90) == 3
            assert re.search(rf"{fault} at step \d+ with learning_rate=", run.text())
            assert run.records()[-1]["grad_norm"] is None
        else:
            run.end()
            remedy = {
                "rollback": r"all go back to the newest checkpoint, and on with sample (\d+)",
                "skip": "its update is left out, and its samples are skipped",
            }[policy]
            step = int(re.search(rf"step (\d+): {fault}; {remedy}", run.text())[1])
            is_whole = [record["grad_norm"] is not None for record in run.records()]
            losses(run)
            assert is_whole.count(False) == (policy == "skip")
            assert is_whole[step - 1] == (policy != "skip")
            samples = {
                sample for record in run.records() for block in record["islands"].values() for sample, _ in block
            }
            assert (max(samples) >= 8 * STEPS) == (policy == "rollback"), "data that were skipped"
