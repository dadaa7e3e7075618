"""What orders a program changes no value, also beside numbers that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.order import after, zeros_after

ARRAYS = (jnp.ones((2, 3)), jnp.full(4, jnp.inf, jnp.bfloat16), jnp.full((1, 1), jnp.nan), jnp.arange(3))


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.reshape(-1)[0]))
def test_values_and_zeros_are_what_they_are(array):
    values = {"a": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.arange(4), "c": jnp.full(2, jnp.nan)}
    for name, value in jax.jit(lambda array: after(values, [array]))(array).items():
        np.testing.assert_array_equal(value, values[name])
    zeros = jax.jit(lambda array: zeros_after((2, 5), jnp.float32, array))(array)
    assert (zeros.shape, zeros.dtype) == ((2, 5), jnp.float32)
    assert not zeros.any()


def test_the_compiler_cannot_leave_the_order_out():
    """The result depends on both arguments in the optimised program, whose second one gives nothing but the order."""
    compiled = jax.jit(lambda value, array: after(value, [array])).lower(jnp.ones(8), jnp.ones(8)).compile()
    entry = compiled.as_text().split("ENTRY")[1]
    assert "parameter(1)" in entry
    assert "fusion(" in entry
