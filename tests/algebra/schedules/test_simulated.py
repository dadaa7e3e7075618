"""Schedules priced by their simulation: the same as their closed forms, where they have some."""

import random

import numpy as np
import pytest

from meshwright.algebra.schedules.forms import is_legal, lockstep_forms, longest_paths, stage_forms
from meshwright.algebra.schedules.registry import default_chunks, schedule_names
from meshwright.algebra.schedules.simulation import simulate
from meshwright.algebra.schedules.table import PLACEMENTS, Schedule, StagePass
from meshwright.algebra.schedules.ticks import Slots, lockstep_seconds, tick_tables
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from tests.schedule_toy import without_forms

STAGES, COUNTS = (array.ravel() for array in np.meshgrid([2, 3, 4, 6], [2, 3, 4, 8, 12, 16], indexing="ij"))


def grid(name):
    """Sizes that a schedule exists for; of zb-h2 those where its closed forms are no bounds."""
    chunks = default_chunks(name)
    fits = is_legal(name, stages=STAGES, microbatches=COUNTS, chunks=chunks)
    if name == "zb-h2":
        fits &= COUNTS >= 2 * STAGES - 1
    return STAGES[fits], COUNTS[fits], np.full(fits.sum(), chunks)


def priced(name, sizes, times):
    return (
        stage_forms(name).bubble_s(*sizes, *times),
        lockstep_forms(name).bubble_s(*sizes, *times),
        stage_forms(name).stash(*sizes),
        *(getattr(lockstep_forms(name), field)(*sizes) for field in ("ticks", *Slots.__struct_fields__)),
    )


@pytest.mark.parametrize("name", schedule_names())
def test_without_closed_forms_a_schedule_costs_the_same(name):
    sizes, rng = grid(name), np.random.default_rng(0)
    for _ in range(4):
        # from passes that take nothing to passes that take all
        times = rng.random((3, len(sizes[0]))) ** 3
        wanted = priced(name, sizes, times)
        with without_forms(name):
            found = priced(name, sizes, times)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", schedule_names())
def test_sends_are_near_the_closed_forms(name):
    """Forms of sends are for twice as many microbatches as stages and more."""
    sizes = np.array([2, 4, 6]), np.array([8, 16, 24]), default_chunks(name)
    wanted, ticks = stage_forms(name).sends(*sizes), lockstep_forms(name).sends(*sizes)
    with without_forms(name):
        assert np.abs(stage_forms(name).sends(*sizes) - wanted).max() <= 2
        if name != "naive":
            assert (lockstep_forms(name).sends(*sizes) == ticks).all()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe-v"])
def test_a_whole_step_costs_the_same(name):
    model, cluster, job = catalogue.load_model("llama3-8b"), parse_cluster("h100:8x2"), Job(batch_seqs=64, seq_len=4096)
    for microbatches in (8, 16):
        one = Strategy(
            mesh=make_mesh({"pipeline": 4, "fsdp": 4}),
            num_microbatches=microbatches,
            schedule=name,
            chunks=default_chunks(name),
        )
        wanted = estimate_step(Setting(model, cluster, job), one)
        with without_forms(name):
            found = estimate_step(Setting(model, cluster, job), one)
        assert found.step_s == pytest.approx(wanted.step_s, rel=1e-12)
        assert found.hbm_bytes_per_chip == wanted.hbm_bytes_per_chip


def test_all_longest_paths_are_found():
    """Of a step made of known paths: those that are the longest for some times, and no other."""
    longest = [(7, 1, 1), (1, 7, 1), (1, 1, 7), (4, 4, 3)]
    others = [(3, 3, 2), (4, 3, 3), (2, 2, 4)]
    step = lambda *times: max(sum(a * b for a, b in zip(path, times, strict=True)) for path in longest + others)  # noqa: E731
    assert sorted(longest_paths(step)) == sorted(longest)


def any_order(stages, count, seed):
    """A schedule that can run, and that no one would write: each pass as soon as chance takes it."""
    chance, orders, done = random.Random(seed), [[] for _ in range(stages)], set()
    left = [(kind, stage, m) for kind in "FBW" for stage in range(stages) for m in range(count)]

    def needs(kind, stage, m):
        if kind == "F":
            return {("F", stage - 1, m)} if stage else set()
        own = {("F" if kind == "B" else "B", stage, m)}
        return own | {("B", stage + 1, m)} if kind == "B" and stage < stages - 1 else own

    while left:
        one = chance.choice([one for one in left if needs(*one) <= done])
        left.remove(one)
        done.add(one)
        orders[one[1]].append(StagePass(one[0], one[2]))
    routes = PLACEMENTS["looped"].routes(stages, 1)
    return Schedule(name="any", routes=routes, route_of=(0,) * count, orders=tuple(map(tuple, orders)))


@pytest.mark.parametrize("seed", range(8))
def test_any_order_costs_what_its_simulation_takes(seed):
    made = any_order(*random.Random(seed).choice([(3, 5), (4, 8), (6, 10)]), seed)
    tables, rng = tick_tables(made), np.random.default_rng(seed)
    for step in (
        lambda f, b, w: simulate(made, forward_s=f, backward_s=b, weight_s=w, send_s=0).makespan_s,
        lambda f, b, w: lockstep_seconds(tables, forward_s=f, backward_s=b, weight_s=w, send_s=0),
    ):
        paths = np.array(longest_paths(step))
        for times in rng.random((50, 3)) ** 4:
            assert (paths @ times).max() == pytest.approx(step(*times), rel=1e-12)
