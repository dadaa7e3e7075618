"""Derived steps, executed on blocks, give the answer of the unsharded einsum: for any dims, mesh and shardings.

Values are whole numbers, so that every comparison is exact.
"""

import math
from itertools import product as every
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.algebra.blocks import execute, join, split
from meshwright.algebra.einsum import einsum_steps, reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.calculators.sharding.einsum_cost import all_ways

SIZES = (1, 2, 3, 4)
MOST_DEVICES = 16
MESH_SIZES = [s for n in (1, 2, 3) for s in every(SIZES, repeat=n) if math.prod(s) <= MOST_DEVICES]
# Numbers of dims: in all three arrays, contracted, of lhs and out, of rhs and out; each array has 2 to 4.
DIM_COUNTS = [
    counts
    for counts in every(range(4), repeat=4)
    if all(2 <= counts[0] + counts[a] + counts[b] <= 4 for a, b in ((1, 2), (1, 3), (2, 3)))
]

some = settings(max_examples=120, deadline=None)


class Case(NamedTuple):
    mesh: dict[str, int]
    arrays: tuple[ShardedArray, ...]
    sizes: dict[str, int]

    def value(self, array: ShardedArray) -> np.ndarray:
        seed = sum(map(ord, array.name))
        return np.random.default_rng(seed).integers(-4, 5, [self.sizes[d] for d in array.dims])


@st.composite
def meshes(draw):
    sizes = draw(st.sampled_from(MESH_SIZES))
    return dict(zip(draw(st.permutations("XYZ"[: len(sizes)])), sizes, strict=True))


@st.composite
def sharded(draw, name, dims, mesh, may_be_unreduced=False):
    """An array with every axis of the mesh, in any order, on some dim, on none, or unreduced."""
    places = len(dims) + may_be_unreduced
    axes = {place: [] for place in range(places + 1)}
    for axis in draw(st.permutations(list(mesh))):
        axes[draw(st.integers(0, places))].append(axis)
    unreduced = tuple(axes[len(dims)]) if may_be_unreduced else ()
    return ShardedArray(name, tuple(dims), tuple(tuple(axes[n]) for n in range(len(dims))), unreduced)


@st.composite
def sized(draw, arrays, mesh):
    """A size for each dim that every given array can split evenly."""
    sizes = {}
    for dim in sorted({d for a in arrays for d in a.dims}):
        ways = (math.prod(mesh[x] for x in a.axes_of(dim)) for a in arrays)
        sizes[dim] = math.lcm(*ways) * draw(st.sampled_from((1, 2)))
    return sizes


@st.composite
def einsums(draw, inputs_may_be_unreduced=False):
    mesh = draw(meshes())
    letters = iter("ABCDEFGHIJKL")
    batch, contracted, left, right = ([next(letters) for _ in range(n)] for n in draw(st.sampled_from(DIM_COUNTS)))
    lhs, rhs, out = (draw(st.permutations(a + b + batch)) for a, b in every_pair(left, contracted, right))
    arrays = (
        draw(sharded("A", lhs, mesh, inputs_may_be_unreduced)),
        draw(sharded("B", rhs, mesh, inputs_may_be_unreduced)),
        draw(sharded("C", out, mesh)),
    )
    return Case(mesh, arrays, draw(sized(arrays, mesh)))


def every_pair(left, contracted, right):
    return (left, contracted), (contracted, right), (left, right)


@st.composite
def moves(draw):
    """An array, possibly unreduced, and another sharding of it that may leave some of its sums undone."""
    mesh = draw(meshes())
    dims = "IJKL"[: draw(st.integers(1, 4))]
    source, target = draw(sharded("A", dims, mesh, True)), draw(sharded("A", dims, mesh))
    free = [a for a in source.unreduced if a not in target.spread]
    target = target.replace(unreduced=tuple(a for a in free if draw(st.booleans())))
    return Case(mesh, (source, target), draw(sized((source, target), mesh)))


def unsharded(lhs, rhs, out, left, right):
    return np.einsum(f"{''.join(lhs.dims)},{''.join(rhs.dims)}->{''.join(out.dims)}", left, right)


def assert_right(case, steps, lhs, rhs, out):
    left, right = case.value(lhs), case.value(rhs)
    made = execute(steps, {a: split(v, a, case.mesh) for a, v in ((lhs, left), (rhs, right))}, case.mesh)
    np.testing.assert_array_equal(join(made[out], out, case.mesh), unsharded(lhs, rhs, out, left, right))


@some
@given(einsums(inputs_may_be_unreduced=True))
def test_the_rules_compute_the_einsum(case):
    lhs, rhs, out = case.arrays
    steps = einsum_steps(lhs, rhs, out)
    assert steps[-1].result == out
    assert_right(case, steps, lhs, rhs, out)


@some
@given(einsums(), st.sets(st.sampled_from("XYZ")))
def test_slicing_instead_of_gathering_computes_it_too(case, slice_axes):
    assert_right(case, einsum_steps(*case.arrays, slice_axes=slice_axes), *case.arrays)


@some
@given(einsums())
def test_the_backward_products_by_the_same_rules(case):
    lhs, rhs, _ = case.arrays
    dlhs, drhs, dout = (a.replace(name=f"d{a.name}") for a in case.arrays)
    assert_right(case, einsum_steps(dout, rhs, dlhs), dout, rhs, dlhs)
    assert_right(case, einsum_steps(lhs, dout, drhs), lhs, dout, drhs)


@settings(some, max_examples=40)
@given(einsums())
def test_every_way_computes_it(case):
    ways = all_ways(*case.arrays)
    assert next(iter(ways.values())) == einsum_steps(*case.arrays)
    assert len(set(ways.values())) == len(ways)
    for steps in ways.values():
        assert_right(case, steps, *case.arrays)


@settings(some, max_examples=300)
@given(moves())
def test_resharding_keeps_the_value(case):
    source, target = case.arrays
    steps = reshard(source, target)
    assert [s.inputs[0] for s in steps] + [target] == [source] + [s.result for s in steps]
    value = case.value(source)
    made = execute(steps, {source: split(value, source, case.mesh)}, case.mesh)
    np.testing.assert_array_equal(join(made[target], target, case.mesh), value)


@settings(some, max_examples=200)
@given(moves())
def test_only_sums_and_lost_axes_need_communication(case):
    source, target = case.arrays
    only_grows = all(target.axes_of(d)[: len(a)] == a for d, a in zip(source.dims, source.axes, strict=True))
    nothing_to_do = only_grows and set(source.unreduced) == set(target.unreduced)
    steps = reshard(source, target)
    assert any(s.is_collective for s in steps) == (not nothing_to_do)
    assert bool(steps) == (source != target)
