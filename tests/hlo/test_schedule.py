"""What runs beside a collective, by the order of a scheduled module's instructions."""

from collections import Counter

import pytest

from meshwright.hlo.collectives import collectives
from tests.hlo.programs import DATA, module

MESH = {"fsdp": 2, "tensor": 2}
GROUPS = "replica_groups={{0,2},{1,3}}"
RENDEZVOUS = (
    'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="sum",_xla_megascale_target="{0,1}"'
)

PRODUCT = "%dot = f32[64,64]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
SMALL = "%small = f32[8,64]{1,0} negate(%x)"
LARGE = "%large = f32[64,64]{1,0} negate(%w)"
UPDATE = "%update = f32[64,64]{1,0} fusion(%w, %x), kind=kLoop, calls=%in_place"
FUSED = "%fused = f32[64,64]{1,0} fusion(%w), kind=kOutput, calls=%with_product"
KERNEL = '%kernel = f32[8,64]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"'
MARK = '%mark = f32[64,64]{1,0} custom-call(), custom_call_target="AllocateBuffer"'
OTHER = f"%other = f32[64,64]{{1,0}} all-gather(%x), {GROUPS}, dimensions={{0}}"

BEGIN = f"""
HloModule step, is_scheduled=true, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

%in_place (whole: f32[64,64], part: f32[8,64]) -> f32[64,64] {{
  %whole = f32[64,64]{{1,0}} parameter(0)
  %part = f32[8,64]{{1,0}} parameter(1)
  %zero = s32[] constant(0)
  ROOT %d = f32[64,64]{{1,0}} dynamic-update-slice(%whole, %part, %zero, %zero)
}}

%with_product (v: f32[64,64]) -> f32[64,64] {{
  %v = f32[64,64]{{1,0}} parameter(0)
  ROOT %dot.1 = f32[64,64]{{1,0}} dot(%v, %v), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%on_other_core (y: f32[32,64]) -> f32[16,64] {{
  %y = f32[32,64]{{1,0}} parameter(0)
  ROOT %scattered = f32[16,64]{{1,0}} reduce-scatter(%y), {GROUPS}, dimensions={{0}}, to_apply=%sum
}}

%wrapped (z: f32[32,64]) -> f32[16,64] {{
  %z = f32[32,64]{{1,0}} parameter(0)
  ROOT %called = f32[16,64]{{1,0}} call(%z), to_apply=%on_other_core
}}

ENTRY %main (x: f32[8,64], w: f32[64,64], y: f32[32,64]) -> f32[64,64] {{
  %x = f32[8,64]{{1,0}} parameter(0)
  %w = f32[64,64]{{1,0}} parameter(1)
  %y = f32[32,64]{{1,0}} parameter(2)
"""

GATHER = (
    f"%start = (f32[8,64]{{1,0}}, f32[16,64]{{1,0}}) all-gather-start(%x), {GROUPS}, dimensions={{0}}",
    "%done = f32[16,64]{1,0} all-gather-done(%start)",
)
SCATTER = (
    "%start = ((f32[32,64]{1,0}), f32[16,64]{1,0}) async-start(%y), calls=%wrapped",
    "%done = f32[16,64]{1,0} async-done(%start)",
)
SENT = (
    f'%send = (f32[8,64]{{1,0}}, u32[], token[]) send(%x), {RENDEZVOUS},_xla_megascale_transfer_type="ALL_REDUCE"}}\n'
    f"  %recv = (f32[8,64]{{1,0}}, u32[], token[]) recv(), {RENDEZVOUS}}}\n"
    "  %sent = token[] send-done(%send)",
    "%done = (f32[8,64]{1,0}, token[]) recv-done(%recv)",
)


def overlap(ends: tuple[str, str], *between: str) -> str:
    """How the first collective of a program runs, with these instructions between its ends and a product after them."""
    lines = (ends[0], *between, ends[1], PRODUCT.replace("%dot", "ROOT %after"))
    found = collectives(BEGIN + "".join(f"  {line}\n" for line in lines) + "}\n", MESH)
    return next(one for one in found if one.name in ("start", "send", "scattered")).overlap


@pytest.mark.parametrize("ends", [GATHER, SCATTER])
def test_a_product_or_a_kernel_or_enough_other_work_hides(ends):
    assert [overlap(ends, one) for one in (PRODUCT, FUSED, KERNEL, LARGE)] == ["start/done"] * 4


@pytest.mark.parametrize("ends", [GATHER, SCATTER])
def test_too_little_hides_nothing(ends):
    # what comes after both ends does not count, nor a buffer that is only set aside, nor another collective
    assert [overlap(ends, *one) for one in ((), (SMALL,), (UPDATE,), (MARK,), (OTHER,))] == [""] * 5


def test_small_work_adds_up():
    thrice = tuple(SMALL.replace("%small", f"%small.{number}") for number in range(3))
    assert (overlap(GATHER, *thrice[:1]), overlap(GATHER, *thrice)) == ("", "start/done")


def test_between_slices_until_the_result_arrives():
    assert (overlap(SENT, PRODUCT), overlap(SENT, SMALL.replace("8,64", "4,64"))) == ("between slices", "")


def test_a_collective_that_waits_at_once_is_exposed():
    gather = f"%start = f32[16,64]{{1,0}} all-gather(%x), {GROUPS}, dimensions={{0}}"
    assert overlap((gather, SMALL), PRODUCT) == ""


def test_a_start_whose_end_is_in_the_next_iteration():
    """The rest of the loop's body runs beside it."""
    _, end = GATHER
    assert overlap((GATHER[0], SMALL), PRODUCT) == "start/done"
    assert overlap((PRODUCT, GATHER[0]), end) == ""


def overlaps(name: str, mesh: dict[str, int]) -> Counter:
    found = collectives(module(name), mesh)
    return Counter((one.kind, one.axes, one.overlap) for one in found if one.full_bytes > 512)


def test_asynchronous_fusions_and_cut_products_of_a_tpu_program():
    assert overlaps("v5e_forward", {"fsdp": 4, "tensor": 4}) == {
        ("all_gather", ("fsdp",), "async fusion"): 1,
        ("permute", ("fsdp",), "windowed"): 3,
        ("all_gather", ("tensor",), ""): 1,
        ("reduce_scatter", ("tensor",), ""): 1,
    }


def test_a_cut_product_in_a_loop_of_its_own():
    # the first block of the loop arrives before a product runs
    assert overlaps("v5p_windowed", {"fsdp": 2, "tensor": 8}) == {
        ("permute", ("tensor",), "windowed"): 4,
        ("permute", ("tensor",), ""): 1,
        ("all_gather", ("fsdp",), ""): 2,
        ("all_gather", ("tensor",), ""): 1,
    }


def test_pieces_without_a_product_hide_nothing():
    text = (DATA / "v5e_forward.hlo").read_text().replace(" convolution(", " subtract(")
    found = [one for one in collectives(text, {"fsdp": 4, "tensor": 4}) if one.kind == "all_gather"]
    assert {one.axes: one.overlap for one in found} == {("fsdp",): "", ("tensor",): ""}


def test_a_gpu_program():
    found = overlaps("h200_step", {"fsdp": 2, "tensor": 4})
    assert found["reduce_scatter", ("fsdp",), "start/done"] == 1
    assert found["all_reduce", ("tensor",), ""] == 1
