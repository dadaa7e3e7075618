"""int8 storage: rounding within its bound, half the bytes of bf16, and products that are exact in what is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation import scales
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.nn.experts.products import blocks_of, slot_product
from meshwright.nn.experts.slots import Ragged
from meshwright.nn.ops.einsum import contract_step
from meshwright.nn.quantisation import (
    absmax_scale,
    contracted_axes,
    param_shapes,
    quantise,
    quantise_params,
    scaled_product,
)
from meshwright.nn.weights import param_shapes as float_shapes
from tests.nn.arrays import close
from tests.parallel.generate_cases import FAMILIES, dequantise, dequantise_params, float_params


def test_no_entry_is_off_by_more_than_half_a_scale():
    x = np.random.default_rng(0).normal(size=(64, 8, 16)).astype(np.float32)
    x[:, 3] = 0
    scale = absmax_scale(jnp.asarray(x), (0, 2))
    values = quantise(jnp.asarray(x), scale, (0, 2))
    assert values.dtype == jnp.int8
    np.testing.assert_allclose(np.delete(scale, 3), np.delete(np.abs(x).max((0, 2)), 3) / 127, rtol=1e-6)
    error = np.abs(np.asarray(dequantise(values, scale, (0, 2)), np.float64) - x)
    assert np.all(error <= np.asarray(scale)[None, :, None] / 2 * (1 + 1e-5))
    assert not np.asarray(values[:, 3]).any(), "zeros stay zeros"
    assert np.abs(np.asarray(values)).max() == 127


def test_the_largest_entry_comes_back_as_it_was():
    x = jnp.array([[0.5, -3.0], [1.0, 2.0]])
    scale = absmax_scale(x, (0,))
    found = dequantise(quantise(x, scale, (0,)), scale, (0,))
    np.testing.assert_allclose(found[1, 0], 1.0, rtol=1e-6)
    np.testing.assert_allclose(found[0, 1], -3.0, rtol=1e-6)


def product_step(lhs: tuple[str, ...], rhs: tuple[str, ...], scale: tuple[str, ...], out: tuple[str, ...], dtype=""):
    arrays = [ShardedArray(n, d, ((),) * len(d)) for n, d in (("x", lhs), ("w", rhs), ("s", scale), ("y", out))]
    return Step(op="quantised_einsum", inputs=tuple(arrays[:3]), result=arrays[3].replace(dtype=dtype))


CASES = {
    "queries": (("B", "T", "D"), ("D", "N", "H"), ("B", "T", "N", "H")),
    "out": (("B", "T", "N", "H"), ("N", "H", "D"), ("B", "T", "D")),
    "tied head": (("B", "D"), ("V", "D"), ("B", "V")),
    "experts": (("E", "C", "D"), ("E", "D", "Fe"), ("E", "C", "Fe")),
}
SIZES = {"B": 2, "T": 3, "D": 32, "N": 4, "H": 8, "V": 20, "E": 3, "C": 5, "Fe": 12}


def product(step: Step, left, right):
    """Without any scale."""
    return contract_step(replace(step, inputs=step.inputs[:2]), left, right)


@pytest.mark.parametrize("name", CASES)
def test_a_product_is_off_by_no_more_than_the_rounding_of_its_weight(name):
    """``|y - y_int8| <= sum |x| scale / 2`` over what is contracted, in every entry."""
    lhs, rhs, out = CASES[name]
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=[SIZES[d] for d in dims]).astype(np.float32) for dims in (lhs, rhs))
    axes = tuple(i for i, d in enumerate(rhs) if d not in out)
    kept = tuple(d for d in rhs if d in out)
    scale = absmax_scale(jnp.asarray(w), axes)
    values = quantise(jnp.asarray(w), scale, axes)
    step = product_step(lhs, rhs, kept, out)
    found = scaled_product(step, jnp.asarray(x), values, scale, lambda a, b: product(step, a, b))
    half = np.broadcast_to(np.expand_dims(np.asarray(scale), axes) / 2, w.shape).astype(np.float32)
    bound = product(step, jnp.asarray(np.abs(x)), jnp.asarray(half))
    error = np.abs(np.asarray(found) - np.asarray(product(step, jnp.asarray(x), jnp.asarray(w))))
    assert np.all(error <= np.asarray(bound) * (1 + 1e-4))
    assert error.max() > 0
    stored = product(step, jnp.asarray(x), dequantise(values, scale, axes))
    close(found, stored)


def test_narrow_streams_take_values_as_they_are():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 32)), jnp.bfloat16)
    values = jnp.asarray(np.arange(-127, 128, 2)[None, :32].repeat(32, 0), jnp.int8)
    scale = jnp.full(32, 0.25)
    step = product_step(("B", "D"), ("D", "V"), ("V",), ("B", "V"))
    found = scaled_product(step, x, values, scale, lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    assert found.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64) @ np.asarray(values, np.float64) * 0.25
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8, atol=1e-4)
    wide = product_step(("B", "D"), ("D", "V"), ("V",), ("B", "V"), dtype="fp32")
    assert (
        scaled_product(wide, x, values, scale, lambda a, b: a.astype(jnp.float32) @ b.astype(jnp.float32)).dtype
        == jnp.float32
    )


def test_tokens_packed_by_expert_meet_their_own_scales():
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(3, 8, 6)) * np.array([1, 10, 100])[:, None, None], jnp.float32)
    scale = absmax_scale(w, (1,))
    values = quantise(w, scale, (1,))
    rows = Ragged(jnp.asarray(rng.normal(size=(7, 8)), jnp.float32), jnp.array([[2, 4, 1]], jnp.int32))
    step = product_step(("E", "C", "D"), ("E", "D", "Fe"), ("E", "Fe"), ("E", "C", "Fe"))
    found = scaled_product(
        step, rows, values, scale, lambda a, b: slot_product(a, b, blocks_of(a, FAMILIES["mixtral"]))
    )
    of_row = np.repeat(np.arange(3), [2, 4, 1])
    whole = np.asarray(dequantise(values, scale, (1,)))
    expected = np.einsum("rd,rdf->rf", np.asarray(rows.rows), whole[of_row])
    close(found.rows, expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_matrix_of_every_family_takes_a_quarter_of_float32(name):
    model = FAMILIES[name]
    shapes = float_shapes(model)
    found, axes, named = param_shapes(model, shapes), contracted_axes(model), scales(model)
    assert set(found) == set(shapes) | {scale.name for scale in named.values()}
    for weight, over in axes.items():
        assert (found[weight].shape, found[weight].dtype) == (shapes[weight].shape, jnp.int8)
        kept = tuple(n for i, n in enumerate(shapes[weight].shape) if i not in over)
        assert (found[named[weight].name].shape, found[named[weight].name].dtype) == (kept, jnp.float32)
    others = {n: s for n, s in shapes.items() if n not in axes}
    assert others == {n: found[n] for n in others}


def test_weights_come_back_within_half_a_scale():
    model = FAMILIES["llama"]
    params = float_params(model)
    found = jax.jit(lambda given: quantise_params(model, given))(params)
    back = jax.jit(lambda given: dequantise_params(model, given))(found)
    assert set(back) == set(params)
    assert sum(found[n].nbytes for n in contracted_axes(model)) * 4 == sum(
        params[n].nbytes for n in contracted_axes(model)
    )
    for weight, over in contracted_axes(model).items():
        half = np.expand_dims(np.asarray(found[scales(model)[weight].name]), over) / 2
        assert np.all(np.abs(np.asarray(back[weight]) - np.asarray(params[weight])) <= half * (1 + 1e-5))
