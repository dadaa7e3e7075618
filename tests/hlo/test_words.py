"""One instruction in words."""

import pytest

from meshwright.hlo.module import parse_module
from meshwright.hlo.shapes import parse_shapes
from meshwright.hlo.words import explain_instruction, layout_facts, order_words, padding_words, space_words, tile_words
from tests.hlo.programs import module


def shape(text: str):
    return parse_shapes(text)[0]


def test_a_layout_in_words():
    facts = layout_facts(shape("bf16[4,4096,8,64]{3,1,2,0:T(8,128)(2,1)S(1)}"))
    assert facts == [
        ("shape", "bf16[4,4096,8,64]: 8,388,608 x bf16 of 2 B, 16.8 MB"),
        ("order", "{3,1,2,0}: dim 3 (64) is contiguous, outside it dim 1 (4,096), then dim 2 (8), then dim 0 (4)"),
        ("tiles", "T(8,128): 8 x 128 elements of dim 1 x dim 3 are contiguous"),
        ("tiles", "(2,1): inside, 2 rows share 32-bit words, with one element of each"),
        ("memory", "S(1): VMEM, the on-chip memory that the vector and matrix units read"),
        ("padding", "33.6 MB in memory, 50.0% of it padding: dim 3 from 64 to 128"),
    ]


def test_small_and_plain_layouts():
    assert order_words(shape("f32[]")) == "one number"
    assert order_words(shape("f32[7]{0}")) == "{0}: dim 0 (7) is contiguous"
    assert tile_words(shape("f32[7,8]{1,0}")) == []
    assert tile_words(shape("bf16[1024]{0:T(1024)(128)(2,1)}"))[1] == "(128): inside, 128 elements are contiguous"
    assert padding_words(shape("f32[8,128]{1,0:T(8,128)}")) == "none"
    assert padding_words(shape("s32[]{:T(128)}")) == "512 B in memory, 99.2% of it padding"
    assert space_words(0, is_tpu=False) == "the GPU's memory"
    assert space_words(6) == "S(6): a memory space without a public name"


def facts_of(name: str, instruction: str) -> dict[str, str]:
    read = module(name)
    return dict(explain_instruction(read, read.find(instruction)))


def test_an_instruction_of_a_labelled_program():
    facts = facts_of("cpu_layer", "all_gather.149")
    assert facts["does"].startswith("all-gather: gathers the shards")
    assert facts["step"] == "layer:forward:h1=all_gather"
    assert facts["operation"].endswith("/all_gather")
    assert facts["shape"] == "f32[8,128,256]: 262,144 x f32 of 4 B, 1.05 MB"


def test_a_source_line_and_its_callers():
    facts = facts_of("h200_step", "all-gather-start")
    assert facts["source"].startswith("step.py:")
    assert facts["does"].endswith("only begins here")
    assert facts["runs"] == "5 times in a call of the program, in computation region_0.1_spmd"
    assert facts["tuple"].startswith("2 arrays, 10.5 MB in memory: bf16[8,128,1024], bf16[8,512,1024]")
    # the larger of the two is described
    assert facts["shape"].startswith("bf16[8,512,1024]")
    assert facts["used by"] == "all-gather-done bf16[8,512,1024]"


@pytest.mark.parametrize(
    ("instruction", "words"), [("all-gather-done", "ends here what began earlier"), ("partition-id", "partition-id")]
)
def test_what_it_does(instruction, words):
    read = module("h200_step")
    one = read.find(instruction) or next(i for i in read if i.opcode == instruction)
    assert words in dict(explain_instruction(read, one))["does"]


def test_what_begins_here():
    text = """HloModule m

%wrapped (p: f32[8]) -> f32[4] {
  %p = f32[8]{0} parameter(0)
  ROOT %s = f32[4]{0} slice(%p), slice={[0:4]}
}

ENTRY %main (x: f32[8]) -> f32[4] {
  %x = f32[8]{0} parameter(0)
  %start = ((f32[8]{0}), f32[4]{0}, s32[]) async-start(%x), calls=%wrapped
  ROOT %done = f32[4]{0} async-done(%start), calls=%wrapped
}
"""
    read = parse_module(text)
    facts = dict(explain_instruction(read, read.find("start")))
    assert facts["does"] == "async-start of slice: takes a part of an array; only begins here"
    assert "another operation" in dict(explain_instruction(read, read.find("done")))["does"]


def told(line: str) -> dict[str, str]:
    read = parse_module(line)
    return dict(explain_instruction(read, [*read][-1]))


DOT = "bf16[16,128,4096]{2,1,0} dot(bf16[16,8192,128]{2,1,0} %a, bf16[16,8192,4096]{2,1,0} %b)"


@pytest.mark.parametrize(
    ("line", "label", "words"),
    [
        # section 3.1 of How to Scale Your Model reads this line
        ("%f = bf16[32,32,4096]{2,1,0:T(8,128)(2,1)S(1)} fusion(...), kind=kCustom", "memory", "S(1): VMEM"),
        ("ROOT %f = bf16[8]{0} fusion(bf16[16]{0:T(256)} %x), kind=kCustom, calls=%gone", "operands", "x bf16[16]"),
        (f"%d = {DOT}, lhs_batch_dims={{0}}, lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}", "product",
         "over dim 1 of the first and dim 1 of the second: 2 x 8,388,608 x 8,192 = 137 GFLOP"),
        ('%c = (bf16[64,256]{1,0}, s8[4]{0}) custom-call(bf16[64,512]{1,0} %a, bf16[512,256] %b), custom_call_target='
         '"__cublas$gemm", backend_config={"gemm_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":'
         '["1"],"rhs_contracting_dimensions":["0"]}}}', "product", "2 x 16,384 x 512 = 16.8 MFLOP"),
        ("%ag = f32[8]{0} all-gather(f32[4]{0} %p), replica_groups=[8,2]<=[4,4]T(1,0), dimensions={0}", "devices",
         "8 groups of 2: 0,4, ..."),
        ("%r = f32[8]{0} all-reduce(f32[8]{0} %p), replica_groups={{0,1},{2,3,4,5,6,7}}", "devices",
         "1 group of 2: 0,1, ...; 1 group of 6: 2,3,4,5,6,7, ..."),
        ("%s = (f32[8]{0}, f32[8]{0:S(1)}, u32[]{:S(2)}) copy-start(f32[8]{0} %p)", "does", "only begins here"),
    ],
)  # fmt: skip
def test_an_instruction_alone(line, label, words):
    assert words in told(line)[label]


def test_a_text_without_instructions_is_none():
    for text in ("", "x = foo(1)\n", "the sum = of all (parts)\n"):
        with pytest.raises(ValueError, match="no HLO computation"):
            parse_module(text)
