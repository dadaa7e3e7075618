"""What a schedule does to a step: layers per device, microbatches in flight, idle time, the two ends."""

import msgspec
import numpy as np
import pytest

from meshwright.algebra.schedules.registry import build, default_chunks, schedule_names
from meshwright.algebra.schedules.simulation import simulate
from meshwright.algebra.schedules.ticks import lockstep_seconds, tick_tables
from meshwright.cost.pipeline import ONE_STAGE, PipelineCost, schedule_fits, schedule_refusal, strategy_pipeline
from meshwright.spec.strategy import Strategy, make_mesh


def pipeline(schedule="1f1b", *, stages=4, microbatches=8, chunks=None, software="compiled"):
    chunks = default_chunks(schedule) if chunks is None else chunks
    is_one = software == "compiled"
    return PipelineCost(schedule=schedule, stages=stages, microbatches=microbatches, chunks=chunks, in_lockstep=is_one)


@pytest.mark.parametrize(
    ("stages", "chunks", "layers", "held"),
    [(4, 1, 80, 20), (7, 1, 80, 12), (4, 2, 80, 20), (2, 2, 10, 6), (8, 1, 8, 1)],
)
def test_layers_of_the_device_that_holds_most(stages, chunks, layers, held):
    """Runs of layers differ by one at most: 10 layers in four runs are 3, 3, 2 and 2, two of three on one device."""
    found = pipeline("interleaved" if chunks > 1 else "1f1b", stages=stages, chunks=chunks)
    assert found.layers_held(layers) == held
    assert found.share(layers) == held / layers


@pytest.mark.parametrize("schedule", schedule_names())
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_idle_time_is_the_simulation_s(schedule, stages, microbatches):
    """Times of all layers of a device; the simulation takes those of one run of layers, weight gradients apart."""
    one = pipeline(schedule, stages=stages, microbatches=microbatches, software="eager")
    rows = build(schedule, stages=stages, microbatches=microbatches, chunks=one.chunks)
    found = one.bubble_s(forward_s=1.0, backward_s=1.25, weight_s=1.0)
    run = simulate(rows, forward_s=1 / one.chunks, backward_s=1.25 / one.chunks, weight_s=1 / one.chunks)
    assert found == pytest.approx(run.makespan_s - 3.25 * microbatches)
    assert one.stash == pytest.approx(max(run.peak_stash))
    assert one.pending_stash == 0


@pytest.mark.parametrize("schedule", schedule_names())
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_one_program_is_the_tables_that_run(schedule, stages, microbatches):
    """Idle time in fused ticks, and every buffer of the executor."""
    one = pipeline(schedule, stages=stages, microbatches=microbatches)
    tables = tick_tables(build(schedule, stages=stages, microbatches=microbatches, chunks=one.chunks))
    run_s = lockstep_seconds(tables, forward_s=1 / one.chunks, backward_s=1.25 / one.chunks, weight_s=1 / one.chunks)
    found = one.bubble_s(forward_s=1.0, backward_s=1.25, weight_s=1.0)
    assert found == pytest.approx(run_s - 3.25 * microbatches)
    slots = tables.slots
    assert (one.stash * one.chunks, one.pending_stash * one.chunks) == (slots.stash, slots.handed)
    assert one.messages == (slots.x, slots.dx, slots.head)


@pytest.mark.parametrize("schedule", schedule_names())
@pytest.mark.parametrize("stages", [2, 4, 6])
@pytest.mark.parametrize("software", ["compiled", "eager"])
def test_sends_that_a_step_waits_for(schedule, stages, software):
    """Equal passes, sends that are short beside them: what the simulated step takes longer for them."""
    one = pipeline(schedule, stages=stages, microbatches=4 * stages, software=software)
    rows = build(schedule, stages=stages, microbatches=4 * stages, chunks=one.chunks)
    passes = {"forward_s": 1.0, "backward_s": 1.0, "weight_s": 1.0}
    free, short = (
        simulate(rows, **passes, send_s=send).makespan_s
        if software == "eager"
        else lockstep_seconds(tick_tables(rows), **passes, send_s=send)
        for send in (0.0, 1e-4)
    )
    near = 2 if schedule == "1f1b" or software == "compiled" else 1
    assert one.num_sends == pytest.approx((short - free) / 1e-4, abs=near + 1e-6)


@pytest.mark.parametrize("schedule", schedule_names())
def test_one_stage_has_no_pipeline(schedule):
    one = PipelineCost(schedule=schedule, microbatches=16)
    assert (one.stash, one.weight_copies, one.share(80)) == (1, 1, 1)
    assert one.bubble_s(forward_s=1.0, backward_s=2.0, weight_s=0.5) == 0
    assert one.ends_held([3.0, 0.0, 5.0]) == one.ends_computed([3.0, 0.0, 5.0]) == 8
    assert schedule_fits(schedule, stages=1, chunks=1, microbatches=16)
    assert ONE_STAGE.end_shares == (1, 1)


def test_who_holds_and_runs_the_ends():
    """The first and the last stage apart; both on each outer device of dualpipe, in turns; on one of dualpipe-v. One
    program holds both everywhere, and runs them where others do."""
    for schedule, held, run, shares in (
        ("1f1b", 5, 5, (0, 1)),
        ("interleaved", 5, 5, (0, 1)),
        ("dualpipe", 8, 4, (0.5, 0.5)),
        ("dualpipe-v", 8, 8, (1, 1)),
    ):
        for software, holds in (("eager", held), ("compiled", 8)):
            one = pipeline(schedule, software=software)
            assert (one.ends_held([3.0, 5.0]), one.ends_computed([3.0, 5.0])) == (holds, run)
            assert one.end_shares == shares


def test_copies_of_a_stage():
    """Libraries keep two of everything for dualpipe, and sum and update both; one program only of what a step uses."""
    parts = ("weights", "gradients", "optimizer")
    for software, copies, sums in (("eager", [2, 2, 2], 2), ("compiled", [3, 2, 1], 1)):
        one = pipeline("dualpipe", software=software)
        assert ([int(one.copies(part)) for part in parts], int(one.sums)) == (copies, sums)
        assert [int(pipeline("dualpipe-v", software=software).copies(part)) for part in parts] == [1, 1, 1]


@pytest.mark.parametrize("schedule", schedule_names())
def test_fits_and_refusals_agree(schedule):
    for stages in (2, 3, 4):
        for count in (1, 4, 6, 8, 12):
            for chunks in (1, 2, 3):
                sizes = {"stages": stages, "chunks": chunks, "microbatches": count}
                if schedule_fits(schedule, **sizes):
                    build(schedule, **sizes)
                else:
                    assert schedule_refusal(schedule, **sizes).endswith(".")


def test_the_pipeline_of_a_strategy():
    strategy = Strategy(mesh=make_mesh({"pipeline": 4}), schedule="interleaved", chunks=2, num_microbatches=8)
    assert strategy_pipeline(strategy) == pipeline("interleaved", chunks=2)
    assert strategy_pipeline(Strategy(mesh={"data": 2})) == ONE_STAGE


def test_many_at_once():
    sizes = {"stages": np.array([1, 2, 4]), "microbatches": np.array([1, 4, 16]), "chunks": np.array([1, 2, 5])}
    many = PipelineCost(schedule="interleaved", **sizes)
    times = {"forward_s": np.array([1.0, 2.0, 3.0]), "backward_s": 4.0, "weight_s": 1.0}
    for index in range(3):
        one = PipelineCost(schedule="interleaved", **{name: int(values[index]) for name, values in sizes.items()})
        assert many.share(80)[index] == one.share(80)
        assert many.stash[index] == one.stash
        mine = {**times, "forward_s": float(times["forward_s"][index])}
        assert many.bubble_s(**times)[index] == one.bubble_s(**mine)


def test_one_program_holds_the_layers_of_each_block_that_its_pattern_has():
    """Two stages of four layers and four others: both devices have room for all of the first and two of the others."""
    cost = PipelineCost(stages=2, microbatches=4, names=("encoder_layer",) * 4 + ("layer",) * 4)
    assert [cost.share(8), cost.share(8, "encoder_layer"), cost.share(8, "layer")] == [0.75, 1.0, 0.5]
    apart = msgspec.structs.replace(cost, in_lockstep=False)
    assert apart.share(8, "layer") == apart.share(8) == 0.5
    alike = msgspec.structs.replace(cost, names=("layer",) * 8)
    assert alike.share(8, "layer") == alike.share(8) == 0.5
    # a step of decode has the decoder's layers alone
    alone = msgspec.structs.replace(cost, stages=1)
    assert [alone.share(4), alone.share(4, "layer"), alone.share(8, "layer")] == [1.0, 1.0, 1.0]
