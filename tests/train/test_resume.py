"""Runs that stop, or are killed, and go on: each step once, the data where they were, the losses of one whole run."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.train.checkpoint import Checkpoints
from meshwright.train.loop import train
from meshwright.train.record.run_folder import finished_steps, held_alone
from tests.train.small import JOB, MODEL, lines_of, settings, stop_at, strategy, write_text

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 24, 3
LONGEST_S = 600


pytestmark = pytest.mark.usefixtures("cache")


def given(text, **changes):
    """Settings with a mean of the weights, so that the state has all its parts; nothing is held out."""
    return settings(text, **{"steps": STEPS, "average": 0.9, "held_out": 0.0, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """A run that nothing interrupts."""
    root = tmp_path_factory.mktemp("whole")
    return train(MODEL, strategy(fsdp=2), JOB, given(text), run_root=root)


def stopped(text, root, *, at=10, **changes):
    settings_here = given(text, **changes)
    return train(MODEL, strategy(fsdp=2), JOB, settings_here, run_root=root, on_step=stop_at(at))


@pytest.fixture(scope="module")
def interrupted(text, tmp_path_factory):
    """The folder of a run that was stopped after ten steps; tests go on with a copy."""
    return stopped(text, tmp_path_factory.mktemp("interrupted")).run


@pytest.mark.slow
def test_a_stopped_run_ends_as_one_that_was_not(whole, interrupted, text, tmp_path):
    run = Path(shutil.copytree(interrupted, tmp_path / "mini-001"))
    assert finished_steps(run) is None
    again = train(MODEL, strategy(fsdp=2), JOB, given(text), run_root=tmp_path, resume=run)
    assert again.run == str(run)
    assert again.resumed_from == 10
    assert again.losses == whole.losses
    assert [line["step"] for line in lines_of(again.run)] == list(range(1, STEPS + 1))
    assert [line["tokens"] for line in lines_of(again.run)] == [line["tokens"] for line in lines_of(whole.run)]
    assert finished_steps(Path(again.run)) == STEPS


def test_it_goes_on_over_other_devices(whole, text, tmp_path):
    """From 2 devices to 1; the data from where the counter of samples stands."""
    first = stopped(text, tmp_path, at=STEPS - 2)
    with Checkpoints(Path(first.run)) as kept:
        position = kept.position()
    assert (position.step, position.samples) == (STEPS - 2, (STEPS - 2) * JOB.batch_seqs)
    assert position.settings["average"] == 0.9
    second = train(MODEL, strategy(), JOB, given(text), run_root=tmp_path, resume=Path(first.run))
    assert second.resumed_from == STEPS - 2
    np.testing.assert_allclose(second.losses, whole.losses, rtol=1e-5)


@pytest.mark.slow
def test_a_folder_without_a_checkpoint_starts_over(whole, interrupted, text, tmp_path):
    run = Path(shutil.copytree(interrupted, tmp_path / "mini-001"))
    shutil.rmtree(run / "checkpoints")
    again = train(MODEL, strategy(fsdp=2), JOB, given(text), run_root=tmp_path, resume=run)
    assert again.resumed_from == 0
    assert again.losses == whole.losses
    assert again.goodput.lost_steps == 10
    assert [line["step"] for line in lines_of(run)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ({"d_ff": 128}, {}, r"trains a model with d_ff=64 and this one has d_ff=128"),
        ({}, {"optimizer": "lion"}, r"needs nothing.*Resume with the model, state and optimizer"),
        ({}, {"text": "another"}, r"another tokenizer than this text gives.*train\.tokenizer="),
    ],
)
def test_what_does_not_go_on_is_refused(whole, text, tmp_path, model, changes, message):
    if "text" in changes:
        changes = {"text": write_text(tmp_path, num_topics=3)}
    settings_here = given(**{"text": text, "steps": STEPS + 1, **changes})
    other = msgspec.structs.replace(MODEL, **model)
    before = sorted(path.stat().st_mtime_ns for path in Path(whole.run).iterdir() if path.is_file())
    with pytest.raises(InputError, match=message) as caught:
        train(other, strategy(fsdp=2), JOB, settings_here, run_root=tmp_path, resume=Path(whole.run))
    assert "\n" not in str(caught.value)
    assert sorted(path.stat().st_mtime_ns for path in Path(whole.run).iterdir() if path.is_file()) == before


def test_a_run_that_another_process_trains_is_left_alone(whole, text, tmp_path):
    run = Path(shutil.copytree(whole.run, tmp_path / "mini-001"))
    unfinished = run / "checkpoints" / "99.orbax-checkpoint-tmp"
    unfinished.mkdir()  # what the other is writing
    with held_alone(run), pytest.raises(CannotRunError, match=r"mini-001 is in use: another process") as caught:
        train(MODEL, strategy(fsdp=2), JOB, given(text, steps=STEPS + 1), run_root=tmp_path, resume=run)
    assert "\n" not in str(caught.value)
    assert unfinished.is_dir()
    assert finished_steps(run) == STEPS


# -- killed ------------------------------------------------------------------------------------------


def start(root, text, *resume, **changes):
    usual = {"steps": STEPS, "average": 0.9, "held_out": 0.0, "checkpoint_every": EVERY, "pause_s": 0.05}
    changes = {**usual, **changes}
    command = [sys.executable, "-m", "tests.train.child", str(root), text, json.dumps(changes), *map(str, resume)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def kill_somewhere(child, run, *, after, chance):
    """SIGKILL when ``after`` steps are written and some random time has passed; the steps that were written."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + LONGEST_S
    while child.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= after:
            break
        time.sleep(0.005)
    time.sleep(chance.uniform(0, 0.3))
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    return metrics.read_bytes().count(b"\n")


def survives(root, text, whole, *, rounds, seed, **changes):
    """Kill a run ``rounds`` times, then let it end: the steps that each kill cost."""
    chance, run, resume, costs, committed = random.Random(seed), root / "mini-001", (), [], 0
    for _ in range(rounds):
        child = start(root, text, *resume, **changes)
        written = kill_somewhere(child, run, after=committed + chance.randint(2, 8), chance=chance)
        tiers = [run / "checkpoints", run / "near" / "checkpoints"]
        steps = [int(path.name) for tier in tiers if tier.exists() for path in tier.iterdir() if path.name.isdecimal()]
        committed, resume = max(steps, default=0), (run,)
        costs.append(written - committed)
    with start(root, text, *resume, **changes) as child:
        said = json.loads(child.communicate(timeout=LONGEST_S)[0])
    assert said["from"] == committed
    assert said["losses"] == whole.losses
    lines = lines_of(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == whole.losses
    return costs


def test_a_killed_run_loses_only_what_no_checkpoint_holds(whole, text, tmp_path):
    costs = survives(tmp_path, text, whole, rounds=1, seed=0)
    # One checkpoint may be in writing when the process dies, then the one before it counts.
    assert max(costs) <= 2 * EVERY


@pytest.mark.slow
def test_many_kills(whole, text, tmp_path):
    costs = survives(tmp_path, text, whole, rounds=5, seed=1)
    assert max(costs) <= 2 * EVERY


@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_state_on_its_machine(whole, text, tmp_path):
    near = {"checkpoint_every": 10, "local_every": 2, "local_folder": str(tmp_path / "memory")}
    costs = survives(tmp_path, text, whole, rounds=3, seed=2, **near)
    assert max(costs) <= 4
    assert not any((tmp_path / "memory").iterdir())
