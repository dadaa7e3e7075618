"""Losses that are not finite, or spikes: the run stops, skips or goes back, and says what it left out."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.train.bad_loss import MOST_BAD, SPIKE_STEPS, LossWatch
from meshwright.train.data.batches import Batches
from meshwright.train.loop import train
from meshwright.train.settings import TrainSettings
from tests.train.small import JOB, MODEL, lines_of, settings, strategy

SAMPLES = JOB.batch_seqs


@pytest.fixture
def bad_batches(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Factors by the first sample of a batch, by which its number of labels is divided; NaN makes NaN of the loss."""
    factors: dict[int, float] = {}
    read = Batches.global_batch

    def damaged(self, first, shardings):
        batch = read(self, first, shardings)
        labels = batch["num_labels"] / jnp.float32(factors.get(first, 1.0))
        return batch | {"num_labels": labels}

    monkeypatch.setattr(Batches, "global_batch", damaged)
    return factors


def run(tmp_path: Path, text: str, **changes: object) -> list[dict[str, Any]]:
    """Trains; returns the lines of metrics."""
    given = settings(text, steps=30, held_out=0.0, **changes)
    train(MODEL, strategy(), JOB, given, run_root=tmp_path)
    return lines_of(tmp_path / "mini-001")


def test_skip_leaves_the_update_out_and_says_which_samples(tmp_path, text, bad_batches, capsys):
    bad_batches[5 * SAMPLES] = np.nan
    lines = run(tmp_path, text, on_bad_loss="skip")
    assert [line["step"] for line in lines if line["loss"] is None] == [6]
    said = (
        f"step 6: the loss is nan; its update is left out, and samples {5 * SAMPLES} to {6 * SAMPLES - 1} are skipped"
    )
    assert said in capsys.readouterr().err
    assert lines[-1]["loss"] < 4.5


def test_rollback_takes_the_newest_checkpoint_and_the_data_after_the_bad_step(tmp_path, text, bad_batches, capsys):
    bad_batches[13 * SAMPLES] = np.nan
    lines = run(tmp_path, text, on_bad_loss="rollback", checkpoint_every=5)
    said = f"step 14: the loss is nan; back to step 10, without samples {10 * SAMPLES} to {14 * SAMPLES - 1}"
    assert said in capsys.readouterr().err
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert all(line["loss"] is not None for line in lines)


def test_rollback_before_the_first_checkpoint_starts_over(tmp_path, text, bad_batches, capsys):
    bad_batches[2 * SAMPLES] = np.nan
    lines = run(tmp_path, text, on_bad_loss="rollback")
    assert f"back to step 0, without samples 0 to {3 * SAMPLES - 1}" in capsys.readouterr().err
    assert [line["step"] for line in lines] == list(range(1, 31))


def test_a_spike_is_bad_where_it_is_asked_for(tmp_path, text, bad_batches, capsys):
    bad_batches[22 * SAMPLES] = 10.0
    lines = run(tmp_path, text, on_bad_loss="rollback", loss_spike=6.0, checkpoint_every=20)
    assert re.search(
        r"step 23: the loss is \d+\.?\d*, and was .* on average with a deviation of", capsys.readouterr().err
    )
    assert max(line["loss"] for line in lines) < 7


def test_a_run_that_stays_bad_stops(tmp_path, text, bad_batches):
    bad_batches |= {step * SAMPLES: np.nan for step in range(8, 30)}
    with pytest.raises(CannotRunError, match=rf"the loss is nan at step {8 + MOST_BAD + 1} with"):
        run(tmp_path, text, on_bad_loss="skip")


def test_a_spike_cannot_be_skipped():
    with pytest.raises(InputError, match="is noticed after the update"):
        TrainSettings(loss_spike=6, on_bad_loss="skip")


def test_the_bound_is_on_bad_losses_without_good_ones_between():
    watch, stopped = LossWatch(TrainSettings(on_bad_loss="skip")), list[str]()
    for _ in range(3):
        for _ in range(MOST_BAD):
            assert (
                watch.judge(1, float("nan"), 1.0, stopped.append) == "step 1: the loss is nan; its update is left out"
            )
        for _ in range(SPIKE_STEPS):
            assert watch.judge(2, 2.0, 1.0, stopped.append) == ""
    assert stopped == []
    for _ in range(MOST_BAD + 1):
        watch.judge(3, 2.0, float("inf"), stopped.append)
    assert stopped == ["the loss is 2 and the norm of the gradient inf"]
