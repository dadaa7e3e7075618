import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.train.rounding import round_to, round_tree

VALUES = np.array([1.0, 1.001, 1.0039, -1.001, 3e-5, -7.7e10, 0.0, -0.0, 1e-40], np.float32)


def draws(value: float, count: int = 20_000) -> np.ndarray:
    return np.asarray(round_to(jnp.full((count,), value), jnp.bfloat16, key=jax.random.key(0)), np.float32)


@pytest.mark.parametrize("value", [1.001, -1.001, 0.3, 1.0 + 2**-8, 2e-12])
def test_the_mean_of_many_draws_is_the_value(value):
    found = draws(value)
    low, high = found.min(), found.max()
    assert len(np.unique(found)) == 2
    assert low < value < high
    share = (value - low) / (high - low)
    four_sigma = 4 * np.sqrt(share * (1 - share) / len(found)) * (high - low)
    assert abs(found.mean(dtype=np.float64) - np.float32(value)) < four_sigma


def test_values_that_two_bytes_hold_stay():
    exact = jnp.asarray(VALUES).astype(jnp.bfloat16)
    found = round_to(exact.astype(jnp.float32), jnp.bfloat16, key=jax.random.key(1))
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(exact, np.float32))


def test_what_is_no_number_stays_none():
    # The last NaN's low bits are all ones: a carry would run into its sign.
    given = np.array([np.nan, np.inf, -np.inf, 0], np.float32)
    given[3:] = np.array([0x7FFFFFFF], np.uint32).view(np.float32)
    for seed in range(4):
        found = np.asarray(round_to(jnp.asarray(given), jnp.bfloat16, key=jax.random.key(seed)), np.float32)
        np.testing.assert_array_equal(found, given)


def test_without_a_key_and_for_wide_dtypes_it_is_the_nearest():
    given = jnp.asarray(VALUES)
    np.testing.assert_array_equal(round_to(given, jnp.bfloat16), given.astype(jnp.bfloat16))
    assert round_to(given, jnp.float32, key=jax.random.key(0)) is given or bool((given == VALUES).all())


def test_arrays_of_a_tree_have_bits_of_their_own():
    tree = {"a": jnp.full((256,), 1.001), "b": jnp.full((256,), 1.001), "count": jnp.int32(3)}
    like = {"a": jnp.zeros(1, jnp.bfloat16), "b": jnp.zeros(1, jnp.bfloat16), "count": jnp.int32(0)}
    found = round_tree(tree, like, key=jax.random.key(0))
    assert found["a"].dtype == jnp.bfloat16
    assert int(found["count"]) == 3
    assert bool((found["a"] != found["b"]).any())
    again = round_tree(tree, like, key=jax.random.key(0))
    np.testing.assert_array_equal(found["a"], again["a"])
