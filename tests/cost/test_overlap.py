"""What overlap leaves standing of communication, and what a host that starts every kernel adds, summed by hand."""

import math

import msgspec
import pytest

from meshwright.cost.pipeline import PipelineCost
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step, price_strategy
from meshwright.spec import catalogue
from meshwright.spec.assumptions import TRAITS, Assumptions
from meshwright.spec.calibration import Calibration, Efficiency
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

IN_TURN = {name for name, traits in TRAITS.items() if traits.in_turn}
HOST_IN_TURN = sorted(name for name in IN_TURN if TRAITS[name].starts_kernels)
TINY = catalogue.load_model("tiny")
JOB = Job(batch_seqs=64, seq_len=512)
"""The number of the block that layers repeat: the embedding comes before, the head after it."""


def priced(axes, *, cluster="h100:8x1", zero=3, efficiency=None, software="compiled", **fields):
    """Costs by phase of one layer, and the times of the blocks."""
    rules = standard_assignment(zero=zero)
    strategy = Strategy(mesh=make_mesh(axes), assignment=rules, **{"remat": "none", **fields})
    calibration = Calibration(name="x", chip="h100", efficiency=Efficiency(**(efficiency or {})))
    setting = Setting(TINY, parse_cluster(cluster), JOB, calibration, assumptions=Assumptions(software=software))
    found = price_strategy(setting, strategy)
    costs = [one for one in found.costs.all if one.step.block == "layer"]
    return found, found.times, costs


def local(costs, *phases):
    return sum(float(c.local_s) for c in costs if c.step.phase in phases and not c.step.is_collective)


def moved(costs, phase, *, axis=None, scope=None):
    return sum(
        float(c.network_s)
        for c in costs
        if c.step.is_collective
        and c.step.phase == phase
        and (axis is None or axis in c.step.axes)
        and (scope is None or c.step.scope == scope)
    )


P = 1.5
"""The exponent of the tests below."""


def hidden(*seconds):
    """(a^p + b^p + ...)^(1/p)."""
    return sum(s**P for s in seconds) ** (1 / P)


def test_compute_and_memory_of_one_kernel():
    """By the data sheet the longer of the two, else in part both; the launch comes on top."""
    _, _, sheet = priced({"data": 1}, cluster="h100:1x1", efficiency={"kernel_s": 1e-6})
    _, _, partly = priced({"data": 1}, cluster="h100:1x1", efficiency={"kernel_s": 1e-6, "overlap": P})
    both = [(a, b) for a, b in zip(sheet, partly, strict=True) if min(float(a.math_s), float(a.hbm_s)) > 0]
    assert len(both) > 10
    for a, b in both:
        assert (a.math_s, a.hbm_s, a.launch_s) == (b.math_s, b.hbm_s, b.launch_s)
        assert a.local_s == pytest.approx(max(a.math_s, a.hbm_s) + a.launch_s)
        assert b.local_s == pytest.approx(hidden(b.math_s, b.hbm_s) + b.launch_s)
        assert a.local_s < b.local_s < a.math_s + a.hbm_s + a.launch_s


def test_gathers_of_weights_hide_behind_compute():
    _, times, costs = priced({"fsdp": 8})
    compute, gathers = local(costs, "forward"), moved(costs, "forward")
    assert gathers > 0
    assert times.layers[0].forward == pytest.approx(max(compute, gathers))
    _, times, costs = priced({"fsdp": 8}, efficiency={"overlap": P})
    # fitted latencies add to the bytes, so collectives take longer than by the data sheet
    assert times.layers[0].forward == pytest.approx(hidden(local(costs, "forward"), moved(costs, "forward")))
    assert moved(costs, "forward") > gathers


def test_a_layer_waits_for_its_tensor_collectives():
    """In full by the data sheet; in part where chunks of a product hide what the chunk before sends."""
    axes, cluster = {"tensor": 2}, "h100:2x1"
    _, times, costs = priced(axes, cluster=cluster)
    waits = moved(costs, "forward", axis="tensor")
    assert waits > 0
    assert times.layers[0].forward == pytest.approx(local(costs, "forward") + waits)
    _, times, costs = priced(axes, cluster=cluster, efficiency={"overlap": P})
    waits = moved(costs, "forward", axis="tensor")
    assert times.layers[0].forward == pytest.approx(hidden(local(costs, "forward"), waits))


def test_what_is_waited_for_and_what_passes_behind_it():
    """First the row of compute and tensor collectives, then the gathers of weights behind that row.

    Both use the same ports: a pass is never shorter than the two together keep them busy.
    """
    for slow in (1.0, 0.02):
        _, times, costs = priced({"fsdp": 4, "tensor": 2}, efficiency={"overlap": P, "nvlink": slow})
        compute = local(costs, "forward")
        waits, gathers = moved(costs, "forward", axis="tensor"), moved(costs, "forward", axis="fsdp")
        assert min(waits, gathers) > 0
        row = hidden(compute, waits)
        assert times.layers[0].forward == pytest.approx(max(hidden(row, gathers), waits + gathers))
    assert waits + gathers > hidden(row, gathers), "slow links bind"


@pytest.mark.parametrize("software", ["compiled", "eager"])
def test_sums_of_gradients_once_a_step(software):
    """Behind the last backward pass, whatever starts the kernels."""
    _, times, costs = priced({"data": 8}, software=software, num_microbatches=2)
    back = local(costs, "backward")
    sums = moved(costs, "backward", scope="step")
    assert sums > 0
    assert times.layers[0].backward == pytest.approx(back)
    assert times.layers[0].last == pytest.approx(max(sums - back, 0), abs=1e-12)
    _, times, costs = priced({"data": 8}, software=software, num_microbatches=2, efficiency={"overlap": P})
    back, sums = local(costs, "backward"), moved(costs, "backward", scope="step")
    assert times.layers[0].backward == pytest.approx(back)
    assert times.layers[0].last == pytest.approx(hidden(back, sums) - back)


def test_both_kinds_behind_one_pass():
    """Replicas of a fully sharded model: the scatters of every microbatch, then the sums between replicas."""
    _, times, costs = priced({"data": 2, "fsdp": 4}, num_microbatches=2, efficiency={"overlap": P})
    back, every = local(costs, "backward"), moved(costs, "backward")
    each = every - moved(costs, "backward", scope="step")
    assert 0 < each < every
    assert times.layers[0].backward == pytest.approx(hidden(back, each))
    # gathers and scatters of every microbatch hide behind compute, the sums of a step behind both
    assert times.layers[0].backward + times.layers[0].last == pytest.approx(hidden(hidden(back, each), every - each))


def test_a_smaller_exponent_hides_less():
    """From nothing hidden (1) to the longer of the two (very large), and the data sheet below all of them."""
    found = [
        float(priced({"fsdp": 8}, efficiency={"overlap": p})[1].layers[0].forward) for p in (1.0, 1.2, 1.5, 2.0, 50.0)
    ]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)
    _, _, costs = priced({"fsdp": 8}, efficiency={"overlap": 1.0})
    forward = [c for c in costs if c.step.phase == "forward"]
    assert found[0] == pytest.approx(sum(float(c.math_s + c.hbm_s + c.network_s) for c in forward))
    _, sheet, _ = priced({"fsdp": 8})
    assert found[-1] == pytest.approx(sheet.layers[0].forward, rel=0.02)
    assert found[-1] >= sheet.layers[0].forward


def test_eager_dispatch_is_no_faster_than_its_host():
    """A pass takes the kernels times what the host needs for one, where the device needs less; weights and gradients of
    many matrices move at once."""
    _, fast, costs = priced({"fsdp": 8}, software="eager", efficiency={"host_kernel_s": 1e-9})
    _, slow, _ = priced({"fsdp": 8}, software="eager", efficiency={"host_kernel_s": 1e-2})
    forward = [c for c in costs if c.step.phase == "forward"]
    kernels = sum(c.num_kernels + (c.step.is_collective and not c.hides) for c in forward)
    assert kernels > 10
    assert any(c.hides for c in forward)
    assert fast.layers[0].forward < 1e-2
    assert slow.layers[0].forward == pytest.approx(kernels * 1e-2, rel=1e-3)
    _, compiled, _ = priced({"fsdp": 8}, efficiency={"host_kernel_s": 1e-2})
    assert compiled.layers[0].forward < 1e-2


def test_collectives_fit_between_the_starts_of_kernels():
    """A host that needs longer than the device and its collectives hides both, in software without overlap too."""
    for software in ("eager", *HOST_IN_TURN):
        host = {"host_kernel_s": 1e-2}
        _, alone, _ = priced({"tensor": 8}, software=software, efficiency=host)
        _, slower, costs = priced({"tensor": 8}, software=software, efficiency=host | {"nvlink": 0.5})
        assert any(c.network_s > 0 and not c.hides for c in costs)
        assert slower.layers[0].forward == alone.layers[0].forward


def test_the_host_adds_to_every_microbatch():
    for software, seconds in (("compiled", 0.0), *((name, 0.5) for name in ("eager", *HOST_IN_TURN))):
        found, times, _ = priced(
            {"fsdp": 8}, software=software, num_microbatches=4, efficiency={"host_microbatch_s": 0.5}
        )
        assert times.microbatch_s == seconds
        assert float(found.estimate.step_s) >= 4 * seconds


def test_a_launch_on_the_device_is_part_of_each_op():
    _, without, costs = priced({"data": 1}, cluster="h100:1x1")
    _, launched, _ = priced({"data": 1}, cluster="h100:1x1", efficiency={"kernel_s": 1e-3})
    kernels = sum(c.num_kernels for c in costs if c.step.phase == "forward")
    assert launched.layers[0].forward - without.layers[0].forward == pytest.approx(kernels * 1e-3)


@pytest.mark.parametrize("software", HOST_IN_TURN)
def test_software_that_communicates_in_turn(software):
    """Compute, then the links: the exponent holds inside a kernel and nowhere else."""
    assert sorted(IN_TURN) == ["eager-2021", "eager-in-turn", "served"]
    for axes, zero in (({"fsdp": 8}, 3), ({"data": 8}, 0), ({"tensor": 2, "data": 4}, 0), ({"fsdp": 8}, 1)):
        _, times, costs = priced(axes, zero=zero, software=software, efficiency={"overlap": P})
        assert times.layers[0].forward == pytest.approx(local(costs, "forward") + moved(costs, "forward"))
        whole = local(costs, "recompute", "backward") + moved(costs, "recompute") + moved(costs, "backward")
        assert times.layers[0].backward + times.layers[0].last == pytest.approx(whole)
        assert times.overlap is None


def test_in_turn_is_eager_but_for_what_overlaps():
    """The same kernels in the same time; only the pass over them is longer."""
    axes = {"fsdp": 4, "tensor": 2}
    _, eager, costs = priced(axes, software="eager", efficiency={"overlap": P})
    _, turns, same = priced(axes, software="eager-in-turn", efficiency={"overlap": P})
    assert [(c.local_s, c.network_s) for c in costs] == [(c.local_s, c.network_s) for c in same]
    assert eager.layers[0].forward < turns.layers[0].forward


def stages(**fields):
    return priced({"pipeline": 4, "data": 2}, num_microbatches=8, **fields)


def test_sends_between_stages():
    """Added to the passes by the data sheet and in turn; partly hidden behind them else. Once a step stays as it is."""
    sheet, times, _ = stages()
    pipeline = PipelineCost(stages=4, microbatches=8)
    sends = float(times.sends_s(pipeline))
    assert sends > 0
    quiet = msgspec.structs.replace(times, send_s=0.0)
    whole, alone = (float(one.step_s(pipeline).step_s) for one in (times, quiet))
    assert whole - alone == pytest.approx(sends)
    assert float(sheet.estimate.step_s) == pytest.approx(whole)

    _, times, _ = stages(efficiency={"overlap": P})
    quiet = msgspec.structs.replace(times, send_s=0.0)
    whole, alone = (float(one.step_s(pipeline).step_s) for one in (times, quiet))
    passes = alone - float(times.once_s(pipeline)) - float(times.after_s) - float(times.step_s(pipeline).bubble_s)
    assert whole - alone == pytest.approx(hidden(passes, sends) - passes)
    assert 0 < whole - alone < sends


def updates(found):
    """Local seconds and seconds of gathers of the update of one layer's weights."""
    layers = [c for c in found.costs.all if c.step.phase == "update" and float(c.count) == TINY.num_layers]
    return local(layers, "update"), moved(layers, "update")


def test_zero_1_gathers_weights_behind_the_next_forward_pass():
    found, times, _ = priced({"fsdp": 8}, zero=1)
    own, gathers = updates(found)
    assert gathers > 0
    forward = times.layers[0].forward
    assert times.layers[0].update == pytest.approx(own + max(gathers - forward, 0))
    found, partly, _ = priced({"fsdp": 8}, zero=1, efficiency={"overlap": P})
    own, gathers = updates(found)
    forward = partly.layers[0].forward
    assert partly.layers[0].update == pytest.approx(own + hidden(forward, gathers) - forward)
    for software in HOST_IN_TURN:
        found, serial, _ = priced({"fsdp": 8}, zero=1, software=software, efficiency={"overlap": P})
        own, gathers = updates(found)
        assert serial.layers[0].update == pytest.approx(own + gathers)


def test_gathers_share_the_links_with_the_pass_that_hides_them():
    """Tensor collectives keep the same ports busy: what the two take together is not hidden."""
    found, times, costs = priced({"fsdp": 4, "tensor": 2}, zero=1)
    own, gathers = updates(found)
    busy = gathers + moved(costs, "forward", axis="tensor")
    assert times.layers[0].update == pytest.approx(own + max(busy - times.layers[0].forward, 0))
    small = estimate_step(
        Setting(TINY, parse_cluster("h100:8x1"), Job(batch_seqs=8, seq_len=512)),
        Strategy(mesh=make_mesh({"fsdp": 4, "tensor": 2}), assignment=standard_assignment(zero=1), remat="none"),
    )
    assert small.step_s >= small.step_s_lower


def test_stragglers_slow_everything_down_for_each_doubling_of_hosts():
    axes = {"data": 64}
    plain, _, _ = priced(axes, cluster="h100:8x8", zero=0)
    slow, times, _ = priced(axes, cluster="h100:8x8", zero=0, efficiency={"straggler": 0.02})
    assert times.slowdown == 1 + 0.02 * math.log2(8)
    assert slow.estimate.step_s == pytest.approx(1.06 * plain.estimate.step_s)
