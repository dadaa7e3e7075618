"""Quantised storage: rounding within its bound, the bytes that are declared, products exact in what is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.stored import quantised_weights, weight_bytes
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.nn import quantisation
from meshwright.nn.experts.products import blocks_of, slot_product
from meshwright.nn.experts.slots import Ragged
from meshwright.nn.ops.einsum import contract_step
from meshwright.nn.weights import param_shapes as float_shapes
from tests.nn.arrays import close
from tests.parallel.generate_cases import FAMILIES, dequantise_params, float_params, unpaired, with_groups


def dequantise(values: jax.Array, scale: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """What values stand for, in float32; ``scale`` lacks the dims ``axes``."""
    return values.astype(jnp.float32) * jnp.expand_dims(scale, axes)


def test_no_entry_is_off_by_more_than_half_a_scale():
    x = np.random.default_rng(0).normal(size=(64, 8, 16)).astype(np.float32)
    x[:, 3] = 0
    scale = quantisation.absmax_scale(jnp.asarray(x), (0, 2))
    values = quantisation.quantise(jnp.asarray(x), scale, (0, 2))
    assert values.dtype == jnp.int8
    np.testing.assert_allclose(np.delete(scale, 3), np.delete(np.abs(x).max((0, 2)), 3) / 127, rtol=1e-6)
    error = np.abs(np.asarray(dequantise(values, scale, (0, 2)), np.float64) - x)
    assert np.all(error <= np.asarray(scale)[None, :, None] / 2 * (1 + 1e-5))
    assert not np.asarray(values[:, 3]).any(), "zeros stay zeros"
    assert np.abs(np.asarray(values)).max() == 127


def test_the_largest_entry_comes_back_as_it_was():
    x = jnp.array([[0.5, -3.0], [1.0, 2.0]])
    scale = quantisation.absmax_scale(x, (0,))
    found = dequantise(quantisation.quantise(x, scale, (0,)), scale, (0,))
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
    scale = quantisation.absmax_scale(jnp.asarray(w), axes)
    values = quantisation.quantise(jnp.asarray(w), scale, axes)
    step = product_step(lhs, rhs, kept, out)
    found = quantisation.scaled_product(step, jnp.asarray(x), values, scale, lambda a, b: product(step, a, b))
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
    found = quantisation.scaled_product(
        step, x, values, scale, lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32)
    )
    assert found.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64) @ np.asarray(values, np.float64) * 0.25
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8, atol=1e-4)
    wide = product_step(("B", "D"), ("D", "V"), ("V",), ("B", "V"), dtype="fp32")
    assert (
        quantisation.scaled_product(
            wide, x, values, scale, lambda a, b: a.astype(jnp.float32) @ b.astype(jnp.float32)
        ).dtype
        == jnp.float32
    )


def test_tokens_packed_by_expert_meet_their_own_scales():
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(3, 8, 6)) * np.array([1, 10, 100])[:, None, None], jnp.float32)
    scale = quantisation.absmax_scale(w, (1,))
    values = quantisation.quantise(w, scale, (1,))
    rows = Ragged(jnp.asarray(rng.normal(size=(7, 8)), jnp.float32), jnp.array([[2, 4, 1]], jnp.int32))
    step = product_step(("E", "C", "D"), ("E", "D", "Fe"), ("E", "Fe"), ("E", "C", "Fe"))
    found = quantisation.scaled_product(
        step, rows, values, scale, lambda a, b: slot_product(a, b, blocks_of(a, FAMILIES["mixtral"]))
    )
    of_row = np.repeat(np.arange(3), [2, 4, 1])
    whole = np.asarray(dequantise(values, scale, (1,)))
    expected = np.einsum("rd,rdf->rf", np.asarray(rows.rows), whole[of_row])
    close(found.rows, expected)


def test_fp8_is_off_by_at_most_a_sixteenth_of_an_entry():
    """e4m3 has 3 bits of mantissa; below its smallest normal number, 2^-6, steps are 2^-9."""
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    scale = quantisation.absmax_scale(jnp.asarray(x), (0,), "fp8")
    values = quantisation.quantise(jnp.asarray(x), scale, (0,), "fp8")
    assert values.dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(scale, np.abs(x).max(0) / 448, rtol=1e-6)
    assert np.abs(np.asarray(values, np.float32)).max(0) == pytest.approx(np.full(32, 448))
    error = np.abs(np.asarray(dequantise(values, scale, (0,))) - x)
    assert np.all(error <= np.maximum(np.abs(x) / 16, np.asarray(scale) * 2**-10) * (1 + 1e-5))
    assert np.any(error > np.abs(x) / 32)


def test_int4_values_are_pairs_in_bytes():
    values = np.random.default_rng(0).integers(-7, 8, (3, 12, 5)).astype(np.int8)
    stored = np.asarray(quantisation.pairs(jnp.asarray(values, jnp.int4), 1, 3))
    assert (stored.shape, stored.dtype, stored.nbytes) == ((3, 6, 5), np.uint8, values.size // 2)
    np.testing.assert_array_equal(stored[:, :2] & 15, values[:, :2] & 15, "of the first four the low bits have two")
    np.testing.assert_array_equal(unpaired(stored, 1, 3), values)
    ones = jnp.ones((3, 3, 5), jnp.float32)
    found = quantisation.dequantised(jnp.asarray(stored), ones, ("E", "D", "F"), ("E", "Dg", "F"))
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(
    ("values", "scale", "repeats"), [("DF", ("Dg", "F"), (3, 1)), ("NHD", ("N", "Hg", "D"), (1, 4, 1))]
)
def test_a_scale_of_a_group_is_that_of_each_of_its_inputs(values, scale, repeats):
    rng = np.random.default_rng(0)
    sizes = {"D": 6, "F": 5, "N": 2, "H": 8} if values == "DF" else {"N": 2, "H": 8, "D": 5}
    whole = rng.integers(-7, 8, [sizes[d] for d in values]).astype(np.float32)
    factors = rng.normal(size=[n // r for n, r in zip(whole.shape, repeats, strict=True)]).astype(np.float32)
    expected = whole * np.kron(factors, np.ones(repeats, np.float32))
    np.testing.assert_array_equal(
        quantisation.dequantised(jnp.asarray(whole), jnp.asarray(factors), tuple(values), scale), expected
    )


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_arrays_of_every_family_have_the_declared_bytes(name, dtype):
    model = with_groups(FAMILIES[name])
    shapes = float_shapes(model)
    found, named = quantisation.param_shapes(model, shapes, dtype), quantised_weights(model, dtype)
    assert set(found) == set(shapes) | {scale.name for _, scale in named.values()}
    assert sum(shape.size * shape.dtype.itemsize for shape in found.values()) == weight_bytes(model, dtype, 4)
    assert {n: s for n, s in shapes.items() if n not in named} == {n: found[n] for n in shapes if n not in named}
    matrices = [weight for weight, _ in named.values() if weight.dtype == dtype]
    assert 4 * len(matrices) >= 3 * len(named), "few are stored otherwise"


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_weights_come_back_within_their_rounding(dtype):
    model = with_groups(FAMILIES["llama"])
    params = float_params(model)
    found = jax.jit(lambda given: quantisation.stored_params(model, given, dtype))(params)
    back = dequantise_params(model, dtype, found)
    assert set(back) == set(params)
    for name, (weight, scale) in quantised_weights(model, dtype).items():
        one = {"int8": 0, "int4": 0, "fp8": 1 / 16}[weight.dtype]
        of_ones = (
            np.full(found[name].shape, 17, np.uint8) if weight.dtype == "int4" else np.ones(found[name].shape, np.int8)
        )
        ones = {**found, name: of_ones}
        half = dequantise_params(model, dtype, ones)[name] / 2 * (2**-9 if weight.dtype == "fp8" else 1)
        error = np.abs(np.asarray(back[name]) - np.asarray(params[name]))
        assert np.all(error <= np.maximum(half, np.abs(params[name]) * one) * (1 + 1e-5)), scale.name
        if weight.dtype != "int4":
            assert quantisation.LARGEST_OF[weight.dtype] == np.abs(np.asarray(found[name], np.float32)).max()
