"""Relayouts, padding and largest arrays of compiled programs."""

from meshwright.hlo.layout import changes_layout, executed, largest_arrays, layout_text, paddings, relayouts
from meshwright.hlo.module import parse_module
from meshwright.hlo.shapes import parse_shapes
from tests.hlo.programs import module

SMALL = """HloModule m

%inside (p: f32[64,8]) -> f32[64,8] {
  %p = f32[64,8]{1,0:T(8,128)} parameter(0)
  ROOT %turned = f32[64,8]{0,1:T(8,128)} copy(%p), metadata={op_name="layer:forward:q=rope/x"}
}

ENTRY %main (a: f32[64,8]) -> f32[64,8] {
  %a = f32[64,8]{1,0:T(8,128)} parameter(0)
  %fetched = (f32[64,8]{1,0:T(8,128)S(1)}, f32[64,8]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %there = f32[64,8]{1,0:T(8,128)S(1)} copy-done(%fetched)
  %b = f32[64,8]{0,1:T(8,128)} copy(%there)
  %view = f32[64,8]{0,1:T(8,128)} bitcast(%b)
  ROOT %f = f32[64,8]{0,1:T(8,128)} fusion(%a), kind=kLoop, calls=%inside
}
"""


def test_copies_that_change_a_layout():
    found = {one.name: one for one in relayouts(parse_module(SMALL))}
    # a copy to another memory keeps the layout
    assert set(found) == {"b", "turned"}
    # 8 rows of 64, rounded up to 128
    assert (found["b"].num_bytes, found["b"].times, found["b"].inside_fusion) == (8 * 128 * 4, 1, False)
    assert (found["turned"].inside_fusion, str(found["turned"].label)) == (True, "layer:forward:q=rope")
    assert (found["b"].before, found["b"].after) == ("f32[64,8]{1,0:T(8,128)}", "f32[64,8]{0,1:T(8,128)}")


def test_padding_by_shape_and_layout():
    worst, other = paddings(parse_module(SMALL))
    # the parameter and its copy in the on-chip memory; 64 rows of 8, rounded up to 128
    assert (worst.num_bytes, worst.padded_bytes, worst.num_arrays) == (64 * 8 * 4, 64 * 128 * 4, 2)
    assert worst.wasted_share == 15 / 16
    assert (other.wasted_bytes, other.wasted_share, other.num_arrays) == (8 * 64 * 4, 0.5, 2)


def test_largest_arrays_name_no_views():
    names = [one.name for one in largest_arrays(parse_module(SMALL))]
    assert sorted(names) == ["a", "b", "f", "fetched"]
    first = largest_arrays(module("v5e_forward"))[0]
    assert first.padded_bytes == max(one.padded_bytes for one in largest_arrays(module("v5e_forward")))
    # both weights of 5 layers, split 16 ways
    assert first.padded_bytes >= 5 * 1024 * 4096 * 2 // 16


def test_dims_of_one_element_have_no_place_in_the_order():
    before, after, other = parse_shapes("f32[4,1,8]{2,1,0}, f32[4,1,8]{2,0,1}, f32[4,1,8]{0,2,1}")
    assert not changes_layout(before, after)
    assert changes_layout(before, other)
    assert layout_text(other) == "f32[4,1,8]{0,2,1}"


def test_what_runs_instruction_by_instruction():
    names = {one.name for one in executed(module("v5e_forward"))}
    assert len(names) == 3
    assert not any("fused" in name for name in names)
    # on another core, begun by a call
    assert (
        sum(name.startswith("called_computation") for name in (c.name for c in executed(module("tpu7x_forward")))) == 4
    )
