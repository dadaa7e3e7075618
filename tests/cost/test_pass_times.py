"""One training step put together from the passes over its blocks, against sums by hand on small pipelines."""

import msgspec
import pytest

from meshwright.algebra.schedules.registry import build
from meshwright.algebra.schedules.simulation import simulate
from meshwright.algebra.schedules.ticks import lockstep_seconds, tick_tables
from meshwright.cost.offload import Transfers
from meshwright.cost.pass_times import BlockSeconds, BlockTimes
from meshwright.cost.pipeline import PipelineCost
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh

TINY = catalogue.load_model("tiny")
CLUSTER = parse_cluster("v5e:2x2")
JOB = Job(batch_seqs=32, seq_len=512)
EMBED = BlockSeconds(repeat=1, forward=0.5, backward=0.25, inputs=0.0, weight=0.0, last=0.1, update=0.4)
LAYER = BlockSeconds(repeat=8, forward=1.0, backward=2.0, inputs=1.25, weight=0.75, last=0.2, update=0.05)
HEAD = BlockSeconds(repeat=1, forward=3.0, backward=5.0, inputs=0.0, weight=0.0, last=0.3, update=0.6)
TIMES = BlockTimes(num_layers=8, layers=(LAYER,), ends=(EMBED, HEAD), send_s=0.125, after_s=0.01)


def priced(**fields):
    return price_strategy(Setting(TINY, CLUSTER, JOB), Strategy(mesh=make_mesh({"pipeline": 4}), **fields))


def spent(costs, block, phases, *, once=False):
    chosen = (c for c in costs if c.step.block == block and c.step.phase in phases)
    return sum(float(c.local_s) for c in chosen if (c.step.scope == "step") == once)


def test_one_stage_is_a_sum():
    step = TIMES.step_s(PipelineCost(microbatches=4))
    each = (0.5 + 0.25) + 8 * (1 + 2) + (3 + 5)
    assert step.step_s == pytest.approx(4 * each + (0.1 + 0.4) + 8 * (0.2 + 0.05) + (0.3 + 0.6) + 0.01)
    assert step.bubble_s == 0


@pytest.mark.parametrize(("software", "ends"), [("compiled", 0.1 + 0.4 + 0.3 + 0.6), ("eager", 0.3 + 0.6)])
def test_stages_by_hand(software, ends):
    """1F1B on four stages of two layers, eight microbatches: the last stage has the head, and three wait to begin.
    One program updates both ends on every stage."""
    pipeline = PipelineCost(stages=4, microbatches=8, in_lockstep=software == "compiled")
    step = TIMES.step_s(pipeline)
    layers = 2 * (1 + 2)
    assert step.bubble_s == pytest.approx(3 * layers)
    once = 2 * (0.2 + 0.05) + ends
    assert TIMES.sends_s(pipeline) == pipeline.num_sends * 0.125 / 2
    assert step.step_s == pytest.approx(8 * (layers + 8) + TIMES.sends_s(pipeline) + 3 * layers + once + 0.01)


def test_uneven_stages_wait_for_the_longest():
    """Eight layers on three stages: the longest holds three."""
    step = TIMES.step_s(PipelineCost(stages=3, microbatches=8))
    assert step.bubble_s == pytest.approx(2 * 3 * 3)


def test_interleaving_halves_the_idle_time():
    one, two = (
        PipelineCost(stages=4, microbatches=8),
        PipelineCost(schedule="interleaved", chunks=2, stages=4, microbatches=8),
    )
    plain, halved = TIMES.step_s(one), TIMES.step_s(two)
    assert plain.bubble_s == pytest.approx(2 * halved.bubble_s)
    sends = TIMES.sends_s(one) - TIMES.sends_s(two)
    assert plain.step_s - halved.step_s == pytest.approx(halved.bubble_s + sends)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2", "dualpipe"])
def test_a_step_of_layers_alone_is_the_simulation(schedule):
    """Without ends, sends and once-a-step work: the makespan of the schedule's rows."""
    layer = msgspec.structs.replace(LAYER, last=0.0, update=0.0)
    times = BlockTimes(num_layers=8, layers=(layer,), ends=(), send_s=0.0, after_s=0.0)
    rows, passes = build(schedule, stages=4, microbatches=8), {"forward_s": 2, "backward_s": 2.5, "weight_s": 1.5}
    apart = times.step_s(PipelineCost(schedule=schedule, stages=4, microbatches=8, in_lockstep=False))
    assert apart.step_s == pytest.approx(simulate(rows, **passes).makespan_s)
    together = times.step_s(PipelineCost(schedule=schedule, stages=4, microbatches=8))
    assert together.step_s == pytest.approx(lockstep_seconds(tick_tables(rows), **passes))


def test_dualpipe_updates_two_stages_and_takes_turns_at_the_ends():
    """One program sums and updates each stage once, where its weights are at home."""
    times = msgspec.structs.replace(TIMES, exchange_parts_s=(0.8, 0.02))
    for software, copies, meet in (("eager", 2, 0.0), ("compiled", 1, 0.8 / 4 + 0.02)):
        pipeline = PipelineCost(schedule="dualpipe", stages=4, microbatches=8, in_lockstep=software == "compiled")
        step, sends = times.step_s(pipeline), times.sends_s(pipeline)
        once = copies * 2 * (0.2 + 0.05) + (0.1 + 0.4) + (0.3 + 0.6) + meet
        each = 2 * 3 + (0.75 + 8) / 2
        assert step.step_s - step.bubble_s == pytest.approx(8 * each + sends + once + 0.01)


def test_offloaded_results_hold_up_passes_that_are_shorter():
    """1.5 s over PCIe for a layer's results: forward passes of 1 s wait, backward passes of 2 s do not."""
    plain = TIMES.step_s(PipelineCost(microbatches=4)).step_s
    moved = TIMES.step_s(PipelineCost(microbatches=4), Transfers(activations_s=1.5, optimizer_s=7.0)).step_s
    assert moved - plain == pytest.approx(4 * 8 * 0.5 + 7)


def test_the_estimate_of_four_stages_is_the_sum_of_its_steps():
    """tiny on four chips in four stages, eight microbatches, nothing but local ops, sends and the update."""
    found = priced(num_microbatches=8, remat="none")
    layer = [spent(found.costs.all, "layer", (phase,)) for phase in ("forward", "backward")]
    head = spent(found.costs.all, "head", ("forward", "backward"))
    assert head > spent(found.costs.all, "embed", ("forward", "backward")) > 0
    sent = 2 * 4 * 512 * 256
    send = float(found.rates.groups[frozenset({"pipeline"})]["permute"].time(sent))
    assert send >= sent / (2 * CLUSTER.chip.ici_link_bytes_per_s)
    sends = PipelineCost(stages=4, microbatches=8).num_sends * send
    bubble = 3 * 2 * sum(layer)
    update = {c.step.result.name: c for c in found.costs.all if c.step.op == "adamw"}
    per_layer = sum(float(c.time_s) for name, c in update.items() if c.count == 8)
    ends = [float(update[n].time_s) for n in ("embed", "unembed", "final_norm")]
    sums = sum(float(c.time_s) for c in found.costs.all if c.step.is_collective and c.step.phase == "update")
    over_stages = [c for c in found.costs.all if c.step.block == "stage"]
    assert [c.network_bytes for c in over_stages] == [4 * 4096 * 256, 4 * 256, 4 * 256 * 4096]  # float32 sums
    between = sends + sum(float(c.time_s) for c in over_stages)
    wanted = 8 * (2 * sum(layer) + head) + between + bubble + 2 * per_layer + sum(ends) + sums
    assert found.estimate.step_s == pytest.approx(wanted, rel=1e-9)
    assert found.estimate.terms["bubble"] == pytest.approx(bubble)
    latency = sum(float(c.latency_s) for c in over_stages)
    assert found.estimate.terms["pipeline"] == pytest.approx(between - latency)


def test_work_of_the_busiest_device_and_of_all():
    """FLOPs are of all layers; terms of the last stage: two layers of eight and the head."""
    found, alone = (
        priced(num_microbatches=8),
        price_strategy(Setting(TINY, parse_cluster("v5e:1x1"), JOB), Strategy(mesh=make_mesh({}), num_microbatches=8)),
    )
    assert found.estimate.flops == pytest.approx(alone.estimate.flops)
    layers = sum(
        float(c.math_s * c.count) for c in alone.costs.all if c.step.op == "einsum" and c.step.block == "layer"
    )
    head = sum(float(c.math_s * c.count) for c in alone.costs.all if c.step.op == "einsum" and c.step.block == "head")
    here = sum(float(c.math_s * c.here) for c in found.costs.all if c.step.op == "einsum")
    assert here == pytest.approx(layers / 4 + head)
    executed, counted = (
        found.estimate.flops,
        found.estimate.hfu * 4 * found.rates.peak_flops_per_s * found.estimate.step_s,
    )
    assert counted == pytest.approx(alone.estimate.hfu * found.rates.peak_flops_per_s * alone.estimate.step_s)
    # masked blocks are skipped, and counted
    assert counted > executed
    assert found.estimate.hfu > found.estimate.mfu


def test_gpipe_s_idle_share_of_a_step():
    """(K - 1) / (M + K - 1) of what the stages do, ends and updates apart."""
    found = priced(num_microbatches=8, schedule="gpipe")
    (layer,) = found.times.layers
    layers = 2 * (layer.forward + layer.backward)
    bubble = found.estimate.terms["bubble"]
    assert bubble / (bubble + 8 * layers) == pytest.approx(3 / 11)


def test_a_tied_table_is_summed_and_updated_once():
    """gpt2's table belongs to embedding and head: its gradient is summed, and it is updated, in one of them."""
    model, axes = catalogue.load_model("gpt2"), {"pipeline": 2, "data": 2}
    strategy = Strategy(mesh=make_mesh(axes), num_microbatches=4)
    found = price_strategy(Setting(model, CLUSTER, JOB), strategy)
    times = found.times
    table = next(c for c in found.costs.all if c.step.op == "adamw" and c.step.result.name == "embed")
    assert times.ends[0].update > table.time_s
    assert times.ends[-1].update < table.time_s
    reduced = [c for c in found.costs.all if c.step.scope == "step" and c.step.inputs[0].name == "dembed" and c.hides]
    assert [c.step.block for c in reduced] == ["embed", "stage"]
    assert table.here == table.count == 1
