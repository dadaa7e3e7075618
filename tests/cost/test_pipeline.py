"""What a schedule does to a step: layers per device, microbatches in flight, idle time, the two ends."""

import numpy as np
import pytest

from meshwright.algebra.schedule_rows import SCHEDULES, build, default_chunks
from meshwright.algebra.schedule_simulation import simulate
from meshwright.cost.pipeline import ONE_STAGE, Pipeline, schedule_fits, schedule_refusal, strategy_pipeline
from meshwright.spec.strategy import Strategy, make_mesh


def pipeline(schedule="1f1b", *, stages=4, microbatches=8, chunks=None):
    chunks = default_chunks(schedule) if chunks is None else chunks
    return Pipeline(schedule=schedule, stages=stages, microbatches=microbatches, chunks=chunks)


@pytest.mark.parametrize(
    ("stages", "chunks", "layers", "held"),
    [(4, 1, 80, 20), (7, 1, 80, 12), (4, 2, 80, 20), (2, 2, 10, 6), (8, 1, 8, 1)],
)
def test_layers_of_the_device_that_holds_most(stages, chunks, layers, held):
    """Runs of layers differ by one at most: 10 layers in four runs are 3, 3, 2 and 2, two of three on one device."""
    found = pipeline("interleaved" if chunks > 1 else "1f1b", stages=stages, chunks=chunks)
    assert found.layers_held(layers) == held
    assert found.share(layers) == held / layers


def test_gpipe_s_idle_share():
    """(K - 1) / (M + K - 1) for K stages and M microbatches. Source: Huang et al., GPipe (2019), section 2.3."""
    for stages, count in ((2, 4), (4, 8), (8, 8), (8, 64)):
        idle = pipeline("gpipe", stages=stages, microbatches=count).bubble_s(
            forward_s=1.0, backward_s=2.0, weight_s=1.0
        )
        assert idle / (idle + 3 * count) == pytest.approx((stages - 1) / (count + stages - 1))


@pytest.mark.parametrize("chunks", [2, 4, 5])
def test_interleaving_divides_the_idle_time_by_the_chunks(chunks):
    times = {"forward_s": 1.5, "backward_s": 3.25, "weight_s": 1.0}
    assert pipeline("interleaved", chunks=chunks).bubble_s(**times) == pytest.approx(
        pipeline("1f1b").bubble_s(**times) / chunks
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_idle_time_is_the_simulation_s(schedule, stages, microbatches):
    """Times of all layers of a device; the simulation takes those of one run of layers, weight gradients apart."""
    one = pipeline(schedule, stages=stages, microbatches=microbatches)
    rows = build(schedule, stages=stages, microbatches=microbatches, chunks=one.chunks)
    found = one.bubble_s(forward_s=1.0, backward_s=2.25, weight_s=1.0)
    run = simulate(rows, forward_s=1 / one.chunks, backward_s=1.25 / one.chunks, weight_s=1 / one.chunks)
    assert found == pytest.approx(run.makespan_s - 3.25 * microbatches)
    assert one.stash == pytest.approx(max(run.peak_stash))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 4, 6])
def test_sends_that_a_step_waits_for(schedule, stages):
    """Equal passes, sends that are short beside them: what the simulated step takes longer for them."""
    one = pipeline(schedule, stages=stages, microbatches=4 * stages)
    rows = build(schedule, stages=stages, microbatches=4 * stages, chunks=one.chunks)
    passes = {"forward_s": 1.0, "backward_s": 1.0, "weight_s": 1.0}
    free, short = (simulate(rows, **passes, send_s=send).makespan_s for send in (0.0, 1e-4))
    assert one.num_sends == pytest.approx((short - free) / 1e-4, abs=2 if schedule == "1f1b" else 1)


def test_microbatches_in_flight():
    """1F1B holds as many as there are stages, GPipe all; interleaved (V + 1) P - 1 of 1/V each."""
    assert pipeline("1f1b", stages=4, microbatches=16).stash == 4
    assert pipeline("1f1b", stages=4, microbatches=2).stash == 2
    assert pipeline("gpipe", stages=4, microbatches=16).stash == 16
    assert pipeline("interleaved", stages=4, microbatches=16, chunks=2).stash == pytest.approx((3 * 4 - 1) / 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_stage_has_no_pipeline(schedule):
    one = Pipeline(schedule=schedule, microbatches=16)
    assert (one.stash, one.weight_copies, one.share(80)) == (1, 1, 1)
    assert one.bubble_s(forward_s=1.0, backward_s=2.0, weight_s=0.5) == 0
    assert one.ends([3.0, 0.0, 5.0]) == one.ends_run([3.0, 0.0, 5.0]) == 8
    assert schedule_fits(schedule, stages=1, chunks=1, microbatches=16)
    assert ONE_STAGE.end_shares == (1, 1)


def test_who_holds_and_runs_the_ends():
    """The first and the last stage apart; both on each outer device of dualpipe, in turns; on one of dualpipe-v."""
    for schedule, held, run, shares in (
        ("1f1b", 5, 5, (0, 1)),
        ("interleaved", 5, 5, (0, 1)),
        ("dualpipe", 8, 4, (0.5, 0.5)),
        ("dualpipe-v", 8, 8, (1, 1)),
    ):
        one = pipeline(schedule)
        assert (one.ends([3.0, 5.0]), one.ends_run([3.0, 5.0])) == (held, run)
        assert one.end_shares == shares
    assert pipeline("dualpipe").weight_copies == 2
    assert pipeline("dualpipe-v").weight_copies == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fits_and_refusals_agree(schedule):
    for stages in (2, 3, 4):
        for count in (1, 4, 6, 8, 12):
            for chunks in (1, 2, 3):
                sizes = {"stages": stages, "chunks": chunks, "microbatches": count}
                if schedule_fits(schedule, **sizes):
                    build(schedule, **sizes)
                else:
                    assert schedule_refusal(schedule, **sizes).endswith(".")


def test_many_at_once():
    sizes = {"stages": np.array([1, 2, 4]), "microbatches": np.array([1, 4, 16]), "chunks": np.array([1, 2, 5])}
    many = Pipeline(schedule="interleaved", **sizes)
    times = {"forward_s": np.array([1.0, 2.0, 3.0]), "backward_s": 4.0, "weight_s": 1.0}
    for index in range(3):
        one = Pipeline(schedule="interleaved", **{name: int(values[index]) for name, values in sizes.items()})
        assert many.share(80)[index] == one.share(80)
        assert many.stash[index] == one.stash
        mine = {**times, "forward_s": float(times["forward_s"][index])}
        assert many.bubble_s(**times)[index] == one.bubble_s(**mine)


def test_the_pipeline_of_a_strategy():
    strategy = Strategy(mesh=make_mesh({"pipeline": 4}), schedule="interleaved", chunks=2, num_microbatches=8)
    assert strategy_pipeline(strategy) == pipeline("interleaved", chunks=2)
    assert strategy_pipeline(Strategy(mesh={"data": 2})) == ONE_STAGE
