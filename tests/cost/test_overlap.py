"""What overlap leaves standing of communication, and what a host that starts every kernel adds, summed by hand."""

import math

import pytest

from meshwright.cost.pipeline import strategy_pipeline
from meshwright.cost.train_step import estimate_step, price_parts, price_strategy
from meshwright.spec import catalogue
from meshwright.spec.calibration import Calibration, Efficiency
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

TINY = catalogue.model("tiny")
JOB = Job(batch_seqs=64, seq_len=512)
LAYER = 1
"""The number of the block that layers repeat: the embedding comes before, the head after it."""


def priced(axes, *, cluster="h100:8x1", zero=3, efficiency=None, **fields):
    """Costs by phase of one layer, and the times of the blocks."""
    rules = standard_assignment(zero=zero)
    strategy = Strategy(mesh=make_mesh(axes), assignment=rules, **{"remat": "none", **fields})
    calibration = Calibration(name="x", chip="h100", efficiency=Efficiency(**(efficiency or {})))
    found = price_strategy(TINY, parse_cluster(cluster), JOB, strategy, calibration=calibration)
    times = price_parts(found.derived, found.sizes, found.rates, pipeline=strategy_pipeline(strategy)).times
    costs = [one for one in found.costs if one.step.block == "layer"]
    return found, times, costs


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


def test_gathers_of_weights_hide_behind_compute_but_for_a_share():
    _, times, costs = priced({"fsdp": 8})
    compute, gathers = local(costs, "forward"), moved(costs, "forward")
    assert gathers > 0
    assert times.forward[LAYER] == pytest.approx(max(compute, gathers))
    _, times, _ = priced({"fsdp": 8}, efficiency={"weights_exposed": 0.4})
    assert times.forward[LAYER] == pytest.approx(max(compute, gathers) + 0.4 * min(compute, gathers))
    # what is left standing of sums once a step is another number, which no gather has
    _, times, _ = priced({"fsdp": 8}, efficiency={"gradients_exposed": 0.4})
    assert times.forward[LAYER] == pytest.approx(max(compute, gathers))


def test_a_layer_waits_for_a_share_of_its_tensor_collectives():
    _, _, costs = priced({"tensor": 2}, cluster="h100:2x1")
    compute, waits = local(costs, "forward"), moved(costs, "forward", axis="tensor")
    for share in (1.0, 0.5):
        _, times, _ = priced({"tensor": 2}, cluster="h100:2x1", efficiency={"tensor_exposed": share})
        assert times.forward[LAYER] == pytest.approx(max(compute + share * waits, waits))
    # experts have a share of their own
    _, times, _ = priced({"tensor": 2}, cluster="h100:2x1", efficiency={"expert_exposed": 0.1})
    assert times.forward[LAYER] == pytest.approx(compute + waits)


@pytest.mark.parametrize(
    ("software", "name"), [("compiled", "gradients_exposed"), ("eager", "gradients_exposed_eager")]
)
def test_sums_of_gradients_once_a_step(software, name):
    """Behind the last backward pass; each kind of software leaves its own share of them standing."""
    _, times, costs = priced({"data": 8}, software=software, num_microbatches=2)
    back = local(costs, "backward")
    sums = moved(costs, "backward", scope="step")
    assert sums > 0
    assert times.backward[LAYER] == pytest.approx(back)
    assert times.last[LAYER] == pytest.approx(max(sums - back, 0), abs=1e-12)
    _, exposed, _ = priced({"data": 8}, software=software, num_microbatches=2, efficiency={name: 0.5})
    assert exposed.backward[LAYER] == pytest.approx(back)
    assert exposed.last[LAYER] - times.last[LAYER] == pytest.approx(0.5 * min(sums, back))


def test_both_kinds_behind_one_pass():
    """Replicas of a fully sharded model: the scatters of every microbatch, then the sums between replicas."""
    shares = {"weights_exposed": 0.3, "gradients_exposed": 0.6}
    _, times, costs = priced({"data": 2, "fsdp": 4}, num_microbatches=2, efficiency=shares)
    back, every = local(costs, "backward"), moved(costs, "backward")
    sums = moved(costs, "backward", scope="step")
    each = every - sums
    assert min(each, sums) > 0
    assert times.backward[LAYER] == pytest.approx(max(back, each) + 0.3 * min(back, each))
    whole = max(back, every) + 0.3 * min(back, each) + 0.6 * (min(back, every) - min(back, each))
    assert times.backward[LAYER] + times.last[LAYER] == pytest.approx(whole)


def test_eager_dispatch_is_no_faster_than_its_host():
    """A pass takes the kernels times what the host needs for one, where the device needs less."""
    _, fast, costs = priced({"fsdp": 8}, software="eager", efficiency={"host_kernel_s": 1e-9})
    _, slow, _ = priced({"fsdp": 8}, software="eager", efficiency={"host_kernel_s": 1e-2})
    kernels = sum(c.num_kernels for c in costs if c.step.phase == "forward")
    assert kernels > 10
    assert fast.forward[LAYER] < 1e-2
    assert slow.forward[LAYER] == pytest.approx(kernels * 1e-2, rel=1e-3)
    _, compiled, _ = priced({"fsdp": 8}, efficiency={"host_kernel_s": 1e-2})
    assert compiled.forward[LAYER] < 1e-2


def test_the_host_adds_to_every_microbatch():
    for software, seconds in (("compiled", 0.0), ("eager", 0.5), ("eager-2021", 0.5)):
        found, times, _ = priced(
            {"fsdp": 8}, software=software, num_microbatches=4, efficiency={"host_microbatch_s": 0.5}
        )
        assert times.microbatch_s == seconds
        assert float(found.estimate.step_s) >= 4 * seconds


def test_a_launch_on_the_device_is_part_of_each_op():
    _, without, costs = priced({"data": 1}, cluster="h100:1x1")
    _, launched, _ = priced({"data": 1}, cluster="h100:1x1", efficiency={"kernel_s": 1e-3})
    kernels = sum(c.num_kernels for c in costs if c.step.phase == "forward")
    assert launched.forward[LAYER] - without.forward[LAYER] == pytest.approx(kernels * 1e-3)


def test_nothing_overlapped_in_2021():
    shares = dict.fromkeys(("tensor_exposed", "weights_exposed", "gradients_exposed_eager"), 0.0)
    for axes, zero in (({"fsdp": 8}, 3), ({"data": 8}, 0), ({"tensor": 2, "data": 4}, 0), ({"fsdp": 8}, 1)):
        _, times, costs = priced(axes, zero=zero, software="eager-2021", efficiency=shares)
        assert times.forward[LAYER] == pytest.approx(local(costs, "forward") + moved(costs, "forward"))
        whole = local(costs, "recompute", "backward") + moved(costs, "recompute") + moved(costs, "backward")
        assert times.backward[LAYER] + times.last[LAYER] == pytest.approx(whole)


def updates(found):
    """Local seconds and seconds of gathers of the update of one layer's weights."""
    layers = [c for c in found.costs if c.step.phase == "update" and float(c.count) == TINY.num_layers]
    return local(layers, "update"), moved(layers, "update")


def test_zero_1_gathers_weights_behind_the_next_forward_pass():
    found, times, _ = priced({"fsdp": 8}, zero=1)
    own, gathers = updates(found)
    assert gathers > 0
    forward = times.forward[LAYER]
    assert times.update[LAYER] == pytest.approx(own + max(gathers - forward, 0))
    _, exposed, _ = priced({"fsdp": 8}, zero=1, efficiency={"gradients_exposed": 0.5})
    assert exposed.update[LAYER] - times.update[LAYER] == pytest.approx(0.5 * min(gathers, forward))
    _, serial, _ = priced({"fsdp": 8}, zero=1, software="eager-2021")
    assert serial.update[LAYER] == pytest.approx(own + gathers)


def test_gathers_share_the_links_with_the_pass_that_hides_them():
    """Tensor collectives keep the same ports busy: what the two take together is not hidden."""
    found, times, costs = priced({"fsdp": 4, "tensor": 2}, zero=1)
    own, gathers = updates(found)
    busy = gathers + moved(costs, "forward", axis="tensor")
    assert times.update[LAYER] == pytest.approx(own + max(busy - times.forward[LAYER], 0))
    small = estimate_step(
        TINY,
        parse_cluster("h100:8x1"),
        Job(batch_seqs=8, seq_len=512),
        Strategy(mesh=make_mesh({"fsdp": 4, "tensor": 2}), assignment=standard_assignment(zero=1), remat="none"),
    )
    assert small.step_s >= small.step_s_lower


def test_stragglers_slow_everything_down_for_each_doubling_of_hosts():
    axes = {"data": 64}
    plain, _, _ = priced(axes, cluster="h100:8x8", zero=0)
    slow, times, _ = priced(axes, cluster="h100:8x8", zero=0, efficiency={"straggler": 0.02})
    assert times.slowdown == 1 + 0.02 * math.log2(8)
    assert slow.estimate.step_s == pytest.approx(1.06 * plain.estimate.step_s)
