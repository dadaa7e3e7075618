"""The search over all strategies at once: what it finds is legal, priced as alone, and ranked."""

import itertools
import math
import time
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.transformer import transformer
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step
from meshwright.plan.legal import legal
from meshwright.plan.search import search
from meshwright.plan.space import USUAL, Choices, Space, open_space
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration
from meshwright.spec.job import Job
from meshwright.spec.strategy import RERUN_POLICIES, USUAL_POLICIES, Strategy, make_mesh, standard_assignment

LLAMA70B, LLAMA8B, TINY = (catalogue.load_model(name) for name in ("llama3-70b", "llama3-8b", "tiny"))
OPEN = Strategy(mesh=make_mesh({}))


def space(model=LLAMA70B, seq_len=4096, **choices):
    return open_space(setting(model, seq_len), OPEN, **choices)


def setting(model, seq_len):
    return Setting(model, parse_cluster("v5p:4x4x4"), Job(batch_seqs=64, seq_len=seq_len))


def split(found):
    """(data x fsdp x context, tensor): what the book's analysis tells apart."""
    mesh = found.strategy.mesh
    return mesh["data"] * mesh["fsdp"] * mesh["context"], mesh["tensor"]


@pytest.fixture(scope="module")
def pod():
    """llama3-70b, 4 Mi tokens, on 8192 chips: the book's main case."""
    return search(space(), parse_cluster("v5p:16x16x32"), 1024, top=8)


def test_the_book_s_split_of_llama3_70b_is_among_the_best(pod):
    """How to Scale Your Model, section 6.3: 2048-way FSDP and sequence parallelism by 4-way tensor, or 1024 x 8."""
    assert {(2048, 4), (1024, 8)} <= {split(found) for found in pod.found[:5]}
    assert {found.strategy.mesh["pipeline"] for found in pod.found[:2]} == {1}


def test_the_book_s_split_is_among_the_best_that_run():
    """Without stages and with all keys on every device, which is what the product executes."""
    choices = Choices(zeros=(3,), context_attention=("gather",))
    found = search(space(choices=choices, fixed={"pipeline": 1}), parse_cluster("v5p:16x16x32"), 1024).found
    assert {(2048, 4), (1024, 8)} <= {split(one) for one in found[:5]}


def test_results_are_sorted_and_differ(pod):
    times = [found.predicted.step_s for found in pod.found]
    assert times == sorted(times)
    assert len(pod.found) == 8
    meshes = [tuple(found.strategy.mesh.values()) for found in pod.found]
    assert len(set(meshes)) == len(meshes)
    kinds = {(found.strategy.mesh["pipeline"], *split(found)) for found in pod.found}
    assert len(kinds) == 8


def test_what_is_found_is_legal_and_priced_as_alone(pod):
    job, cluster = Job(batch_seqs=1024, seq_len=4096), parse_cluster("v5p:16x16x32")
    assert any(found.strategy.mesh["pipeline"] > 1 for found in pod.found)
    for found in pod.found:
        assert legal(Setting(LLAMA70B, cluster, job), found.strategy) == ()
        alone = estimate_step(Setting(LLAMA70B, cluster, job), found.strategy)
        for name in ("step_s", "step_s_lower", "step_s_upper", "mfu", "hfu", "hbm_bytes_per_chip", "flops"):
            assert getattr(found.predicted, name) == pytest.approx(getattr(alone, name), rel=1e-9), name
        assert found.predicted.bound_by == alone.bound_by


# -- layers that run again for each other -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hbm_gb", "remat"), [(0.40, None), (0.45, "recompute-8"), (0.50, "recompute-2"), (0.6, "full")]
)
def test_layers_run_again_for_each_other_only_where_nothing_else_fits(hbm_gb, remat, monkeypatch):
    """FSDP alone, one long sequence a chip: what is found is the best of all policies tried at once."""
    cluster = parse_cluster("h100:8x1")
    cluster = msgspec.structs.replace(cluster, chip=msgspec.structs.replace(cluster.chip, hbm_bytes=hbm_gb * 1e9))
    where = Setting(TINY, cluster, Job(batch_seqs=8, seq_len=32768))
    every = Choices(remats=(*USUAL_POLICIES, *RERUN_POLICIES))
    fixed, opened = {"tensor": 1, "context": 1}, []
    found, best = (
        search(open_space(where, OPEN, fixed=fixed, choices=choices), cluster, 8, top=1) for choices in (USUAL, every)
    )
    assert found.found == best.found
    assert found.least_bytes == best.least_bytes or remat == "full"
    assert [one.strategy.remat for one in found.found] == [remat] * (remat is not None)
    with_reruns = Space.with_reruns
    monkeypatch.setattr(Space, "with_reruns", lambda self: opened.append(self) or with_reruns(self))
    search(open_space(where, OPEN, fixed=fixed), cluster, 8, top=1)
    assert len(opened) == (remat != "full")


def test_zero_2_is_found_where_it_is_fastest():
    """Whole gradients do not fit, and to gather the weights for each microbatch is slower."""
    cluster = parse_cluster("v5e:8x8")
    where = Setting(LLAMA8B, cluster, Job(batch_seqs=64, seq_len=8192), fitted_calibration(cluster.chip))
    (found,), (held,) = (
        search(open_space(where, OPEN, choices=choices), cluster, 64, top=1).found
        for choices in (USUAL, Choices(zeros=(2,)))
    )
    (without,) = search(open_space(where, OPEN, choices=Choices()), cluster, 64, top=1).found
    assert (found.strategy.zero, without.strategy.zero) == (2, 1)
    assert found.predicted.step_s == held.predicted.step_s < 0.999 * without.predicted.step_s


# -- against every strategy priced one by one ---------------------------------------------------------------

WIDE = Choices(
    remats=("none", "sqrt"),
    zeros=(3, 1),
    context_attention=("ring", "ulysses"),
    schedules=("1f1b", "interleaved", "dualpipe-v"),
    offloads=((), ("optimizer", "activations")),
)


def one_by_one(cluster, job, choices):
    """Every legal strategy of ``choices`` on a cluster without replicas, each once -> its estimate."""
    found = {}
    sizes = itertools.product((1, 2, 4), (1,), (1, 2, 4), (1, 2, 4), (1, 2, 4))
    meshes = [make_mesh(dict(zip(AXES, size, strict=True))) for size in sizes if math.prod(size) == cluster.num_chips]
    rest = (choices.remats, choices.zeros, choices.context_attention, choices.offloads, (1, 2, 4))
    for mesh, (remat, zero, mode, offload, count) in itertools.product(meshes, itertools.product(*rest)):
        # without an axis to split over, these are the strategy with the first of the choices
        if (zero != 3 and mesh["fsdp"] * mesh["context"] == 1) or (mode != "ring" and mesh["context"] == 1):
            continue
        for schedule, chunks in schedules_on(mesh["pipeline"], choices):
            strategy = Strategy(
                mesh=mesh, remat=remat, assignment=standard_assignment(zero=zero), context_attention=mode,
                schedule=schedule, chunks=chunks, offload=offload, num_microbatches=count,
            )  # fmt: skip
            if not legal(Setting(TINY, cluster, job), strategy):
                found[key_of(strategy)] = estimate_step(Setting(TINY, cluster, job), strategy)
    return found


AXES = ("pipeline", "data", "fsdp", "context", "tensor")


def schedules_on(stages, choices):
    """(schedule, chunks) that share tiny's eight layers out evenly; one stage needs no schedule."""
    if stages == 1:
        return [("1f1b", 1)]
    chunks = {"1f1b": (1,), "dualpipe-v": (2,), "interleaved": (2, 4, 8)}
    return [(name, count) for name in choices.schedules for count in chunks[name] if 8 % (stages * count) == 0]


def key_of(strategy):
    return (
        tuple(strategy.mesh.values()), strategy.remat, strategy.zero, strategy.context_attention, strategy.schedule,
        strategy.offload, strategy.num_microbatches, strategy.chunks,
    )  # fmt: skip


@contextmanager
def derived_once():
    """Steps of strategies that differ in nothing that steps depend on are derived once: it is most of their price."""
    known = {}

    def known_steps(program, strategy, **choices):
        assert not choices.get("symbolic")
        alike = msgspec.structs.replace(strategy, schedule="1f1b", chunks=1, offload=(), num_microbatches=1)
        key = msgspec.json.encode((alike, sorted(choices.items())))
        if key not in known:
            known[key] = derive(program, strategy, **choices)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in ("algebra.generation.derive",):
            patch.setattr(f"meshwright.{module}.derive", known_steps)
        yield


def test_steps_do_not_depend_on_the_schedule():
    """What lets `derived_once` derive so few."""
    program, mesh = transformer(TINY), make_mesh({"pipeline": 2, "fsdp": 2})
    plain = derive(program, Strategy(mesh=mesh, remat="sqrt"))
    for more in ({"schedule": "interleaved", "chunks": 2}, {"offload": ("optimizer",)}, {"num_microbatches": 4}):
        assert derive(program, Strategy(mesh=mesh, remat="sqrt", **more)) == plain


@pytest.fixture(scope="module")
def tried():
    """All strategies of tiny on four chips, and what the search makes of them."""
    cluster, job = parse_cluster("v5e:2x2"), Job(batch_seqs=4, seq_len=256)
    with derived_once():
        alone = one_by_one(cluster, job, WIDE)
    where = space(TINY, 256, choices=WIDE, fixed={"data": 1})
    outcome = search(where, cluster, 4, top=20, exhaustive=True, frontier=True)
    return alone, outcome


@pytest.mark.slow
def test_the_best_is_the_best_of_every_strategy_priced_one_by_one(tried):
    alone, outcome = tried
    assert len(alone) == outcome.num_candidates > 300
    assert {key[0][0] for key in alone} == {1, 2, 4}
    best = outcome.found[0]
    assert best.predicted.step_s == pytest.approx(min(one.step_s for one in alone.values()), rel=2e-3)


@pytest.mark.slow
def test_every_strategy_found_takes_what_it_takes_alone(tried):
    alone, outcome = tried
    assert {tuple(found.strategy.mesh.values()) for found in outcome.found} == {key[0] for key in alone}
    for found in (*outcome.found, *outcome.frontier):
        one = alone[key_of(found.strategy)]
        assert found.predicted.step_s == pytest.approx(one.step_s, rel=1e-9)
        assert found.predicted.memory == pytest.approx(one.memory)


@pytest.mark.slow
def test_each_mesh_is_listed_with_its_best(tried):
    alone, outcome = tried
    for found in outcome.found:
        mesh = tuple(found.strategy.mesh.values())
        best = min(one.step_s for key, one in alone.items() if key[0] == mesh)
        assert found.predicted.step_s == pytest.approx(best, rel=2e-3)


@pytest.mark.slow
def test_the_frontier_is_what_nothing_beats(tried):
    """In seconds and bytes, of all strategies priced one by one; and nothing that is not beaten is missing."""
    alone, outcome = tried
    points = {(one.step_s, one.hbm_bytes_per_chip) for one in alone.values()}
    front = [(found.predicted.step_s, found.predicted.hbm_bytes_per_chip) for found in outcome.frontier]
    assert len(front) > 3
    assert front == sorted(front)
    for seconds, need in front:
        assert not any(s < seconds * (1 - 2e-3) and n < need * (1 - 2e-3) for s, n in points)
    for seconds, need in points:
        assert any(s <= seconds * (1 + 1e-9) and n <= need * (1 + 2e-3) for s, n in front)


# -- screening ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "batch_seqs", "seq_len"),
    [
        ("llama3-8b", "v5p:4x4x4", 256, 4096),
        ("llama3-70b", "h100:8x16", 128, 4096),
        ("gpt3-175b", "a100:8x64", 1536, 2048),
    ],
)
def test_screening_loses_nothing(model, cluster, batch_seqs, seq_len):
    """The best of all strategies and the best of the promising meshes are within 1%."""
    where, laid = space(catalogue.load_model(model), seq_len), parse_cluster(cluster)
    quick = search(where, laid, batch_seqs, top=1)
    whole = search(where, laid, batch_seqs, top=1, exhaustive=True)
    assert quick.num_legal < whole.num_legal
    assert quick.found[0].predicted.step_s <= 1.01 * whole.found[0].predicted.step_s


@pytest.mark.slow
def test_a_hundred_times_the_chips_take_no_longer_to_plan():
    """CPU seconds of a search on 100,000 and on 1,000 chips, the best of four rounds in alternation."""
    seconds = {1000: [], 100_000: []}
    for _ in range(4):
        for num_chips, times in seconds.items():
            laid, start = parse_cluster(f"h100:8x{num_chips // 8}"), time.process_time()
            assert search(space(), laid, num_chips, top=1).found
            times.append(time.process_time() - start)
    assert min(seconds[100_000]) < 1.5 * min(seconds[1000])


# -- what is fixed, batches in reach, nothing that fits ---------------------------------------------------------


def test_equally_fast_prefers_fsdp_and_few_microbatches():
    """On one chip nothing communicates: remat and microbatches only add work."""
    found = search(space(TINY, 256), parse_cluster("v5e:1x1"), 16, top=1).found[0]
    assert (found.strategy.remat, found.strategy.num_microbatches, found.strategy.zero) == ("none", 1, 3)


def test_fixed_axes_remat_and_microbatches_stay():
    template = Strategy(mesh=make_mesh({}), remat="block", num_microbatches=2)
    narrow = open_space(
        setting(LLAMA8B, 4096),
        template,
        given=("remat", "num_microbatches"),
        fixed={"tensor": 4, "context": 1, "pipeline": 1},
    )
    outcome = search(narrow, parse_cluster("v5p:4x4x4"), 256, top=5)
    assert outcome.found
    for found in outcome.found:
        assert [found.strategy.mesh[axis] for axis in ("tensor", "context", "pipeline")] == [4, 1, 1]
        assert (found.strategy.remat, found.strategy.num_microbatches) == ("block", 2)


def test_a_given_schedule_is_the_only_one():
    template = Strategy(mesh=make_mesh({}), schedule="interleaved", chunks=4)
    narrow = open_space(setting(LLAMA8B, 4096), template, given=("schedule", "chunks"), fixed={"pipeline": 4})
    found = search(narrow, parse_cluster("v5p:4x4x4"), 256).found
    assert found
    assert {(one.strategy.schedule, one.strategy.chunks) for one in found} == {("interleaved", 4)}


@pytest.mark.parametrize(
    "schedule", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "dualpipe", "dualpipe-v"]
)
def test_every_schedule_can_be_searched(schedule):
    choices = Choices(remats=("none",), zeros=(1,), schedules=(schedule,))
    outcome = search(space(TINY, 256, choices=choices, fixed={"pipeline": 2}), parse_cluster("v5p:2x2x1"), 64, top=1)
    found = outcome.found[0].strategy
    assert (found.schedule, found.mesh["pipeline"]) == (schedule, 2)
    assert legal(setting(TINY, 256).on(parse_cluster("v5p:2x2x1")), found) == ()


def test_one_stage_is_searched_whatever_the_schedule():
    choices = Choices(remats=("none",), schedules=("interleaved",))
    outcome = search(space(TINY, 256, choices=choices), parse_cluster("v5p:2x2x1"), 64)
    assert 1 in {found.strategy.mesh["pipeline"] for found in outcome.found}
    assert outcome.fits_without_stages


@pytest.mark.slow
def test_all_of_8960_chips_with_the_nearest_batch():
    """1024 sequences have no factor 5 or 7; within a quarter of them 1120 do best."""
    cluster = parse_cluster("v5p:16x20x28")
    assert search(space(), cluster, 1024).num_meshes == 0
    found = search(space(), cluster, 1024, reach=0.25, top=1).found[0]
    assert found.job.batch_seqs == 1120
    assert found.strategy.mesh == make_mesh({"data": 35, "fsdp": 32, "context": 2, "tensor": 4})


def test_offload_is_left_out_where_the_way_to_the_host_is_not_known():
    assert parse_cluster("v5e:2x2").chip.pcie_bytes_per_s is not None
    some = Choices(remats=("none",), offloads=((), ("optimizer",)))
    cluster = parse_cluster("v5e:2x2")
    unknown = replace_chip(cluster, pcie_bytes_per_s=None)
    offloads = {
        laid: search(space(TINY, 256, choices=some), where, 8, frontier=True).frontier
        for laid, where in (("known", cluster), ("unknown", unknown))
    }
    assert {found.strategy.offload for found in offloads["unknown"]} == {()}
    assert ("optimizer",) in {found.strategy.offload for found in offloads["known"]}


def replace_chip(cluster, **fields):
    return msgspec.structs.replace(cluster, chip=msgspec.structs.replace(cluster.chip, **fields))


def test_nothing_that_fits_is_not_an_error_here():
    outcome = search(space(), parse_cluster("v5e:4x4"), 16)
    assert outcome.found == ()
    assert outcome.num_meshes > 0
    assert outcome.least_bytes > 15.75 * 2**30
    assert not outcome.fits_without_stages


def test_usual_choices_are_those_that_are_searched():
    where = space(TINY, 256)
    assert {pattern.strategy.remat for pattern in where.patterns} == set(USUAL.remats)
    assert np.isfinite(search(where, parse_cluster("v5e:2x2"), 8).least_bytes)
