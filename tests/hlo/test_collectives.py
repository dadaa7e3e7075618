"""The HLO reader on texts as XLA writes them, and on programs compiled here."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from meshwright.hlo.collectives import collectives, shape_bytes
from meshwright.parallel.mesh import device_mesh
from tests.traffic import Traffic, compiled_traffic

MESH = {"data": 2, "fsdp": 2, "tensor": 2}

TRIPS = 'backend_config={"known_trip_count":{"n":"5"}}'

MODULE = (
    """
HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %ag = f32[8,8]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}
  %rs = f32[4,8]{1,0} reduce-scatter(%ag), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add, dimensions={0}
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %rs)
}

%cond (p: (s32[], f32[4,8])) -> pred[] {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[4,8], y: bf16[16]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %y = bf16[16]{0} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[4,8]{1,0}) tuple(%zero, %x)
  %loop = (s32[], f32[4,8]{1,0}) while(%start), condition=%cond, body=%body, TRIPS
  %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  %ar = (f32[4,8]{1,0}, bf16[16]{0}) all-reduce(%out, %y), replica_groups=[2,4]<=[2,2,2]T(1,0,2), to_apply=%add
  %aa = bf16[16]{0} all-to-all(%y), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
  %cp = f32[4,8]{1,0} collective-permute(%out), source_target_pairs={{0,4},{4,0},{1,5},{5,1}}
  ROOT %r = f32[4,8]{1,0} get-tuple-element(%ar), index=0
}
"""
).replace("TRIPS", TRIPS)


def test_kinds_axes_bytes_and_trips():
    found = {c.name: c for c in collectives(MODULE, MESH)}
    assert (found["ag"].kind, found["ag"].axes, found["ag"].full_bytes, found["ag"].trips) == (
        "all_gather",
        ("fsdp",),
        8 * 8 * 4,
        5,
    )
    assert (found["rs"].kind, found["rs"].axes, found["rs"].full_bytes) == ("reduce_scatter", ("tensor",), 8 * 8 * 4)
    assert found["ar"].axes == ("data", "tensor")
    assert (found["ar"].full_bytes, found["ar"].num_arrays, found["ar"].trips) == (4 * 8 * 4 + 16 * 2, 2, 1)
    assert (found["aa"].axes, found["aa"].full_bytes) == (("tensor",), 2 * 16 * 2)
    assert (found["cp"].kind, found["cp"].axes) == ("permute", ("data",))


def test_traffic_is_summed_over_trips():
    traffic = compiled_traffic(collectives(MODULE, MESH), MESH)
    assert traffic["all_gather", ("fsdp",)] == Traffic(5, 5 * 256)


def test_a_loop_without_a_trip_count_is_refused():
    text = MODULE.replace(f", {TRIPS}", "")
    with pytest.raises(ValueError, match="loop loop states no readable trip count"):
        collectives(text, MESH)


@pytest.mark.parametrize(
    ("loop", "inside", "counted"),
    [
        ("step/at_most_once/while", "step/at_most_once/while/body/further_rounds/add", True),
        ("step/further_rounds/while", "step/further_rounds/while/body/add", False),
        ("", "step/further_rounds/while/body/add", False),
        ("", "step/at_most_once/while/body/add", True),
    ],
)
def test_a_loop_of_no_count_is_what_its_own_name_says(loop, inside, counted):
    """A pass that runs at most once has steps of further rounds in it; only a loop of such rounds is left out."""
    named = MODULE.replace(TRIPS, f'metadata={{op_name="{loop}"}}' if loop else "metadata={}")
    named = named.replace("dimensions={0}\n  %i", f'dimensions={{0}}, metadata={{op_name="{inside}"}}\n  %i')
    kinds = [one.kind for one in collectives(named, MESH)]
    assert ("all_gather" in kinds) is counted
    assert "all_to_all" in kinds


def test_shapes_of_every_kind():
    assert shape_bytes("(f32[2,3]{1,0}, /*index=1*/bf16[5], pred[])") == 24 + 10 + 1
    assert shape_bytes("u8[7]{0:T(8,128)(4,1)}") == 7


def test_a_compiled_conditional_is_marked():
    mesh = device_mesh({"x": 4})

    def body(value):
        return lax.cond(value[0] > 0, lambda v: lax.psum(v, "x"), lambda v: v, value)

    spec = PartitionSpec("x")
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    text = mapped.lower(jnp.ones(8)).compile().as_text()
    (found,) = collectives(text, {"x": 4})
    assert (found.kind, found.axes, found.full_bytes, found.in_conditional) == ("all_reduce", ("x",), 8, True)


def test_nested_scans_multiply():
    mesh = device_mesh({"x": 2, "y": 2})

    def body(value):
        def outer(v, _):
            return lax.scan(lambda u, _: (lax.psum(u, "y") * 0.5, None), v, None, length=3)[0], None

        return lax.scan(outer, value, None, length=4)[0]

    spec = PartitionSpec(("x", "y"))
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    text = mapped.lower(jnp.ones(8)).compile().as_text()
    assert compiled_traffic(collectives(text, {"x": 2, "y": 2}), {"x": 2, "y": 2}) == {
        ("all_reduce", ("y",)): Traffic(12, 12 * 8)
    }


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ("'tensor'", "{{0,1},{2,3},{4,5},{6,7}}"),
        ("'data','fsdp'", "{{0,2,4,6},{1,3,5,7}}"),
        ("'data'", "[4,2]<=[2,4]T(1,0)"),
    ],
)
def test_groups_over_named_axes(axes, groups):
    """As XLA writes them since jaxlib 0.11: the mesh with its sizes, and the axes of the groups."""
    line = "%x = f32[4]{0} parameter(0)\n  ROOT %ar = f32[4]{0} all-reduce(%x), replica_groups=GROUPS, to_apply=%add"
    module = f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  {line}\n}}\n"
    written = "mesh['pipeline'=1,'data'=2,'fsdp'=2,'tensor'=2] {" + axes + "}"
    found, wanted = (collectives(module.replace("GROUPS", text), MESH)[0].axes for text in (written, groups))
    assert found == wanted == tuple(axis.strip("'") for axis in axes.split(","))


def test_a_computation_that_runs_asynchronously():
    """As XLA writes it where no opcode of its own says so."""
    text = """HloModule m, num_partitions=8

%wrapped (x: f32[4]) -> f32[8] {
  %x = f32[4]{0} parameter(0)
  ROOT %ag = f32[8]{0} all-gather(%x), replica_groups=[4,2]<=[8], dimensions={0}
}

ENTRY %main (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  %start = ((f32[4]{0}), f32[8]{0}, u32[]) async-start(%p), calls=%wrapped
  %update = ((f32[4]{0}), f32[8]{0}, u32[]) async-update(%start), calls=%wrapped
  ROOT %done = f32[8]{0} async-done(%update), calls=%wrapped
}
"""
    (found,) = collectives(text, MESH)
    assert (found.kind, found.axes, found.full_bytes, found.is_async) == ("all_gather", ("tensor",), 32, True)


# -- without a label, and in pieces on both sides of a loop: as TPU programs have them ---------------------

PIECE = (
    "all-gather(%s), channel_id=7, replica_groups={{0,1},{2,3}}, dimensions={0}, "
    'frontend_attributes={chain_id="4"}, backend_config={"async_collective_fusion_config":{"flag_start":"%s"}}'
)

ACROSS_A_LOOP = f"""HloModule jit_step, num_partitions=4

%begin (w: f32[8]) -> (f32[8], f32[16]) {{
  %w = f32[8]{{0:T(128)}} parameter(0)
  %g.1 = f32[16]{{0:T(128)}} {PIECE % ("%w", "-1")}
  ROOT %c.1 = (f32[8]{{0:T(128)}}, f32[16]{{0:T(128)}}) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}}

%beside (w.2: f32[8], x: f32[4]) -> (f32[4], f32[16]) {{
  %w.2 = f32[8]{{0:T(128)}} parameter(0)
  %x = f32[4]{{0:T(128)}} parameter(1)
  %double = f32[4]{{0:T(128)}} add(%x, %x)
  %g.2 = f32[16]{{0:T(128)}} {PIECE % ("%w.2", "2")}
  ROOT %t.2 = (f32[4]{{0:T(128)}}, f32[16]{{0:T(128)}}) tuple(%double, %g.2)
}}

%end (w.3: f32[8], so_far: f32[16]) -> f32[16] {{
  %w.3 = f32[8]{{0:T(128)}} parameter(0)
  %so_far = f32[16]{{0:T(128)}} parameter(1)
  %g.3 = f32[16]{{0:T(128)}} {PIECE % ("%w.3", "2")}
  ROOT %c.3 = f32[16]{{0:T(128)}} custom-call(%g.3), custom_call_target="AsyncCollectiveDone"
}}

%body (p: (s32[], f32[4], f32[8])) -> (s32[], f32[4], f32[8]) {{
  %p = (s32[], f32[4]{{0:T(128)}}, f32[8]{{0:T(128)}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[4]{{0:T(128)}} get-tuple-element(%p), index=1
  %s = f32[8]{{0:T(128)}} get-tuple-element(%p), index=2
  %work = (f32[4]{{0:T(128)}}, f32[16]{{0:T(128)}}) fusion(%s, %v), kind=kOutput, calls=%beside, \
metadata={{op_name="jit(f)/head:forward:peak=logits/dot_general"}}
  %made = f32[4]{{0:T(128)}} get-tuple-element(%work), index=0
  ROOT %out = (s32[], f32[4]{{0:T(128)}}, f32[8]{{0:T(128)}}) tuple(%i, %made, %s)
}}

%cond (q: (s32[], f32[4], f32[8])) -> pred[] {{
  %q = (s32[], f32[4]{{0:T(128)}}, f32[8]{{0:T(128)}}) parameter(0)
  ROOT %more = pred[] constant(true)
}}

ENTRY %main (w.9: f32[8], x.9: f32[4]) -> f32[16] {{
  %w.9 = f32[8]{{0:T(128)}} parameter(0)
  %x.9 = f32[4]{{0:T(128)}} parameter(1)
  %zero = s32[] constant(0)
  %started = (f32[8]{{0:T(128)}}, f32[16]{{0:T(128)}}) fusion(%w.9), kind=kCustom, calls=%begin
  %shard = f32[8]{{0:T(128)}} get-tuple-element(%started), index=0
  %state = (s32[], f32[4]{{0:T(128)}}, f32[8]{{0:T(128)}}) tuple(%zero, %x.9, %shard)
  %loop = (s32[], f32[4]{{0:T(128)}}, f32[8]{{0:T(128)}}) while(%state), condition=%cond, body=%body, \
backend_config={{"known_trip_count":{{"n":"6"}}}}
  %kept = f32[8]{{0:T(128)}} get-tuple-element(%loop), index=2
  %buffer = f32[16]{{0:T(128)}} get-tuple-element(%started), index=1
  %whole = f32[16]{{0:T(128)}} fusion(%kept, %buffer), kind=kCustom, calls=%end
  %used = f32[16]{{0:T(128)}} negate(%whole), metadata={{op_name="jit(f)/layer:backward:dm=einsum/dot_general"}}
  %sum = f32[16]{{0:T(128)}} all-reduce(%used), channel_id=8, replica_groups={{{{0,2}},{{1,3}}}}, to_apply=%cond
  %last = f32[4]{{0:T(128)}} get-tuple-element(%loop), index=1
  %both = f32[4]{{0:T(128)}} all-reduce(%last), channel_id=9, replica_groups={{{{0,2}},{{1,3}}}}, to_apply=%cond
  ROOT %r = f32[16]{{0:T(128)}} add(%sum, %sum)
}}
"""

SLICED = {"data": 2, "fsdp": 2}


def test_a_gather_that_a_loop_hides_counts_once_where_it_begins():
    (gather,) = (c for c in collectives(ACROSS_A_LOOP, SLICED) if c.kind == "all_gather")
    assert (gather.name, gather.trips, gather.full_bytes, gather.axes) == ("g.1", 1, 64, ("fsdp",))
    assert gather.is_async
    # the count of that loop need not be known
    unstated = ACROSS_A_LOOP.replace("known_trip_count", "unknown")
    assert [c for c in collectives(unstated, SLICED) if c.kind == "all_gather"] == [gather]


def test_the_nearest_step():
    found = {c.name: c for c in collectives(ACROSS_A_LOOP, SLICED)}
    assert {name: c.label for name, c in found.items()} == {"g.1": None, "sum": None, "both": None}
    # what uses the gathered array, not what runs beside it
    assert str(found["g.1"].near) == "layer:backward:dm=einsum"
    assert str(found["sum"].near) == "layer:backward:dm=einsum"
    # the loop's body makes the element that is summed
    assert str(found["both"].near) == "head:forward:peak=logits"


def test_no_step_is_near():
    text = ACROSS_A_LOOP.replace("layer:backward:dm=einsum", "nothing").replace("head:forward:peak=logits", "nothing")
    assert {c.near for c in collectives(text, SLICED)} == {None}
