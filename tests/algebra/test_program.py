"""Layer programs: read from text, and the llama decoder as one."""

import pytest

from meshwright.algebra.kinds import KINDS
from meshwright.algebra.program import Op, Program, Variable, parse_block
from meshwright.algebra.transformer import local_name, transformer
from meshwright.core.errors import CannotRunError, InputError
from meshwright.spec.catalogue import model
from meshwright.spec.weights import weight_table


def test_lines_become_ops_and_variables():
    variables = {"w": Variable("w", ("D", "F"), "weight")}
    block = parse_block(
        "mlp", "\n  g[B,D,F] = x[B,D] * w[D,F]\n\n  y[B,D] = silu_mul(g[B,D,F], x[B,D])\n", variables, repeat=3
    )
    assert block.ops == (Op("einsum", ("x", "w"), "g"), Op("silu_mul", ("g", "x"), "y"))
    assert (block.name, block.repeat) == ("mlp", 3)
    assert variables["w"].role == "weight"
    assert variables["g"] == Variable("g", ("B", "D", "F"), "activation")


def test_variables_are_found_by_role():
    variables = {"w": Variable("w", ("D",), "weight"), "s": Variable("s", ("D",), "vector")}
    program = Program((parse_block("b", "y[B,D] = x[B,D] * w[D]", variables),), variables)
    assert [v.name for v in program.of_role("weight", "vector")] == ["w", "s"]
    assert [v.name for v in program.of_role("activation")] == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("y[B] x[B]", "program line 'y[B] x[B]' is not 'out[dims] = ...'"),
        ("y[B] = x[B]", "program line 'y[B] = x[B]' is not a product of two arrays"),
        ("y[B] = x[B] * w[B] * v[B]", "is not a product of two arrays"),
        ("y[B] = copy(x[B])\nz[B,D] = copy(x[B,D])", "x has dims ['B'] and is used as x[B,D]"),
        ("y[B] = copy(x[B,B])", "x[B, B] names a dim twice"),
    ],
)
def test_lines_that_make_no_sense_are_refused(text, reason):
    with pytest.raises(InputError) as refused:
        parse_block("b", text, {})
    assert reason in str(refused.value)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3.2-1b", "tiny"])
def test_the_transformer_uses_every_weight_of_the_table_in_its_dims(name):
    program = transformer(model(name))
    own = [w for w in weight_table(model(name)) if not w.tied_to]
    assert {(v.name, v.dims) for v in program.of_role("weight", "vector")} == {(local_name(w), w.dims) for w in own}
    repeats = {n: b.repeat for b in program.blocks for op in b.ops for n in op.inputs}
    assert {local_name(w): w.repeat for w in own} == {local_name(w): repeats[local_name(w)] for w in own}


def test_the_transformer_is_a_chain_of_blocks():
    program = transformer(model("tiny"))
    embed, layer, head = program.blocks
    assert (embed.ops[-1].out, layer.carry) == ("x", "x")
    assert layer.repeat == model("tiny").num_layers
    assert layer.ops[-1].out == layer.result
    assert program.variables[layer.result].dims == program.variables[layer.carry].dims
    assert (head.ops[0].inputs[0], head.ops[-1].out) == ("x", "loss")
    assert {op.kind for block in program.blocks for op in block.ops} <= set(KINDS)


def test_tied_embeddings_are_one_weight_used_twice():
    tied, untied = (transformer(model(name)) for name in ("llama3.2-1b", "tiny"))
    assert tied.blocks[-1].ops[-1].inputs[1] == tied.blocks[0].ops[0].inputs[1] == "embed"
    assert "unembed" not in tied.variables
    assert untied.blocks[-1].ops[-1].inputs[1] == "unembed"


def test_a_family_without_a_program_is_refused_by_name():
    with pytest.raises(CannotRunError, match="gpt2"):
        transformer(model("gpt2"))
