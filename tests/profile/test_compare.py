"""Predictions by step, part and kind; what is advised for a difference."""

from types import SimpleNamespace

import msgspec
import pytest

from meshwright.cost.breakdown import Breakdown, Partition
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.profile import compare
from meshwright.profile import summary as profile
from meshwright.profile.advice import AdviceCase, advise
from meshwright.profile.classes import class_of_op, part_of_step
from meshwright.profile.times import OpTime, StepTimes
from meshwright.report.machine.profile_report import parts_figure
from meshwright.report.machine.profile_trace import predicted_timeline
from meshwright.spec.calibration import datasheet_calibration
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from tests.charts import said

MODEL, CLUSTER = load_model("llama3-8b"), parse_cluster("h100:8x2")
JOB = Job(batch_seqs=64, seq_len=4096)
STRATEGY = Strategy(mesh=make_mesh({"fsdp": 8, "tensor": 2}), remat="block", num_microbatches=2)
RATES = datasheet_calibration(CLUSTER.chip)
PRICED = price_strategy(Setting(MODEL, CLUSTER, JOB, RATES), STRATEGY)


def test_all_steps_are_in_some_part_and_kind():
    found = Breakdown(PRICED).steps
    assert sum(one.seconds for one in found.values()) == pytest.approx(
        sum(float((cost.time_s - cost.launch_s) * cost.here) for cost in PRICED.costs.all)
    )
    assert sum(one.flops for one in found.values()) * CLUSTER.num_chips == pytest.approx(PRICED.estimate.flops)
    assert {part_of_step(one.step) for one in found.values()} >= {
        "layer forward",
        "layer backward",
        "head forward",
        "optimizer",
    }
    assert class_of_op(found["layer:forward:o=attention"].step.op) == "attention"
    assert any(one.axes == ("fsdp",) and one.step.is_collective for one in found.values())


def test_the_predicted_parts_are_the_step():
    found = Breakdown(PRICED).partition
    assert found.total_s == pytest.approx(PRICED.estimate.step_s)
    assert found.compute_s > found.exposed_s


@pytest.mark.parametrize("most", [10**9, 0])
def test_the_predicted_timeline_has_all_work(most, monkeypatch):
    """Pass by pass, and with all repeats of a pass as one."""
    monkeypatch.setattr("meshwright.report.machine.profile_trace.MAX_SLICES", most)
    slices = predicted_timeline(PRICED, num_microbatches=2)
    passes = [one.what for one in slices if one.kind == "pass"]
    assert passes[-1] == "update"
    assert any("backward" in name for name in passes)
    laid = sum(one.seconds for one in slices if one.kind != "pass")
    assert laid == pytest.approx(sum(float(cost.time_s * cost.here) for cost in PRICED.costs.all), rel=1e-6)
    for lane in ("compute", "links"):
        ends = 0.0
        steps = (one for one in slices if one.lane == lane and one.kind != "pass")
        for one in sorted(steps, key=lambda one: one.start_s):
            assert one.start_s >= ends - 1e-9
            ends = one.start_s + one.seconds


def case(*terms, idle=(0.0, 0.0), ops=(), flops=1e12, **changes):
    classes = tuple(
        compare.ClassRow(kind=k, own_s=1.0, wall_s=1.0, flops=flops, hbm_bytes=1e12)
        for k in ("contraction", "elementwise")
    )
    comparison = compare.ProfileComparison(
        predicted=Partition(compute_s=10.0),
        parts=(),
        terms=terms,
        steps=(),
        classes=classes,
        float32=(),
        shares_cores=False,
    )
    devices = {number: Partition(compute_s=9.0 - s, exposed_s=1.0, idle_s=s) for number, s in enumerate(idle)}
    times = StepTimes(
        mean=Partition(compute_s=9.0, exposed_s=1.0),
        devices=devices,
        ops=ops,
        communication_s=4.0,
        hidden_s=3.0,
    )
    strategy = msgspec.structs.replace(STRATEGY, **changes)
    return AdviceCase(
        comparison=comparison,
        times=times,
        job=JOB,
        strategy=strategy,
        rates=PRICED.rates,
        expected=Breakdown(PRICED).steps,
        calibration=RATES,
    )


def row(name, predicted, measured):
    return compare.TimeRow(name=name, kind=name, predicted_s=predicted, measured_s=measured)


@pytest.mark.parametrize(("number", "subtitle"), [(3, "given"), (20, "given; the 14 longest of 20 rows shown")])
def test_a_picture_says_when_it_leaves_rows_out(number, subtitle):
    rows = [row(f"row {index}", 1.0 + index, 2.0) for index in range(number)]
    assert said(parts_figure(rows, subtitle="given"))["title"]["subtitle"] == subtitle


def text(*given, **more):
    (found,) = advise(case(*given, **more))
    return found.text


def test_what_is_near_needs_no_advice():
    assert advise(case(row("contraction", 1.0, 1.1), row("collectives over fsdp", 1.0, 0.9))) == ()


def collective(step, **seconds):
    return OpTime(name="made.1", kind="collective", step=step, count=32, flops=0.0, hbm_bytes=0.0, **seconds)


GATHER = collective("layer:forward:w_up=all_gather", own_s=4.0, wall_s=1.0, waited_s=0.25)
OTHER = collective("layer:forward:h=all_gather", own_s=8.0, wall_s=8.0)


def test_communication_that_shows():
    found = text(row("collectives over fsdp", 1.0, 4.0), ops=(GATHER, OTHER))
    assert "1 s of 4 s on a device exposed, 250 ms waits for other devices" in found
    assert "more sequences per device (now 4)" in found
    assert "fewer devices in fsdp=8" in found
    assert "tensor" not in found
    assert "8 s of 8 s" in text(row("collectives over tensor", 1.0, 4.0), ops=(GATHER, OTHER))
    assert "costs nothing" in text(row("collectives besides", 0.0, 4.0), ops=(GATHER, OTHER))


def test_naive_gradients_are_named_first():
    found = text(row("collectives over tensor", 1.0, 4.0), ops=(OTHER,), gradient_sync="naive")
    assert "try strategy.gradient_sync=overlapped or" in found


def test_gathers_of_weights_can_run_ahead():
    ahead, over = "try strategy.prefetch=true (weights are gathered ahead) or", "collectives over"
    assert ahead in text(row(f"{over} fsdp", 1.0, 4.0), ops=(GATHER,))
    assert ahead not in text(row(f"{over} tensor", 1.0, 4.0), ops=(GATHER, OTHER))
    assert ahead not in text(row(f"{over} fsdp", 1.0, 4.0), ops=(GATHER,), prefetch=True)


def test_more_flops_than_derived():
    """2e16 FLOPs in 2 s are above any rate, and above what was derived."""
    found = text(row("contraction", 1.0, 2.0), flops=2e16)
    assert "does 20 PFLOP on a device where" in found


def test_slow_products_want_larger_ones():
    assert "fewer microbatches (num_microbatches=1, now 2)" in text(row("contraction", 1.0, 2.0))
    assert "more sequences per device (now 8)" in text(row("contraction", 1.0, 2.0), num_microbatches=1)
    assert "run at 500 GFLOP/s" in text(row("contraction", 1.0, 2.0))


def test_faster_than_the_rates_is_about_the_rates():
    found = text(row("contraction", 4.0, 2.0))
    assert "takes 50% of what the rates of" in found


def test_launches_and_idle_devices():
    launched = (msgspec.structs.replace(GATHER, count=1000),)
    assert "1,000 instructions a step, and 1 ms without work for each" in text(row("overhead", 0.0, 1.0), ops=launched)
    assert "device 1 idles 2 s, device 0 1 s" in text(row("idle", 0.0, 1.0), idle=(1.0, 2.0))
    stages = make_mesh({"pipeline": 4, "fsdp": 4})
    found = text(row("idle", 0.0, 1.0), mesh=stages, num_microbatches=4, placement={})
    assert "4 stages with 4 microbatches: try num_microbatches=8" in found


def test_bytes_beyond_the_derived_ones():
    found = text(row("elementwise", 0.1, 0.4))
    assert "moves 1 TB a device; 335 GB fit into the time predicted" in found


def test_at_most_five_lines():
    rows = [row(name, 0.0, 2.0) for name in ("copy", "overhead", "idle", "contraction", "elementwise", "attention")]
    assert len(advise(case(*rows, idle=(1.0, 2.0)))) == 5


def test_steps_unlike_those_before_are_named():
    of_gpu = SimpleNamespace(platform="gpu")
    assert list(profile._warnings(1.1, 1.0, of_gpu, None)) == []
    (note,) = profile._warnings(3.4, 1.0, of_gpu, None)
    assert "3.4 times as long" in note


@pytest.mark.parametrize(("busy", "warned"), [(0.99, False), (0.4, True)])
def test_a_busy_machine_is_named(busy, warned, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    (note,) = profile._warnings(1.0, 1.0, SimpleNamespace(platform="cpu"), SimpleNamespace(cores=4 * busy))
    assert f"{4 * busy:.1f} of 4 cores" in note
    assert ("quiet machine" in note) is warned
    assert list(profile._warnings(1.0, 1.0, SimpleNamespace(platform="gpu"), SimpleNamespace(cores=1.0))) == []
