"""One made-up case for each name of a difference, and what must stay without one."""

import math

import pytest

from meshwright.core.labels import find_label
from meshwright.cost.network.collectives import received_share
from meshwright.hlo.collectives import CompiledCollective
from meshwright.verify.differences import CLASSES, compare_traffic
from meshwright.verify.expected import Expected
from meshwright.verify.traffic import TILE_BYTES, TOLERANCE, TrafficComparison

MESH = {"data": 2, "fsdp": 4, "tensor": 2}
ELEMENTS = 1 << 20

GATHER = "layer:forward:w_up=all_gather"
OTHER = "layer:forward:w_gate=all_gather"
SCATTER = "layer:backward:dw_up=reduce_scatter"
SUM = "layer:backward:dw_norm=all_reduce"


def derived(label=GATHER, *, kind="all_gather", axes=("fsdp",), arrays=1, elements=ELEMENTS, width=2) -> Expected:
    return Expected(
        label=find_label(label),
        kind=kind,
        axes=axes,
        num_arrays=arrays,
        full_bytes=arrays * elements * width,
        element_bytes=width,
        group_size=math.prod(MESH[axis] for axis in axes),
    )


def compiled(label=GATHER, *, kind="all_gather", axes=("fsdp",), trips=1, elements=ELEMENTS, dtype="bf16", **more):
    width, arrays = {"bf16": 2, "f32": 4, "s8": 1}[dtype], more.pop("num_arrays", 1)
    return CompiledCollective(
        kind=kind,
        full_bytes=arrays * elements * width,
        axes=axes,
        trips=trips,
        num_arrays=arrays,
        name=more.pop("name", "one"),
        dtype=dtype,
        label=find_label(label) if label else None,
        **more,
    )


def names(found: TrafficComparison) -> set[str]:
    return {one.name for one in found.differences}


def remark(shape: str) -> str:
    return (
        "W0 spmd_partitioner.cc:1 [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding "
        f"{{devices=[4,1]<=[4]}} to {{devices=[1,4]<=[4]}} efficiently for HLO operation %copy.44 = {shape}{{1,0}} "
        "copy(%x). As the last resort, SPMD will replicate the tensor."
    )


CASES = {
    # a gather as three permutes of a quarter each, beside the blocks of a product
    "windowed matmul": (
        [derived(), derived(OTHER)],
        [
            compiled(OTHER),
            *(compiled(kind="permute", elements=ELEMENTS // 4, windowed=True) for _ in range(3)),
        ],
    ),
    "full all-reduce": ([derived(SCATTER, kind="reduce_scatter")], [compiled(SCATTER, kind="all_reduce")]),
    "scattered all-reduce": (
        [derived(SUM, kind="all_reduce")],
        [compiled(SUM, kind="reduce_scatter"), compiled(SUM)],
    ),
    # the emulated exchange: all rows to every device, and where each slice is
    "gathered exchange": (
        [derived("layer:forward:xe=all_to_all", kind="all_to_all")],
        [compiled("layer:forward:xe=all_to_all", elements=n) for n in (4 * ELEMENTS, 16)],
    ),
    "float32": ([derived()], [compiled(dtype="f32")]),
    "padding": ([derived()], [compiled(elements=round(ELEMENTS * 1.1))]),
    "repeated": ([derived()], [compiled(), compiled(name="two")]),
    "shared": ([derived(arrays=3)], [compiled()]),
    # a ring whose last block nobody uses; the attention that sends it carries the label
    "dropped": (
        [derived("layer:forward:k_passing=permute", kind="permute", arrays=3)],
        [compiled("layer:forward:o=attention", kind="permute", trips=2)],
    ),
    "joined": (
        [derived(SUM, kind="all_reduce"), derived("stage:backward:dz=all_reduce", kind="all_reduce", axes=("data",))],
        [compiled("", kind="all_reduce", axes=("data", "fsdp"))],
    ),
    "involuntary rematerialisation": (
        [derived()],
        [compiled(), compiled("", elements=ELEMENTS)],
        remark(f"f32[{ELEMENTS // 16}]"),
    ),
}


def test_every_name_has_a_case():
    assert CASES.keys() == CLASSES.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_difference_has_its_name_and_nothing_is_left(name):
    expected, found, *remarks = CASES[name]
    comparison = compare_traffic(expected, found, MESH, remarks=remarks)
    assert names(comparison) == {name}
    assert comparison.remainder == pytest.approx(0, abs=1e-9)
    extra = sum(one.extra_bytes for one in comparison.differences)
    assert extra == pytest.approx(comparison.compiled_bytes - comparison.derived_bytes)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"windowed matmul", "shared", "dropped", "joined"}))
def test_what_a_name_stands_for_is_more_bytes(name):
    comparison = compare_traffic(*CASES[name][:2], MESH, remarks=CASES[name][2:])
    extra = sum(one.extra_bytes for one in comparison.differences)
    assert extra >= 0 if name == "scattered all-reduce" else extra > 0


def test_equal_sides_need_no_name():
    comparison = compare_traffic([derived(arrays=4)], [compiled(trips=4)], MESH)
    assert (comparison.differences, comparison.remainder) == ((), 0.0)
    (row,) = comparison.rows
    assert (row.derived_arrays, row.compiled_arrays) == (4, 4)
    assert row.derived_bytes == row.compiled_bytes == 4 * ELEMENTS * 2 * 3 / 4


# -- what must not be explained -----------------------------------------------------------------------


def test_a_gather_that_nothing_explains_stays():
    for label in ("", SCATTER, "layer:forward:nothing=all_gather"):
        comparison = compare_traffic([derived()], [compiled(), compiled(label, elements=ELEMENTS // 8)], MESH)
        assert comparison.differences == ()
        assert comparison.remainder == pytest.approx(1 / 9)
        assert comparison.remainder > TOLERANCE


def test_a_gather_that_is_missing_stays():
    comparison = compare_traffic([derived(), derived(OTHER)], [compiled()], MESH)
    assert (comparison.differences, comparison.remainder) == ((), 0.5)


def test_a_gather_over_another_axis_stays():
    comparison = compare_traffic([derived()], [compiled(axes=("tensor",))], MESH)
    assert comparison.differences == ()
    assert comparison.remainder > 0.9


def test_fewer_bytes_of_an_element_stay():
    """No compiler narrows what it sends: it would be a fault."""
    assert compare_traffic([derived(width=4)], [compiled()], MESH).remainder == 0.5


def test_both_signs_of_a_remainder_count():
    """As many bytes of a stranger as are missing do not make it even."""
    comparison = compare_traffic([derived()], [compiled("", axes=("data",), elements=3 * ELEMENTS // 2)], MESH)
    assert comparison.compiled_bytes == comparison.derived_bytes
    assert comparison.remainder == 1.0


def test_more_than_padding_is_not_called_so():
    comparison = compare_traffic([derived()], [compiled(elements=2 * ELEMENTS)], MESH)
    assert names(comparison) == set()
    assert comparison.remainder == pytest.approx(0.5)


def test_rows_of_one_number_are_padded_to_a_tile():
    assert names(compare_traffic([derived()], [compiled(elements=128 * ELEMENTS)], MESH)) == {"padding"}


def test_three_times_the_bytes_are_not_float32():
    assert compare_traffic([derived(width=1)], [compiled(dtype="f32")], MESH).remainder > 0.5


def test_a_remark_about_a_small_array_excuses_no_large_one():
    found = [compiled(), compiled("", elements=ELEMENTS)]
    comparison = compare_traffic([derived()], found, MESH, remarks=[remark("f32[64,32]")])
    assert names(comparison) == set()
    assert comparison.remainder == pytest.approx(0.5)
    assert compare_traffic([derived()], found, MESH, remarks=["Involuntary full rematerialization"]).remainder > 0.4


def test_more_than_one_round_of_a_ring_is_not_dropped():
    """Of three rounds over four devices one may have no use; two, or all of them, are missing."""
    ring = [derived("layer:forward:k_passing=permute", kind="permute", arrays=3)]
    for sent in ([], [compiled("layer:forward:o=attention", kind="permute")]):
        comparison = compare_traffic(ring, sent, MESH)
        assert names(comparison) == set()
        assert comparison.remainder > 0.6


def test_a_sum_of_other_size_is_no_scattered_one():
    """A sum without a label stands for a scattered one only where the elements agree."""
    expected = [derived(SCATTER, kind="reduce_scatter")]
    whole = compare_traffic(expected, [compiled("", kind="all_reduce")], MESH)
    assert names(whole) == {"full all-reduce"}
    assert whole.remainder == 0
    other = compare_traffic(expected, [compiled("", kind="all_reduce", elements=ELEMENTS // 2)], MESH)
    assert names(other) == set()
    assert other.remainder > 0.5


def test_a_scatter_without_a_label_that_is_sent_whole_is_known_by_its_elements():
    """Padding of other scatters over the same axes hides how many elements the row lacks."""
    padded = compiled("layer:backward:dw_gate=reduce_scatter", kind="reduce_scatter", elements=round(1.2 * ELEMENTS))
    expected = [derived(SCATTER, kind="reduce_scatter"), derived(str(padded.label), kind="reduce_scatter")]
    found = compare_traffic(expected, [padded, compiled("", kind="all_reduce")], MESH)
    assert names(found) == {"full all-reduce", "padding"}
    assert found.remainder == 0
    other = compare_traffic(expected, [padded, compiled("", kind="all_reduce", elements=ELEMENTS // 2)], MESH)
    assert "full all-reduce" not in names(other)


@pytest.mark.parametrize(("growth", "named"), [(1.05, {"padding"}), (1.6, set())])
def test_a_row_without_labels_may_be_padded(growth, named):
    """Exchanges of experts carry no label: as many arrays of up to half as many more numbers are padded ones."""
    expected = [derived("layer:forward:xe=all_to_all", kind="all_to_all", arrays=2)]
    found = compare_traffic(
        expected, [compiled("", kind="all_to_all", trips=2, elements=round(growth * ELEMENTS))], MESH
    )
    assert names(found) == named
    assert (found.remainder == 0) == bool(named)


def test_shards_smaller_than_a_tile_may_become_whole_ones():
    """A shard of a quarter of a tile is four times as large as a whole one; of two tiles it has another cause."""
    size = math.prod(MESH[axis] for axis in ("fsdp",))
    for tiles, named in ((0.25, {"padding"}), (2, set())):
        elements = round(tiles * TILE_BYTES / 2 * size)
        expected = [derived(SCATTER, kind="reduce_scatter", elements=elements)]
        found = compare_traffic(
            expected, [compiled(SCATTER, kind="reduce_scatter", elements=round(3.9 * elements))], MESH
        )
        assert names(found) == named


def test_a_sum_between_slices_may_be_scattered_and_gathered_inside_them():
    """libtpu scatters inside a slice, sums between slices, and gathers: together the bytes of the sum."""
    expected = [derived(SUM, kind="all_reduce", axes=("fsdp",), arrays=2)]
    parts = [compiled("", kind=kind) for kind in ("reduce_scatter", "all_gather")]
    found = compare_traffic(expected, [compiled(SUM, kind="all_reduce"), *parts], MESH)
    assert (names(found), found.remainder) == ({"scattered all-reduce"}, 0)
    more = compare_traffic(expected, [compiled(SUM, kind="all_reduce"), *parts, *parts], MESH)
    assert more.remainder > 0.3


# -- combined, and over slices ------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "known"), [("f32", {"float32"}), ("bf16", set())])
def test_combined_sums_are_not_called_repeated(dtype, known):
    """XLA sums two norms in one all-reduce under the label of one: each step alone would seem done twice, or not."""
    expected = [derived(SUM, kind="all_reduce"), derived("layer:backward:dz=all_reduce", kind="all_reduce")]
    comparison = compare_traffic(expected, [compiled(SUM, kind="all_reduce", dtype=dtype, num_arrays=2)], MESH)
    assert (names(comparison), comparison.remainder) == (known, 0)


def test_a_combined_sum_whole_in_place_of_scattered_ones_and_replicas():
    """Over fsdp scattered, then over data summed: one all-reduce over both."""
    expected = [
        derived(SCATTER, kind="reduce_scatter"),
        derived(SUM, kind="all_reduce", axes=("data",), elements=ELEMENTS // 4),
    ]
    comparison = compare_traffic(expected, [compiled("", kind="all_reduce", axes=("data", "fsdp"))], MESH)
    assert names(comparison) == {"full all-reduce"}
    assert comparison.remainder == pytest.approx(0)


def test_what_xla_does_again_is_known_by_its_name():
    comparison = compare_traffic([derived()], [compiled(), compiled("", name="all-gather.3.remat2")], MESH)
    assert (names(comparison), comparison.remainder) == ({"repeated"}, 0)


def test_a_collective_between_slices_adds_bytes_and_no_array():
    inside = compiled(axes=("data", "fsdp"), group_size=4)
    between = compiled(axes=("data", "fsdp"), group_size=2, dcn=True, elements=ELEMENTS // 4)
    (row,) = compare_traffic([derived(axes=("data", "fsdp"))], [inside, between], MESH).rows
    assert row.compiled_arrays == 1
    assert row.compiled_bytes == ELEMENTS * 2 * 3 / 4 + ELEMENTS / 4 * 2 / 2


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("all_gather", 75), ("reduce_scatter", 75), ("all_reduce", 150), ("all_to_all", 18.75), ("permute", 100)],
)
def test_bytes_on_the_wire_of_a_ring_of_four(kind, wanted):
    assert 100 * received_share(kind, 4) == wanted


def test_axes_of_one_device_move_nothing():
    mesh = {"data": 1, "fsdp": 4}
    assert compare_traffic([derived(axes=())], [compiled(axes=("data",))], mesh).rows == ()


def of_tied_weight(op, *blocks):
    phase, result, kind = (
        ("forward", "embed", "all_gather") if op == "gather" else ("backward", "dembed", "reduce_scatter")
    )
    return [derived(f"{block}:{phase}:{result}={kind}", kind=kind) for block in blocks]


@pytest.mark.parametrize("op", ["gather", "sum"])
def test_a_tied_weight_may_be_gathered_or_summed_once_for_both_ends(op):
    both = of_tied_weight(op, "embed", "head")
    found = compare_traffic(both, [compiled("", kind=both[0].kind)], MESH)
    assert names(found) == {"shared"}
    assert found.remainder == 0
    # a sum of one end alone, or of two layers, that is not there is a fault
    for blocks in (("embed",), ("layer", "layer_moe")):
        assert compare_traffic(of_tied_weight(op, *blocks), [], MESH).remainder == 1
