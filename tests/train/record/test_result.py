"""Goodput by hand, and what the stopwatch adds up."""

import math
import time
from types import SimpleNamespace

import pytest

from meshwright.cli.verbs.train import goodput_words, result_text
from meshwright.train.record.result import Goodput, Stopwatch


def test_goodput_is_the_share_of_time_in_steps():
    found = Goodput(wall_s=20, steps_s=12, compile_s=4, checkpoint_s=1, evaluation_s=1.5, data_s=0.5)
    assert found.share == pytest.approx(0.6)
    assert found.other_s == pytest.approx(1.0)


def test_the_stopwatch_counts_each_part_and_the_whole():
    watch = Stopwatch()
    for _ in range(2):
        with watch.timed("checkpoint"):
            time.sleep(0.01)
    with watch.timed("evaluation"):
        time.sleep(0.01)
    watch.add("data", 3.0)
    found = watch.goodput(steps_s=1.0, lost_steps=2, lost_s=0.5)
    assert 0.02 <= found.checkpoint_s < found.wall_s
    assert 0.01 <= found.evaluation_s < found.wall_s
    assert (found.data_s, found.compile_s, found.lost_steps, found.lost_s) == (3.0, 0.0, 2, 0.5)


def test_small_parts_are_not_said():
    long = Goodput(wall_s=100, steps_s=95, compile_s=4, checkpoint_s=0.5, evaluation_s=0.4, data_s=0.1)
    assert goodput_words(long) == "goodput 95%: 95 s of 100 s in steps, compiling 4 s"
    again = Goodput(wall_s=10, steps_s=5, lost_steps=3, lost_s=1)
    assert goodput_words(again) == "goodput 50%: 5 s of 10 s in steps, start and files 5 s, 3 steps done again 1 s"


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([5.0, 4.0], "loss 5.000 -> 4.000, held out -"),
        ([math.nan, 5.0, math.nan, 4.0], "loss 5.000 -> 4.000, held out -"),
        ([math.nan], "loss -, held out -"),
    ],
)
def test_losses_of_damaged_lines_are_not_shown(losses, words):
    result = SimpleNamespace(losses=losses, steps=len(losses), stopped=False, validation_loss=None)
    assert next(result_text(SimpleNamespace(), result)) == f"{len(losses)} steps: {words}"
