"""The parser of HLO text, and loops whose counts it reads, on texts as XLA writes them."""

import re

import pytest

from meshwright.core.errors import InputError
from meshwright.hlo.collectives import collectives
from meshwright.hlo.loops import times_run, trip_count
from meshwright.hlo.module import Module, parse_module, require_readable
from tests.speed import took

LOOP = """
HloModule jit_step, is_scheduled=true, num_partitions=4

%wrapped (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction=DIRECTION
}

%cond (p: (s32[], f32[4], s32[])) -> pred[] {
  %p = (s32[]{:T(128)}, f32[4]{0:T(128)}, s32[]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=2
  ROOT %test = pred[] fusion(%i, %n), kind=kLoop, calls=%wrapped
}

%body (q: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {
  %q = (s32[]{:T(128)}, f32[4]{0:T(128)}, s32[]) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %moved = s32[]{:T(128)S(6)} copy(%j)
  %step = s32[] constant(STEP)
  %next = s32[] add(%moved, %step)
  %x = f32[4] get-tuple-element(%q), index=1
  %ar = f32[4] all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%sum
  %m = s32[] get-tuple-element(%q), index=2
  ROOT %out = (s32[], f32[4], s32[]) tuple(%next, %ar, %m)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0:T(128)} parameter(0)
  %first = s32[] constant(START)
  %last = s32[] constant(BOUND)
  %state = (s32[], f32[4], s32[]) tuple(%first, %x, %last)
  %loop = (s32[], f32[4], s32[]) while(%state), condition=%cond, body=%body
  ROOT %r = f32[4] get-tuple-element(%loop), index=1
}
"""


def looping(start: int, bound: int, step: int, direction: str) -> Module:
    words = {"START": start, "BOUND": bound, "STEP": step, "DIRECTION": direction}
    text = LOOP
    for word, value in words.items():
        text = text.replace(word, str(value))
    return parse_module(text)


@pytest.mark.parametrize(
    ("start", "bound", "step", "direction", "direct"),
    [
        (0, 32, 1, "LT", range(32)),
        (1, 32, 1, "LE", range(1, 33)),
        (2, 31, 4, "LT", range(2, 31, 4)),
        (7, 0, -1, "GT", range(7, 0, -1)),
        (7, 0, -2, "GE", range(7, -1, -2)),
        (3, 12, 3, "NE", range(3, 12, 3)),
        (9, 3, 1, "LT", range(9, 3)),
    ],
)
def test_counts_of_loops_that_state_none(start, bound, step, direction, direct):
    module = looping(start, bound, step, direction)
    loop = module.find("loop")
    assert trip_count(module, loop) == times_run(module, "body") == len(direct)


def test_elements_of_tuples_without_an_instruction_of_their_own():
    """As XLA writes unoptimised programs since jax 0.11."""
    short = LOOP.replace("copy(%j)", "copy(%q#0)").replace("all-reduce(%x)", "all-reduce(%q#1)")
    short = short.replace("tuple(%next, %ar, %m)", "tuple(%next, %ar, %q#2)").replace("(%i, %n)", "(%p#0, %p#2)")
    short = "".join(line for line in short.splitlines(True) if not re.search(r"(%[pq]\)), index", line))
    for word, value in {"START": "1", "BOUND": "9", "STEP": "2", "DIRECTION": "LT"}.items():
        short = short.replace(word, value)
    module = require_readable(parse_module(short))
    assert trip_count(module, module.find("loop")) == 4
    assert [element.shape for element in module.computations["body"].instructions if "#" in element.name] == [
        "s32[]{:T(128)}", "f32[4]{0:T(128)}", "s32[]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("start", "bound", "step", "direction"), [(0, 9, 2, "NE"), (0, 9, -1, "LT"), (0, 9, 0, "LT"), (0, 9, 1, "EQ")]
)
def test_a_loop_that_would_not_end_is_not_counted(start, bound, step, direction):
    module = looping(start, bound, step, direction)
    assert trip_count(module, module.find("loop")) is None
    assert times_run(module, "body") == 1


def test_a_bound_that_the_body_changes_is_not_trusted():
    text = LOOP.replace("tuple(%next, %ar, %m)", "tuple(%next, %ar, %next)").replace("DIRECTION", "LT")
    with pytest.raises(ValueError, match="loop loop states no readable trip count"):
        collectives(text.replace("STEP", "1").replace("START", "0").replace("BOUND", "8"), {"x": 4})


@pytest.mark.parametrize(
    ("whole", "cut", "message"),
    [
        ("add(%moved, %step)", "add(%moved)", r"^add next has no operand 1\. Give the whole text\.$"),
        ("get-tuple-element(%p), index=0", "get-tuple-element(), index=0", r"^get-tuple-element i has no operand 0\."),
    ],
)
def test_an_instruction_that_lacks_an_operand_is_named(whole, cut, message):
    module = parse_module(LOOP.replace(whole, cut).replace("DIRECTION", "LT").replace("STEP", "1"))
    loop = next(one for one in module if one.opcode == "while")
    with pytest.raises(InputError, match=message):
        trip_count(module, loop)


def test_a_loop_without_collectives_may_depend_on_data():
    text = LOOP.replace("all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%sum", "negate(%x)")
    assert collectives(text.replace("direction=DIRECTION", "direction=EQ"), {"x": 4}) == ()


def test_parts_of_an_instruction():
    text = """HloModule m
ENTRY %main (p: (f32[2], s32[])) -> f32[2] {
  %p = (f32[2]{0:T(2,128)}, /*index=1*/s32[]) parameter(0)
  %c = f32[2]{0} constant({1, 2})
  ROOT %f.1 = f32[2]{0:T(2,128)S(1)} fusion((f32[2]{0}, s32[]) %p, f32[2]{0} %c), kind=kLoop, calls=%g, \
frontend_attributes={a="x, y}",b={{1,2}}}, metadata={op_name="jit(f)/layer:forward:q=einsum/dot" source_file="a.py" \
source_line=7}, backend_config={"cost":{"cycles":"9"}}
}
"""
    module = parse_module(text)
    one = module.find("%f.1")
    assert one.is_root
    assert (one.opcode, one.operands, one.shape) == ("fusion", ("p", "c"), "f32[2]{0:T(2,128)S(1)}")
    assert one.called == (("calls", "g"),)
    assert one.attribute("frontend_attributes") == '{a="x, y}",b={{1,2}}}'
    assert one.attribute("backend_config") == '{"cost":{"cycles":"9"}}'
    assert one.attribute("nothing") == ""
    assert str(one.label) == "layer:forward:q=einsum"
    assert [str(frame) for frame in module.source(one)] == ["a.py:7"]
    constant = module.find("c")
    assert (constant.literal, constant.operands) == ("{1, 2}", ())
    assert [user.name for user in module.computations["main"].users["p"]] == ["f.1"]


def test_the_short_form_without_percent_signs():
    module = parse_module(
        "HloModule m\nENTRY main.2 {\n  a = f32[2]{0} parameter(0)\n  ROOT b = f32[2]{0} add(a, a)\n}\n"
    )
    assert module.entry == "main.2"
    assert module.computations["main.2"].root.operands == ("a", "a")


def test_an_instruction_with_line_breaks():
    """As a Pallas kernel's metadata makes them."""
    text = """HloModule m
ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %k = f32[2]{0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block":"{\\"q\\": 512}"
}}, metadata={op_name="jit(f)/layer:forward:o=attention/pallas_call"}
  ROOT %b = f32[2]{0} add(%k, %a)
}
"""
    computation = parse_module(text).computations["main"]
    assert [one.name for one in computation.instructions] == ["a", "k", "b"]
    assert str(computation.by_name["k"].label) == "layer:forward:o=attention"
    assert computation.by_name["k"].attribute("custom_call_target") == '"tpu_custom_call"'


def test_no_computation():
    with pytest.raises(ValueError, match="no HLO computation"):
        parse_module("module @jit_step { func.func public @main() }\n")


def test_large_texts_are_read_fast():
    """A text of 5 MB in about a second on a free machine; ten times that is an algorithm gone wrong."""
    line = '  %x{n} = f32[8,128]{{1,0:T(8,128)}} add(%x{m}, %x{m}), metadata={{op_name="jit(f)/add" stack_frame_id=3}}'
    body = "\n".join([line.format(n=n, m=n - 1) for n in range(1, 40_000)])
    text = "HloModule m\nENTRY %main (x0: f32[8,128]) -> f32[8,128] {\n  %x0 = f32[8,128]{1,0} parameter(0)\n" + body
    assert len(text) > 4e6
    with took() as cpu:
        module = parse_module(text + "\n}\n")
    assert module.num_instructions == 40_000
    assert cpu.yardsticks < 100
