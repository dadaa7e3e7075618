"""The search over all strategies at once: what it finds is legal, priced as alone, and ranked."""

import itertools
import math

import numpy as np
import pytest

from meshwright.cost.train_step import estimate_step
from meshwright.plan.candidates import memory_of_any_mesh, open_space, parts_of, rows_on_any_chips, rows_on_chips
from meshwright.plan.legal import legal
from meshwright.plan.search import search
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh

LLAMA70B, LLAMA8B, TINY = (catalogue.model(name) for name in ("llama3-70b", "llama3-8b", "tiny"))
OPEN = Strategy(mesh=make_mesh({}))


def space(model=LLAMA70B, seq_len=4096, **choices):
    return open_space(model, seq_len, OPEN, **choices)


@pytest.fixture(scope="module")
def pod():
    """llama3-70b, 4 Mi tokens, on 8192 chips: the book's main case."""
    return search(space(), parse_cluster("v5p:16x16x32"), 1024, top=8)


def test_the_book_s_split_of_llama3_70b_is_among_the_best(pod):
    """How to Scale Your Model, section 6.3: 2048-way FSDP and sequence parallelism by 4-way tensor, or 1024 x 8."""
    assert {(2048, 4), (1024, 8)} <= {found.split for found in pod.found[:5]}


def test_results_are_sorted_and_one_of_each_split_comes_first(pod):
    times = [found.estimate.step_s for found in pod.found]
    assert times == sorted(times)
    assert len(pod.found) == 8
    assert {found.split for found in pod.found} == {(8192, 1), (4096, 2), (2048, 4), (1024, 8)}
    meshes = [tuple(found.strategy.mesh.values()) for found in pod.found]
    assert len(set(meshes)) == len(meshes)


def test_what_is_found_is_legal_and_priced_as_alone(pod):
    job, cluster = Job(batch_seqs=1024, seq_len=4096), parse_cluster("v5p:16x16x32")
    for found in pod.found[:3]:
        assert legal(LLAMA70B, cluster, job, found.strategy) == ()
        alone = estimate_step(LLAMA70B, cluster, job, found.strategy)
        assert found.estimate.step_s == pytest.approx(alone.step_s, rel=1e-9)
        assert found.estimate.hbm_bytes_per_chip == pytest.approx(alone.hbm_bytes_per_chip, rel=1e-9)


def test_the_best_is_the_best_of_every_strategy_priced_one_by_one():
    cluster, job, policies = parse_cluster("v5e:2x2"), Job(batch_seqs=8, seq_len=256), ("none", "block")
    outcome = search(space(TINY, 256, remats=policies), cluster, 8, top=1)
    times = {}
    for data, fsdp, context, tensor in itertools.product((1, 2, 4), repeat=4):
        for remat, count in itertools.product(policies, (1, 2, 4)):
            mesh = make_mesh({"data": data, "fsdp": fsdp, "context": context, "tensor": tensor})
            strategy = Strategy(mesh=mesh, remat=remat, num_microbatches=count)
            if strategy.num_chips == 4 and not legal(TINY, cluster, job, strategy):
                times[tuple(mesh.values()), remat, count] = estimate_step(TINY, cluster, job, strategy).step_s
    assert len(times) > 30
    assert outcome.found[0].estimate.step_s == pytest.approx(min(times.values()), rel=2e-3)
    best = outcome.found[0].strategy
    here = times[tuple(best.mesh.values()), best.remat, best.num_microbatches]
    assert outcome.found[0].estimate.step_s == pytest.approx(here, rel=1e-9)


def test_equally_fast_prefers_fsdp_and_few_microbatches():
    """On one chip nothing communicates: remat and microbatches only add work."""
    found = search(space(TINY, 256), parse_cluster("v5e:1x1"), 16, top=1).found[0]
    assert (found.strategy.remat, found.strategy.num_microbatches) == ("none", 1)


def test_fixed_axes_remat_and_microbatches_stay():
    narrow = space(LLAMA8B, remats=("block",), num_microbatches=2, fixed={"tensor": 4, "context": 1})
    outcome = search(narrow, parse_cluster("v5p:4x4x4"), 256, top=5)
    assert outcome.found
    for found in outcome.found:
        assert (found.strategy.mesh["tensor"], found.strategy.mesh["context"]) == (4, 1)
        assert (found.strategy.remat, found.strategy.num_microbatches) == ("block", 2)


def test_all_of_8960_chips_with_the_nearest_batch():
    """1024 sequences have no factor 5 or 7; within a quarter of them 1120 do best."""
    cluster = parse_cluster("v5p:16x20x28")
    assert search(space(), cluster, 1024).num_meshes == 0
    found = search(space(), cluster, 1024, reach=0.25, top=1).found[0]
    assert found.batch_seqs == 1120
    assert found.strategy.mesh == {"data": 35, "fsdp": 32, "context": 2, "tensor": 4}


def test_batches_in_reach_are_the_nearest_that_each_mesh_divides():
    rows = rows_on_chips(space(), 1024, num_chips=8960, reach=0.25)
    assert len(rows)
    shards = rows[:, 0] * rows[:, 1]
    assert (rows[:, 4] % shards == 0).all()
    assert (np.abs(rows[:, 4] - 1024) <= 256).all()
    assert (np.abs(rows[:, 4] - 1024) <= shards).all()


def test_rows_are_all_meshes_that_divide():
    rows = rows_on_chips(space(TINY, 64), 12, num_chips=8)
    wanted = set()
    for data, fsdp, context, tensor in itertools.product((1, 2, 4, 8), repeat=4):
        even = 12 % (data * fsdp) == 0 and 64 % (context * tensor) == 0 and 256 % (fsdp * context) == 0
        if data * fsdp * context * tensor == 8 and even and 4 % tensor == 0:
            wanted.add((data, fsdp, context, tensor))
    assert {tuple(row) for row in rows[:, :4].tolist()} == wanted


def test_meshes_of_any_number_of_chips_hold_those_of_one_number():
    every = rows_on_any_chips(space(TINY, 64), 12)
    on_six = {tuple(row) for row in every.tolist() if math.prod(row[:4]) == 6}
    assert on_six == {tuple(row) for row in rows_on_chips(space(TINY, 64), 12, num_chips=6).tolist()}
    assert on_six


def test_parts_of_a_cluster():
    shapes = {part.shape for part in parts_of(parse_cluster("v5p:4x4x8"), 32)}
    assert shapes == {(4, 4, 2), (4, 2, 4), (2, 4, 4), (4, 1, 8), (1, 4, 8), (2, 2, 8)}
    assert parts_of(parse_cluster("v5p:16x20x28"), 4096)[0].shape == (16, 16, 16)
    assert parts_of(parse_cluster("h100:8x4"), 16)[0].shape in {(8, 2), (4, 4)}
    assert parts_of(parse_cluster("4*v5e:16x16"), 512)[0].short_name == "2*v5e:16x16"
    assert parts_of(parse_cluster("v5p:4x4x4"), 63) == ()


def test_memory_of_any_mesh_falls_with_chips_that_shard():
    needs = memory_of_any_mesh(space(LLAMA8B), parse_cluster("v5p:4x4x4"), 64)
    assert needs[1] > 8e10 > needs[64]
    powers = [needs[2**n] for n in range(10)]
    assert powers == sorted(powers, reverse=True)
    alone = search(space(LLAMA8B), parse_cluster("v5p:4x4x4"), 64)
    assert alone.least_bytes == pytest.approx(needs[64], rel=1e-9)


def test_nothing_that_fits_is_not_an_error_here():
    outcome = search(space(), parse_cluster("v5e:4x4"), 16)
    assert outcome.found == ()
    assert outcome.num_meshes > 0
    assert outcome.least_bytes > 15.75 * 2**30
