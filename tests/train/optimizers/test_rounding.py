import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.train.optimizers.rounding import random_bits, round_to, round_tree

VALUES = np.array([1.0, 1.001, 1.0039, -1.001, 3e-5, -7.7e10, 0.0, -0.0], np.float32)


def words(seed):
    return jax.random.bits(jax.random.key(seed), (2,), jnp.uint32)


draw = jax.jit(lambda values, seed: round_to(values, jnp.bfloat16, words=words(seed)).astype(jnp.float32))


@pytest.mark.parametrize("value", [1.001, -1.001, 0.3, 1.0 + 2**-8, 2e-12])
def test_the_mean_of_many_draws_is_the_value(value):
    found = np.asarray(draw(jnp.full((20_000,), value), 0), np.float64)
    low, high = found.min(), found.max()
    assert len(np.unique(found)) == 2
    assert low < value < high
    share = (value - low) / (high - low)
    four_sigma = 4 * np.sqrt(share * (1 - share) / len(found)) * (high - low)
    assert abs(found.mean() - np.float32(value)) < four_sigma


def test_bits_are_fair_and_unrelated_between_places_and_words():
    shape, count = (64, 32, 32), 2**16
    first, second = (np.asarray(random_bits(shape, words(seed))).ravel() for seed in (0, 1))
    assert first.max() < 2**16
    signs = [((bits[:, None] >> np.arange(16)) & 1) * 2.0 - 1 for bits in (first, second)]
    five_sigma = 5 / np.sqrt(count)
    assert np.abs(signs[0].mean(0)).max() < five_sigma
    assert np.abs(signs[0].T @ signs[1] / count).max() < five_sigma
    within = signs[0].T @ signs[0] / count - np.eye(16)
    assert np.abs(within).max() < five_sigma
    for apart in (1, 32, 32 * 32):
        assert np.abs(signs[0][apart:].T @ signs[0][:-apart] / count).max() < five_sigma
    # The two words that follow one another, as a count would, give other bits too.
    near = np.asarray(random_bits(shape, words(0) + jnp.array([0, 1], jnp.uint32))).ravel()
    assert np.abs((((near[:, None] >> np.arange(16)) & 1) * 2.0 - 1).T @ signs[0] / count).max() < five_sigma


def test_values_that_two_bytes_hold_stay():
    exact = jnp.asarray(VALUES).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(draw(exact, 1), exact)


def test_what_is_no_number_stays_none():
    # Two NaNs: with low bits of ones a carry would run into the sign, with but one low bit an infinity would be left.
    nans = np.array([0x7FFFFFFF, 0xFF800001], np.uint32).view(np.float32)
    given = np.array([np.nan, np.inf, -np.inf, *nans], np.float32)
    for seed in range(4):
        np.testing.assert_array_equal(draw(jnp.asarray(given), seed), given)


def test_without_words_and_for_wide_dtypes_it_is_the_nearest():
    given = jnp.asarray(VALUES)
    np.testing.assert_array_equal(round_to(given, jnp.bfloat16), given.astype(jnp.bfloat16))
    np.testing.assert_array_equal(round_to(given, jnp.float32, words=words(0)), given)


def test_arrays_of_a_tree_have_bits_of_their_own():
    tree = {"a": jnp.full((256,), 1.001), "b": jnp.full((256,), 1.001), "count": jnp.int32(3)}
    like = {"a": jnp.zeros(1, jnp.bfloat16), "b": jnp.zeros(1, jnp.bfloat16), "count": jnp.int32(0)}
    found, again = (round_tree(tree, like, key=jax.random.key(0)) for _ in range(2))
    assert found["a"].dtype == jnp.bfloat16
    assert int(found["count"]) == 3
    assert bool((found["a"] != found["b"]).any())
    np.testing.assert_array_equal(found["a"], again["a"])
    nearest = round_tree(tree, like)
    assert bool((nearest["a"] == 1).all())
