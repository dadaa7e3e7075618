import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.notation import parse_array
from meshwright.algebra.steps import Step
from meshwright.nn.ops.bias_add import bias_add
from meshwright.nn.ops.embed import embed, embed_backward, embed_scale
from meshwright.nn.ops.join_heads import join_heads, join_heads_backward
from meshwright.nn.ops.token_gate import token_gate
from meshwright.spec import catalogue

TOKENS = jnp.asarray([[0, 5, 9, 5], [3, 3, 8, 1]], jnp.int32)


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_parts_of_a_table_add_up_to_the_look_up():
    table = array(10, 6)
    parts = [embed(TOKENS, table[at : at + 5], first_row=at, scale=2.0) for at in (0, 5)]
    np.testing.assert_array_equal(parts[0] + parts[1], 2.0 * np.asarray(table)[np.asarray(TOKENS)])


@pytest.mark.parametrize("first_row", [0, 5])
def test_backward_of_a_look_up_adds_up_rows(first_row):
    dout = array(2, 4, 6)
    expected = np.zeros((10, 6))
    np.add.at(expected, np.asarray(TOKENS), 3.0 * np.asarray(dout, np.float64))
    found = embed_backward(TOKENS, dout, first_row=first_row, num_rows=5, scale=3.0)
    np.testing.assert_allclose(found, expected[first_row : first_row + 5], rtol=0, atol=1e-5)


def test_many_tokens_of_one_row_lose_nothing_in_bf16():
    dout = jnp.full((1, 1024, 2), 1.0, jnp.bfloat16)
    found = embed_backward(jnp.zeros((1, 1024), jnp.int32), dout, first_row=0, num_rows=3)
    assert float(found[0, 0]) == 1024  # added in bf16 it stops at 256


def test_the_scale_of_gemma_is_rounded_to_the_weights_dtype():
    gemma = replace(catalogue.load_model("gemma3-27b"), d_model=3072)
    table = parse_array("embed[V,D]")
    assert embed_scale(gemma, jnp.bfloat16, table) == 55.5
    assert embed_scale(gemma, jnp.float32, table) == pytest.approx(3072**0.5, rel=1e-7)
    assert embed_scale(catalogue.load_model("tiny"), jnp.float32, table) == 1.0
    assert embed_scale(replace(gemma, layer_embed_dim=256), jnp.bfloat16, parse_array("layer_embed[V,Dl]")) == 16.0
    assert embed_scale(gemma, jnp.bfloat16, parse_array("position_table[P,D]")) == 1.0


def test_a_bias_lies_on_the_dims_that_it_names():
    x, bias = array(3, 4, 2, 5), array(3, 5)
    expected = np.asarray(x) + np.asarray(bias)[:, None, None, :]
    step = Step(
        op="bias_add", inputs=(parse_array("x[E,B,T,D]"), parse_array("b[E,D]")), result=parse_array("y[E,B,T,D]")
    )
    np.testing.assert_array_equal(bias_add(None, step, x, bias), expected)


def test_joined_heads_share_their_second_part():
    own, shared = array(2, 3, 4, 5), array(2, 3, 2, seed=1)
    joined = join_heads(own, shared)
    assert joined.shape == (2, 3, 4, 7)
    np.testing.assert_array_equal(joined[:, :, 2, :5], own[:, :, 2])
    np.testing.assert_array_equal(joined[:, :, 3, 5:], shared)
    dout = array(2, 3, 4, 7, seed=2)
    expected = jax.vjp(join_heads, own, shared)[1](dout)
    for found, other in zip(join_heads_backward(dout, 5), expected, strict=True):
        np.testing.assert_allclose(found, other, rtol=0, atol=1e-6)


def test_a_token_has_one_gate():
    y, x, weight = array(2, 3, 4), array(2, 3, 4, seed=1), array(4, seed=2)
    scores = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    expected = np.asarray(y) / (1 + np.exp(-scores))[..., None]
    np.testing.assert_allclose(token_gate(y, x, weight), expected, rtol=0, atol=1e-6)
