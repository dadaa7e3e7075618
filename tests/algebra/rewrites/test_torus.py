"""Sums over a whole torus, one physical axis after the other: their legs, their bytes, and the values they give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshwright.algebra.einsum import reshard
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.rewrites import torus
from meshwright.algebra.rewrites.torus import (
    SMALL_BYTES,
    Legs,
    PlacedPart,
    crossed_legs,
    group_legs,
    leg_by_leg,
    mesh_order,
    parts_of,
)
from meshwright.cost.network.placement import place_axes
from meshwright.nn import collectives
from meshwright.nn.collectives import communicate
from meshwright.parallel.mesh import device_mesh
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.strategy import Strategy

CUBE = ({"fsdp": 8}, {"fsdp": "x (2) x y (2) x z (2)"})
SQUARE = ({"fsdp": 16}, {"fsdp": "x (4) x y (4)"})
WHOLE = ({"fsdp": 8}, {"fsdp": "x (2) x y (4)"})
PARTS = ({"fsdp": 4, "tensor": 2}, {"fsdp": "2 of x (4) x y (2)", "tensor": "2 of x (4)"})
TWO_AXES = ({"data": 2, "fsdp": 4}, {"data": "2 of x (4)", "fsdp": "2 of x (4) x y (2)"})
BESIDE = ({"data": 2, "fsdp": 4}, {"data": "y (2)", "fsdp": "x (4)"})
SLICES = ({"fsdp": 8}, {"fsdp": "x (2) x y (2) x slices (2)"})
NODES = ({"fsdp": 8}, {"fsdp": "domain (4) x nodes (2)"})


@pytest.mark.parametrize(
    ("case", "axes", "expected"),
    [
        (WHOLE, ("fsdp",), Legs((4, 2), ("fsdp", "fsdp"), ((0,), (1,)))),
        (PARTS, ("fsdp",), Legs((2, 2), ("fsdp", "fsdp"), ((0,), (1,)), ((0, 1),))),
        (PARTS, ("fsdp", "tensor"), Legs((2, 2, 2), ("fsdp", "fsdp", "tensor"), ((1, 2), (0,)))),
        (TWO_AXES, ("data", "fsdp"), Legs((2, 2, 2), ("data", "fsdp", "fsdp"), ((0, 2), (1,)))),
        (SLICES, ("fsdp",), Legs((2, 2, 2), ("fsdp",) * 3, ((1,), (2,), (0,)), fills_slices=True)),
        (NODES, ("fsdp",), None),
        (({"fsdp": 8}, {}), ("fsdp",), None),
        (({"fsdp": 8}, {"fsdp": "x (4) x y (4)"}), ("fsdp",), None),
    ],
)
def test_the_legs_of_a_group(case, axes, expected):
    mesh, placement = case
    assert group_legs(Strategy(mesh=mesh, placement=placement), axes) == expected


def test_parts_are_major_to_minor():
    assert parts_of({"fsdp": "x (2) x 4 of y (8) x slices (2)"}, "fsdp") == (("slices", 2), ("y", 4), ("x", 2))
    assert parts_of({"fsdp": "domain (8) x 2 of nodes (4)"}, "fsdp") == (("nodes", 2), ("domain", 8))
    assert parts_of({"data": "1 chip"}, "data") == ()
    assert PlacedPart("x", 2).on_torus
    assert not PlacedPart("nodes", 2).on_torus


def test_every_leg_of_a_placement_is_one_physical_axis():
    """Ranks of a leg's group differ along one axis of the torus: the executor and the chips' order agree."""
    (placement, *_) = place_axes(parse_cluster("v5p:4x4x8"), {"fsdp": 128})
    strategy = Strategy(mesh={"fsdp": 128}, placement=placement.describe())
    legs = group_legs(strategy, ("fsdp",))
    assert legs.sizes == (8, 4, 4)
    chips = np.stack(np.unravel_index(mesh_order(strategy.mesh, strategy.placement), (8, 4, 4)), axis=-1)
    crossed = []
    for groups in legs.groups:
        spread = np.ptp(chips[np.array(groups)], axis=1)
        assert ((spread > 0).sum(axis=-1) == 1).all()
        crossed.append(int(np.argmax(spread[0])))
    assert crossed[0] == 0  # z, the longest
    assert sorted(crossed) == [0, 1, 2]


def steps_of(array, target, case):
    mesh, placement = case
    return leg_by_leg(reshard(array, target), Strategy(mesh=mesh, placement=placement))


@pytest.mark.parametrize("case", [WHOLE, PARTS, TWO_AXES, SLICES, CUBE])
@pytest.mark.parametrize("dim", ["D", "F"])
def test_values_and_shards_are_those_of_one_collective(case, dim, monkeypatch):
    """Every device has the shard that one scatter over the group gives it, and a gather puts it back."""
    if case is CUBE:
        # in the turns of large arrays
        monkeypatch.setattr(torus, "SMALL_BYTES", 0)
    mesh = device_mesh(case[0])
    axes = tuple(mesh.axis_names)
    partial = ShardedArray("W", ("D", "F"), ((), ()), axes)
    whole = ShardedArray("W", ("D", "F"), ((), ()))
    split = whole.resharded({dim: axes})
    (scatter,), (gather,) = steps_of(partial, split, case), steps_of(split, whole, case)
    assert isinstance(scatter.details, Legs)
    values = np.arange(8 * 16 * 24, dtype=np.float32).reshape(8, 16, 24)
    spec = PartitionSpec(*(axes if one == dim else None for one in ("D", "F")))

    def scattered(value):
        return communicate(scatter, value[0])

    def both(value):
        return communicate(gather, scattered(value))

    given = jnp.asarray(values)
    for body, out in ((scattered, spec), (both, PartitionSpec())):
        run = jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(axes), out_specs=out, check_vma=False)
        np.testing.assert_array_equal(jax.jit(run)(given), values.sum(axis=0))


@pytest.mark.parametrize("shape", [(16, 5, 130), (16, 9, 40), (16, 7), (16,), (16, 3, 2, 70)], ids=str)
def test_shards_that_end_within_a_tile_come_back_whole(shape, monkeypatch):
    """Rows and columns that fill tiles are added and taken away, and the longest dim changes places with the last."""
    monkeypatch.setattr(collectives, "PADDED_BYTES", 0)
    monkeypatch.setattr(collectives, "default_platform", lambda: "tpu")
    mesh, dims = device_mesh(WHOLE[0]), tuple("DFGH"[: len(shape)])
    partial = ShardedArray("W", dims, ((),) * len(shape), ("fsdp",))
    (scatter,) = steps_of(partial, ShardedArray("W", dims, ((),) * len(shape)).resharded({"D": ("fsdp",)}), WHOLE)
    values = np.arange(8 * np.prod(shape), dtype=np.float32).reshape(8, *shape)
    specs = {"in_specs": PartitionSpec("fsdp"), "out_specs": PartitionSpec("fsdp"), "check_vma": False}
    run = jax.shard_map(lambda value: communicate(scatter, value[0]), mesh=mesh, **specs)
    np.testing.assert_array_equal(jax.jit(run)(jnp.asarray(values)), values.sum(axis=0))


@pytest.mark.parametrize(
    ("case", "small", "large"),
    [
        # axes of unequal lengths at once: libtpu scatters
        (WHOLE, [4, 2], []),
        # four rows of two columns each, then their neighbours
        (SQUARE, [4, 4], [8, 2]),
        (CUBE, [2, 2, 2], [4, 2]),
        (({"fsdp": 64}, {"fsdp": "x (4) x y (2) x z (8)"}), [8, 4, 2], [32, 2]),
        # two whole axes of a slice, and two with a half of the third
        (({"data": 2, "fsdp": 16}, {"data": "z (2)", "fsdp": "x (4) x y (4)"}), [4, 4], []),
        (({"data": 2, "fsdp": 32}, {"data": "2 of z (4)", "fsdp": "x (4) x y (4) x 2 of z (4)"}), [4, 4, 2], [16, 2]),
        (({"fsdp": 9}, {"fsdp": "x (3) x y (3)"}), [3, 3], [3, 3]),
    ],
)
def test_legs_send_in_all_what_one_scatter_sends(case, small, large):
    partial = ShardedArray("W", ("D",), ((),), ("fsdp",))
    (scatter,) = steps_of(partial, ShardedArray("W", ("D",), (("fsdp",),)), case)
    size = case[0]["fsdp"]
    for num_bytes, sizes in ((SMALL_BYTES - 1, small), (SMALL_BYTES, large)):
        legs = crossed_legs(scatter, num_bytes)
        assert [leg.size for leg in legs] == sizes
        if legs:
            assert sum((leg.size - 1) / leg.size / leg.divided for leg in legs) == pytest.approx((size - 1) / size)
    # every rank is left with its own of the shards, whatever the order in which they are scattered
    legs = scatter.details.of("reduce_scatter", SMALL_BYTES)
    shards = np.arange(size).reshape(legs.parts).transpose(legs.places).reshape(legs.sizes)
    for rank in range(size):
        own = shards
        for groups in legs.groups:
            (group,) = (group for group in groups if rank in group)
            own = own[group.index(rank)]
        assert own == rank


def test_only_small_gathers_over_a_whole_slice_run_leg_by_leg():
    split, whole = ShardedArray("W", ("D",), (("fsdp",),)), ShardedArray("W", ("D",), ((),))
    (gather,) = steps_of(split, whole, WHOLE)
    assert crossed_legs(gather, SMALL_BYTES - 1) == ((4, ("fsdp",), 1), (2, ("fsdp",), 4))
    assert crossed_legs(gather, SMALL_BYTES) == ()
    (gather,) = steps_of(split, whole, PARTS)
    assert crossed_legs(gather, 1) == ()


def test_a_gather_whose_order_of_chips_interleaves_a_physical_axis_runs_leg_by_leg():
    split = ShardedArray("W", ("D",), (("data", "fsdp"),))
    (gather,) = steps_of(split, ShardedArray("W", ("D",), ((),)), TWO_AXES)
    assert gather.details.is_interleaved
    assert [leg.axes for leg in crossed_legs(gather, 10**9)] == [("data", "fsdp"), ("fsdp",)]
    (gather,) = steps_of(split, ShardedArray("W", ("D",), ((),)), BESIDE)
    assert not gather.details.is_interleaved
    assert crossed_legs(gather, 10**9) == ()
