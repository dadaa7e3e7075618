"""The HLO reader on programs compiled for TPUs and GPUs.

The expected bytes follow from the programs' sizes: h of B=16, S=512, D=1024 and weights of 1024 x 4096 in bf16.
"""

from collections import Counter

import pytest

from meshwright.hlo.collectives import CompiledCollective, collectives
from meshwright.hlo.loops import loops
from tests.hlo.programs import module

FSDP_TENSOR_16 = {"fsdp": 4, "tensor": 4}
BF16 = 2
H_BYTES = 16 * 512 * 1024 * BF16
WEIGHT_BYTES = 1024 * 4096 * BF16


def found(name: str, mesh: dict[str, int]) -> tuple[CompiledCollective, ...]:
    return collectives(module(name), mesh)


def counted(collected: tuple[CompiledCollective, ...]) -> Counter[tuple[str, tuple[str, ...], int, int]]:
    return Counter((c.kind, c.axes, c.full_bytes, c.trips) for c in collected if c.full_bytes > 8)


def test_a_tpu_program_of_every_trap():
    """Three ways to write groups, an async fusion in four pieces, a disguised reduce-scatter, a cut matmul."""
    every = found("v5e_forward", FSDP_TENSOR_16)
    assert counted(every) == {
        # wi whole on fsdp, started before the products that hide it
        ("all_gather", ("fsdp",), WEIGHT_BYTES // 4, 5): 1,
        ("all_gather", ("tensor",), H_BYTES // 4, 5): 1,
        # an all-reduce inside, of the whole input
        ("reduce_scatter", ("tensor",), H_BYTES // 4, 5): 1,
        # wo goes round the fsdp ring a shard at a time: two one way, one the other
        ("permute", ("fsdp",), WEIGHT_BYTES // 16, 5): 3,
    }
    assert [c.windowed for c in every if c.kind == "permute"] == [True] * 3
    (started,) = (c for c in every if c.kind == "all_gather" and c.axes == ("fsdp",))
    assert started.is_async
    (loss,) = (c for c in every if c.full_bytes <= 8)
    assert (loss.kind, loss.axes, loss.trips, loss.group_size) == ("all_reduce", ("fsdp", "tensor"), 1, 16)


def test_each_clone_of_an_async_fusion_is_there_but_counts_once():
    clones = [one for one in module("v5e_forward") if one.opcode == "all-gather" and 'chain_id="0"' in one.attributes]
    assert len(clones) == 4
    assert len({one.computation for one in clones}) == 4


def test_a_loop_for_a_cut_matmul_inside_a_loop():
    mesh = {"fsdp": 2, "tensor": 8}
    inner = [c for c in found("v5p_windowed", mesh) if c.kind == "permute"]
    assert {c.windowed for c in inner} == {True}
    assert {c.axes for c in inner} == {("tensor",)}
    assert Counter(c.trips for c in inner) == {5 * 2: 4, 5: 1}
    # a shard of h on its way, in two directions
    assert {c.full_bytes for c in inner} == {16 * 4096 * 4096 * BF16 // 2 // 8}
    assert [(loop.trips, loop.total_trips, loop.depth) for loop in loops(module("v5p_windowed"))] == [
        (5, 5, 0),
        (2, 10, 1),
    ]


def test_gradients_of_two_weights_scattered_together():
    combined = [c for c in found("v5p_step", {"fsdp": 2, "tensor": 8}) if c.num_arrays == 2]
    assert [(c.kind, c.axes, c.full_bytes, c.trips) for c in combined] == [
        ("reduce_scatter", ("fsdp",), 2 * WEIGHT_BYTES // 8, 5)
    ]


def test_an_older_tpu():
    kinds = Counter((c.kind, c.axes) for c in found("v4_forward", FSDP_TENSOR_16) if c.full_bytes > 8)
    assert kinds == {("all_gather", ("fsdp",)): 2, ("all_gather", ("tensor",)): 1, ("permute", ("tensor",)): 5}


def test_a_collective_in_a_computation_that_another_core_runs():
    every = [c for c in found("tpu7x_forward", FSDP_TENSOR_16) if c.full_bytes > 8]
    assert counted(tuple(every)) == {
        ("all_gather", ("fsdp",), WEIGHT_BYTES // 4, 5): 2,
        ("all_gather", ("tensor",), H_BYTES // 4, 5): 1,
        ("reduce_scatter", ("tensor",), H_BYTES // 4, 5): 1,
    }
    assert all(c.is_async for c in every)


def test_between_two_slices():
    every = found("two_slices", {"data": 2, "fsdp": 2, "tensor": 2})
    (between,) = (c for c in every if c.dcn)
    # the loss: one number, sent as a whole tile
    assert (between.kind, between.axes, between.full_bytes, between.group_size) == ("all_reduce", ("data",), 512, 2)
    assert {c.axes for c in every if not c.dcn} == {("fsdp",), ("tensor",), ("fsdp", "tensor")}


def test_between_four_slices_in_pairs():
    every = {(c.kind, c.axes): c for c in found("four_slices", {"stage": 2, "data": 2, "x": 4}) if c.dcn}
    array = 256 * 256 * 4
    assert {key: c.full_bytes for key, c in every.items()} == {
        ("all_reduce", ("data",)): array,
        ("all_gather", ("stage",)): 2 * array,
        # what is left of psum_scatter over (data, x) once the slice has summed over x
        ("reduce_scatter", ("data",)): array // 4,
    }
    assert all(c.is_async and c.group_size == 2 for c in every.values())


def test_a_gpu_step():
    every = found("h200_step", {"fsdp": 2, "tensor": 4})
    assert counted(every) == {
        ("all_gather", ("tensor",), H_BYTES // 2, 5): 2,
        # both weights of a layer in one call
        ("all_gather", ("fsdp",), 2 * WEIGHT_BYTES // 4, 5): 2,
        ("reduce_scatter", ("fsdp",), 2 * WEIGHT_BYTES // 4, 5): 1,
        ("reduce_scatter", ("tensor",), H_BYTES // 2, 5): 1,
        ("all_reduce", ("tensor",), H_BYTES // 2, 5): 1,
    }
    assert {c.num_arrays for c in every if c.axes == ("fsdp",)} == {2}
    assert all(c.is_async and c.dtype == "bf16" for c in every)
    # all of the sum moves, an eighth of it is used
    assert [c.sliced for c in every if c.kind == "all_reduce"] == [True]


def test_groups_of_a_mesh_in_another_order():
    every = found("h200_reordered", {"fsdp": 2, "tensor": 4})
    gathers = {c.full_bytes: (c.axes, c.group_size) for c in every if c.kind == "all_gather"}
    assert gathers[4096 * 1024 * BF16] == (("tensor",), 4)
    assert gathers[4096 * 1024 * BF16 + 1024 * 2048 * BF16] == (("fsdp", "tensor"), 8)
    assert gathers[4096 * 1024 * BF16 // 4] == (("fsdp",), 2)
    # a permute that carries a matmul's name, but moves its operand only
    assert [c.windowed for c in every if c.kind == "permute"] == [False]


@pytest.mark.parametrize("chips", ["v5e", "h200"])
def test_one_of_each_kind(chips):
    every = {(c.kind, c.full_bytes): c for c in found(f"{chips}_each", {"x": 4})}
    local = 32 * 256 * 4
    scattered = ("reduce_scatter" if chips == "h200" else "all_reduce", local)
    assert set(every) == {
        ("permute", local), ("all_to_all", 4 * local), scattered, ("all_gather", local), ("all_reduce", 4)
    }  # fmt: skip
    assert {c.axes for c in every.values()} == {("x",)}
    assert not any(c.windowed for c in every.values())
    # the TPU sums such a small array whole and cuts it
    assert every[scattered].sliced == (chips == "v5e")


@pytest.mark.parametrize(
    ("name", "kind", "full_bytes"),
    [
        ("v5e_ragged", "all_to_all", 4 * 64 * 256 * BF16),
        ("h200_ragged", "all_to_all", 4 * 64 * 256 * BF16),
        ("h200_broadcast", "broadcast", 64 * 256 * BF16),
    ],
)
def test_rare_kinds(name, kind, full_bytes):
    (one,) = found(name, {"x": 4})
    assert (one.kind, one.axes, one.full_bytes, one.num_arrays) == (kind, ("x",), full_bytes, 1)


def test_without_a_mesh_there_are_sizes_of_groups():
    every = collectives(module("h200_step"), {})
    assert {(c.axes, c.group_size) for c in every} == {((), 2), ((), 4)}


def test_the_source_of_an_instruction():
    read = module("h200_broadcast")
    one = read.find("collective-broadcast-start")
    assert one.op_name == "jit(<lambda>)/shard_map/pbroadcast"
    innermost, *callers = read.source(one)
    assert innermost.file == "step.py"
    assert innermost.line > 0
    assert callers
