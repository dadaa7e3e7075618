"""Layer programs read from text."""

import pytest

from meshwright.algebra.program import Op, Program, Variable
from meshwright.algebra.transformer import parse_block
from meshwright.core.errors import InputError


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


def test_attributes_follow_a_semicolon():
    block = parse_block("b", "o[B,T] = attention(q[B,T], k[B,T]; window=128, sinks)", {})
    assert block.ops == (Op("attention", ("q", "k"), "o", (("window", "128"), ("sinks", "true"))),)


def test_a_block_may_give_its_weights_other_names():
    variables = {"w_moe": Variable("w_moe", ("D", "F"), "weight")}
    block = parse_block("b", "g[B,F] = x[B,D] * w[D,F]", variables, renamed={"w": "w_moe"})
    assert block.ops == (Op("einsum", ("x", "w_moe"), "g"),)
    assert "w" not in variables
