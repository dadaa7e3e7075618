"""Candidates of a search: every mesh that divides, batches in reach, microbatches, parts of a cluster."""

import itertools
import math

import msgspec
import numpy as np
import pytest

from meshwright.core.dims import ISLAND_AXES
from meshwright.cost.arrays import select
from meshwright.cost.setting import Setting
from meshwright.plan import candidates
from meshwright.plan.search import search
from meshwright.plan.space import Choices, open_space
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

LLAMA70B, LLAMA8B, TINY = (catalogue.load_model(name) for name in ("llama3-70b", "llama3-8b", "tiny"))
OPEN = Strategy(mesh=make_mesh({}))
PLAIN = Choices(zeros=(3,), context_attention=("gather",))


def space(model=LLAMA70B, seq_len=4096, template=OPEN, *, on="v5p:4x4x4", **choices):
    return open_space(Setting(model, parse_cluster(on), Job(batch_seqs=64, seq_len=seq_len)), template, **choices)


def meshes(found):
    return list(zip(*(sizes.tolist() for sizes in found.mesh.values()), strict=True))


def test_candidates_are_all_meshes_that_divide():
    """tiny has width 256, 8 query heads and 8 layers: here of 12 sequences of 64 on 8 chips."""
    found = candidates.candidates_on_chips(space(TINY, 64, choices=PLAIN), 12, num_chips=8)
    wanted = set()
    for pipeline, data, fsdp, context, tensor in itertools.product((1, 2, 4, 8), repeat=5):
        even = 12 % (data * fsdp) == 0 and 64 % (context * tensor) == 0 and 256 % (fsdp * context) == 0
        if pipeline * data * fsdp * context * tensor == 8 and even:
            wanted.add((pipeline, data, fsdp, 1, context, tensor))
    assert set(meshes(found)) == wanted
    assert len(found) == len(wanted)
    assert (found.batch_seqs == 12).all()


def test_a_mesh_is_a_candidate_where_one_pattern_allows_it():
    """Ulysses splits heads over context too; keys sent round do not."""
    ulysses, ring = (
        space(TINY, 64, on="h100:4x2", choices=Choices(zeros=(3,), context_attention=ways))
        for ways in (("ulysses",), ("ring", "ulysses"))
    )
    some, more = (set(meshes(candidates.candidates_on_chips(one, 8, num_chips=8))) for one in (ulysses, ring))
    assert some < more
    assert (1, 1, 1, 1, 8, 1) in more - some


def test_meshes_of_any_number_of_chips_hold_those_of_one_number():
    every = meshes(candidates.candidates_on_any_chips(space(TINY, 64), 12))
    on_six = {mesh for mesh in every if math.prod(mesh) == 6}
    assert on_six == set(meshes(candidates.candidates_on_chips(space(TINY, 64), 12, num_chips=6)))
    assert on_six


def test_sizes_of_an_axis():
    where = space(LLAMA70B)
    dims = where.dims(1024)
    assert candidates.axis_sizes(where, "expert", dims) == (1,)
    assert candidates.axis_sizes(where, "tensor", dims) == (1, 2, 4, 8, 16, 32, 64)
    assert candidates.axis_sizes(space(LLAMA70B, on="h100:8x8"), "tensor", dims) == (1, 2, 4, 8)
    assert max(candidates.axis_sizes(where, "data", dims)) == 1024
    assert candidates.axis_sizes(where, "pipeline", dims)[-1] == 80
    assert candidates.axis_sizes(space(fixed={"tensor": 2}), "tensor", dims) == (2,)
    no_stages = msgspec.structs.replace(where, axes=("data", "fsdp", "context", "tensor"))
    assert candidates.axis_sizes(no_stages, "pipeline", dims) == (1,)
    experts = space(catalogue.load_model("mixtral-8x7b"))
    assert candidates.axis_sizes(experts, "expert", experts.dims(1024)) == (1, 2, 4, 8)


def test_stages_share_out_layers_with_few_idle_places():
    """80 layers on 7 stages are 12 each, 4 places too many; on 9 stages 9, one too many; on 35 stages 3 each, 25."""
    counts = candidates.stage_counts(80)
    assert {1, 2, 4, 5, 7, 8, 9, 10, 16, 20, 40, 80} <= set(counts)
    assert not {35, 39, 45, 79} & set(counts)
    assert all(math.ceil(80 / n) * n <= 88 for n in counts)


def test_batches_in_reach_are_the_nearest_that_each_mesh_divides():
    found = candidates.candidates_on_chips(space(), 1024, num_chips=8960, reach=0.25)
    assert len(found)
    shards = found.batch_shards
    assert (found.batch_seqs % shards == 0).all()
    assert (np.abs(found.batch_seqs - 1024) <= 256).all()
    assert (np.abs(found.batch_seqs - 1024) <= shards).all()


def test_microbatches_leave_whole_sequences_to_every_shard():
    found = candidates.candidates_on_chips(space(TINY, 64), 24, num_chips=4)
    every, some, two = (candidates.with_microbatches(space(TINY, 64), found, most=most) for most in (None, 3, 2))
    assert (every.batch_seqs % (every.batch_shards * every.microbatches) == 0).all()
    one_shard = every.batch_shards == 1
    assert set(every.microbatches[one_shard].tolist()) == {1, 2, 3, 4, 6, 8, 12, 24}
    assert set(some.microbatches[some.batch_shards == 1].tolist()) == {1, 6, 24}
    assert set(two.microbatches[two.batch_shards == 1].tolist()) == {1, 24}
    assert set(candidates.with_microbatches(space(TINY, 64), found, most=1).microbatches.tolist()) == {1}
    fixed = candidates.with_microbatches(
        space(TINY, 64, Strategy(mesh={}, num_microbatches=3), given=("num_microbatches",)), found
    )
    assert set(fixed.microbatches.tolist()) == {3}


def test_taking_some_candidates_takes_all_of_them():
    found = candidates.candidates_on_chips(space(TINY, 64), 24, num_chips=4)
    last = select(found, np.array([len(found) - 1]))
    assert len(last) == 1
    assert meshes(last) == meshes(found)[-1:]


def test_a_pattern_is_looked_at_where_it_differs():
    """ZeRO-1 only with an axis that would split weights, ulysses only with context, repeats only of too few heads."""
    where = space(TINY, 64)
    found = candidates.candidates_on_chips(where, 24, num_chips=16)
    for pattern in where.patterns:
        chosen = select(found, candidates.legal_in(where, pattern, found))
        assert len(chosen)
        for mesh in (dict(zip(ISLAND_AXES, sizes, strict=True)) for sizes in meshes(chosen)):
            if pattern.strategy.zero == 1:
                assert mesh["fsdp"] * mesh["expert"] * mesh["context"] > 1
            heads = mesh["tensor"]
            if pattern.strategy.context_attention == "ulysses":
                assert mesh["context"] > 1
                heads *= mesh["context"]
            assert (heads == 8) == bool(pattern.repeats)


def test_parts_of_a_cluster():
    shapes = {part.shape for part in candidates.parts_of(parse_cluster("v5p:4x4x8"), 32)}
    assert shapes == {(4, 4, 2), (4, 2, 4), (2, 4, 4), (4, 1, 8), (1, 4, 8), (2, 2, 8)}
    assert candidates.parts_of(parse_cluster("v5p:16x20x28"), 4096)[0].shape == (16, 16, 16)
    assert candidates.parts_of(parse_cluster("h100:8x4"), 16)[0].shape in {(8, 2), (4, 4)}
    assert candidates.parts_of(parse_cluster("4*v5e:16x16"), 512)[0].short_name == "2*v5e:16x16"
    assert candidates.parts_of(parse_cluster("v5p:4x4x4"), 63) == ()


def test_memory_of_any_mesh_falls_with_chips_that_shard():
    needs = candidates.memory_of_any_mesh(space(LLAMA8B), 64)
    assert needs[1] > 8e10 > needs[64]
    powers = [needs[2**n] for n in range(10)]
    assert powers == sorted(powers, reverse=True)


@pytest.mark.parametrize(
    "choices",
    [PLAIN, pytest.param(Choices(offloads=((), ("optimizer", "activations"))), marks=pytest.mark.slow)],
    ids=["plain", "offload"],
)
def test_memory_of_any_mesh_is_the_least_of_all_strategies(choices):
    """Only the fewest and the most microbatches are tried, and that loses nothing; on TPUs, which hold more of the loss
    head for one sequence at a time than for two, a little."""
    for on, more in (("h100:8x8", 1e-9), ("v5p:4x4x4", 0.002)):
        # with stages it counts 1F1B, and other schedules may keep less
        where = msgspec.structs.replace(space(LLAMA8B, choices=choices, on=on), schedules=("1f1b",)).with_reruns()
        least = search(where, parse_cluster(on), 64, exhaustive=True).least_bytes
        assert least * (1 - 1e-9) <= candidates.memory_of_any_mesh(where, 64)[64] <= least * (1 + more)


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("tiny", {}),
        ("tiny", {"zeros": (0,)}),
        ("tiny", {"zeros": (1,), "offloads": (("optimizer",),)}),
        ("mixtral-8x7b", {}),
        ("mixtral-8x7b", {"offloads": (("optimizer", "activations"),)}),
    ],
)
def test_replicas_that_could_shard_are_never_the_leanest(model, given, monkeypatch):
    """They are left out to save time: with them the least memory on every number of chips is the same."""
    choices = Choices(**{"zeros": (3,), "context_attention": ("gather",)} | given)
    where = space(catalogue.load_model(model), 4096, choices=choices)
    few = candidates.memory_of_any_mesh(where, 12)
    looked_at = []
    monkeypatch.setattr("meshwright.plan.candidates._shards_what_replicas_split", lambda pattern: looked_at.append(1))
    assert candidates.memory_of_any_mesh(where, 12) == few
    assert looked_at


def test_replicas_stay_where_weights_are_split_over_them(monkeypatch):
    """An assignment of one's own, which splits weights over data alone: there meshes with fsdp in its place hold more.

    Leaving the others out would say that more is needed than is.
    """
    own = standard_assignment() | {"weight": {"D": ("data",), "F": ("tensor",)}}
    template = Strategy(mesh=make_mesh({}), assignment=own)
    where = space(TINY, 512, template, given=("assignment",), choices=PLAIN)
    right = candidates.memory_of_any_mesh(where, 8)
    monkeypatch.setattr("meshwright.plan.candidates._shards_what_replicas_split", lambda pattern: True)
    wrong = candidates.memory_of_any_mesh(where, 8)
    assert all(wrong[count] >= right[count] for count in right)
    assert wrong[8] > right[8]
