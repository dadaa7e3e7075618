"""Collectives that lost their label, and one whose pieces lie on both sides of a loop: as TPU programs have them."""

from meshwright.hlo.collectives import collectives

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

MESH = {"data": 2, "fsdp": 2}


def test_a_gather_that_a_loop_hides_counts_once_where_it_begins():
    (gather,) = (c for c in collectives(ACROSS_A_LOOP, MESH) if c.kind == "all_gather")
    assert (gather.name, gather.trips, gather.full_bytes, gather.axes) == ("g.1", 1, 64, ("fsdp",))
    assert gather.is_async


def test_the_nearest_step():
    found = {c.name: c for c in collectives(ACROSS_A_LOOP, MESH)}
    assert {name: c.label for name, c in found.items()} == {"g.1": None, "sum": None, "both": None}
    # what uses the gathered array, not what runs beside it
    assert str(found["g.1"].near) == "layer:backward:dm=einsum"
    assert str(found["sum"].near) == "layer:backward:dm=einsum"
    # the loop's body makes the element that is summed
    assert str(found["both"].near) == "head:forward:peak=logits"


def test_no_step_is_near():
    text = ACROSS_A_LOOP.replace("layer:backward:dm=einsum", "nothing").replace("head:forward:peak=logits", "nothing")
    assert {c.near for c in collectives(text, MESH)} == {None}
