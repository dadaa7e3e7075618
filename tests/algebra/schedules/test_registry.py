"""A schedule is one file: what the registry lists, and a toy of which nothing else is known."""

import msgspec
import numpy as np
import pytest

from meshwright.algebra.schedules.registry import build, default_chunks, definition, schedule_names, searched_schedules
from meshwright.algebra.schedules.simulation import simulate
from meshwright.algebra.schedules.ticks import tick_tables
from meshwright.core.errors import InputError
from meshwright.cost.pipeline import PipelineCost, schedule_fits, schedule_refusal
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step
from meshwright.plan.legal import legal
from meshwright.plan.planner import rank_plans
from meshwright.plan.space import FULL, USUAL
from meshwright.plan.why.explain import explain
from meshwright.report.plans.timeline import timeline_figure
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from tests.schedule_toy import added_file

TIMES = {"forward_s": 1.0, "backward_s": 1.25, "weight_s": 1.0}
MODEL, CLUSTER, JOB = catalogue.load_model("llama3-8b"), parse_cluster("h100:8x2"), Job(batch_seqs=64, seq_len=4096)


@pytest.fixture
def toy(tmp_path):
    with added_file(tmp_path) as name:
        yield name


def test_every_file_with_a_schedule_is_listed_oldest_first():
    known = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "dualpipe", "dualpipe-v")
    assert schedule_names() == known
    assert USUAL.schedules == ("1f1b", "interleaved")
    assert FULL.schedules == ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "dualpipe", "dualpipe-v")


@pytest.mark.parametrize("name", schedule_names())
def test_what_a_file_says_is_what_its_rows_are(name):
    made = build(name, stages=4, microbatches=8, chunks=default_chunks(name))
    found = definition(name).stage_placement
    assert (made.name, found.weight_copies) == (name, made.weight_copies)
    first, last = ({route[end].device for route in made.routes} for end in (0, -1))
    assert (found.ends_share is not None) == bool(first & last)


def test_a_file_with_an_order_is_a_schedule(toy):
    assert schedule_names()[-1] == toy
    assert searched_schedules(every=True)[-1] == toy
    made = build(toy, stages=2, microbatches=3)
    assert " ".join(map(str, made.orders[0])) == "F0 F1 F2 B2 B1 B0"
    with pytest.raises(InputError, match=r"chunks=2 is not for last-in-first-out, whose devices hold 1. Use chunks=1"):
        build(toy, stages=2, microbatches=3, chunks=2)
    assert timeline_figure(made, simulate(made, forward_s=1.0, backward_s=2.0), unit="units", title="", subtitle="")


def test_it_is_priced_by_its_simulation(toy):
    """All arrays at once, by the rows and the tick tables of each size."""
    stages, counts = np.array([1, 2, 4, 4]), np.array([8, 4, 4, 8])
    for software in ("compiled", "eager"):
        found = PipelineCost(schedule=toy, stages=stages, microbatches=counts, in_lockstep=software == "compiled")
        for index in (1, 2, 3):
            p, m = int(stages[index]), int(counts[index])
            made = build(toy, stages=p, microbatches=m)
            run = simulate(made, forward_s=1.0, backward_s=1.25, weight_s=1.0)
            if software == "eager":
                assert found.bubble_s(**TIMES)[index] == pytest.approx(run.makespan_s - 3.25 * m)
                assert found.stash[index] == max(run.peak_stash)
                waits = simulate(made, forward_s=1.0, backward_s=1.25, weight_s=1.0, send_s=1e-4).makespan_s
                assert found.num_sends[index] == pytest.approx((waits - run.makespan_s) / 1e-4, abs=1e-6)
            else:
                slots = tick_tables(made).slots
                assert (found.stash[index], found.pending_stash[index]) == (slots.stash, slots.handed)
                assert [int(one[index]) for one in found.messages] == [slots.x, slots.dx, slots.head]
        assert (found.stash[0], found.bubble_s(**TIMES)[0], found.num_sends[0]) == (1, 0, 0)


def test_it_is_planned_and_explained(toy):
    choices = msgspec.structs.replace(USUAL, schedules=(*USUAL.schedules, toy))
    found = rank_plans(Setting(MODEL, CLUSTER, JOB), axes={"pipeline": 2}, choices=choices, overrides={"schedule": toy})
    best = found.plans[0]
    assert best.strategy.schedule == toy
    assert legal(Setting(MODEL, CLUSTER, JOB), best.strategy) == ()
    alone = estimate_step(Setting(MODEL, CLUSTER, JOB), best.strategy)
    assert alone.step_s == pytest.approx(best.predicted.step_s)
    gpipe = estimate_step(Setting(MODEL, CLUSTER, JOB), msgspec.structs.replace(best.strategy, schedule="gpipe"))
    assert gpipe.hbm_bytes_per_chip <= alone.hbm_bytes_per_chip
    assert explain(found.plans[0]).between.schedule == toy


def test_sizes_that_take_too_long_to_simulate_are_refused(toy):
    sizes = {"stages": 8, "chunks": 1, "microbatches": 100_000}
    assert not schedule_fits(toy, **sizes)
    assert schedule_fits("gpipe", **sizes)
    assert schedule_refusal(toy, **sizes) == (
        "last-in-first-out has no closed forms, and 8 stages of 1 chunks x 100000 microbatches are too many passes to "
        "simulate. Use at most 4166 microbatches."
    )


def test_a_file_that_a_person_writes_is_priced(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("0: F0 F1 B0 B1\n1: F0 B0 F1 B1\n")
    own, known = (
        PipelineCost(schedule=name, stages=2, microbatches=2, in_lockstep=False) for name in (str(path), "1f1b")
    )
    assert own.bubble_s(**TIMES) == pytest.approx(known.bubble_s(**TIMES))
    assert own.stash == known.stash
    assert schedule_refusal(str(path), stages=2, chunks=1, microbatches=4).endswith("Change one of them.")
    path.write_text("0: F0 F1 F2 B0 B1 B2\n1: F0 F1 F2 B0 B1 B2\n")
    assert schedule_fits(str(path), stages=2, chunks=1, microbatches=3), "a file that changes is read again"
