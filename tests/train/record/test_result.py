"""Goodput by hand, and what the stopwatch adds up."""

import math
import time
from types import SimpleNamespace

import msgspec
import pytest

from meshwright.api.planning import plan_of
from meshwright.cli.verbs.train import goodput_words, result_text
from meshwright.cost.setting import Setting
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.train.record.result import Goodput, Stopwatch, TrainResult


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
    assert goodput_words(again) == "goodput 50%: 5 s of 10 s in steps, start and files 5 s, 3 steps repeated 1 s"


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
    assert next(result_text(SimpleNamespace(), result)) == f"{len(losses)} step{'s' * (len(losses) > 1)}: {words}"


def of_experts(load, **axes):
    """The text of a run on eight devices whose busiest expert had ``load`` times the mean."""
    model = msgspec.structs.replace(
        load_model("tiny"), family="mixtral", num_layers=2, num_experts=8, experts_per_token=2, d_ff_expert=64
    )
    strategy = Strategy(mesh=make_mesh(axes), state="fp32")
    plan = plan_of(Setting(model, parse_cluster("h100:8x1"), Job(batch_seqs=8, seq_len=64)), strategy)
    result = TrainResult(
        run="", steps=1, stopped=False, losses=[5.0], validation_loss=None, step_s=1.0, step_s_predicted=None,
        tokens_per_s=1.0, compile_s=1.0, memory=None, load_max_over_mean=load,
    )  # fmt: skip
    return [piece for piece in result_text(plan, result) if isinstance(piece, str)]


def test_an_unbalanced_router_is_said_beside_the_prediction():
    """At most the experts over the experts of a token, 8 / 2, are counted at one device."""
    (line,) = (one for one in of_experts(12.6, expert=8) if "busiest" in one)
    assert line.startswith("the busiest expert had 12.6 times the mean rows; predicted: the busiest expert device")
    assert "is priced with 1 times the mean number of rows (assumptions.imbalance)" in line
    assert "; at 4 times the mean this plan takes " in line
    assert not any("busiest" in one for one in of_experts(1.2, expert=8))
    assert not any("busiest" in one for one in of_experts(12.6, fsdp=8))
    assert not any("busiest" in one for one in of_experts(None, expert=8))
