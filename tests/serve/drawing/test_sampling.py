"""Draws: which tokens are kept, how often each comes, and that a row is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.serve.drawing.sampling import Sampling, as_arrays, draw, kept_tokens

LOGITS = np.array([1.0, 3.0, 0.5, 2.0, 2.0, -1.0], np.float32)
ROWS = 4096


def kept(top_k: int, top_p: float, logits: np.ndarray = LOGITS) -> list[int]:
    (row,) = np.asarray(kept_tokens(jnp.asarray(logits[None]), jnp.array([top_k]), jnp.array([top_p], jnp.float32)))
    return np.flatnonzero(row).tolist()


def drawn(sampling: Sampling, *, count: int = 0) -> np.ndarray:
    """The same logits in every row, each row a further sample of the seed."""
    rows = as_arrays([Sampling(**{**_fields(sampling), "number": number}) for number in range(ROWS)])
    logits = jnp.broadcast_to(jnp.asarray(LOGITS)[None], (ROWS, LOGITS.size))
    return np.asarray(draw(logits, rows, np.full(ROWS, count, np.int32)))


def _fields(sampling: Sampling) -> dict:
    return {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "seed")}


def test_top_k_keeps_the_likeliest_and_the_earlier_of_equals():
    assert kept(1, 1.0) == [1]
    assert kept(2, 1.0) == [1, 3]
    assert kept(4, 1.0) == [0, 1, 3, 4]
    assert kept(0, 1.0) == kept(6, 1.0) == kept(100, 1.0) == [0, 1, 2, 3, 4, 5]


def test_top_p_keeps_the_fewest_that_have_it_together():
    ordered = [1, 3, 4, 0, 2, 5]
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum()
    reached = np.cumsum(probabilities[ordered])
    for number in range(1, 6):
        assert kept(0, float(reached[number - 1]) - 1e-4) == sorted(ordered[:number])
        assert kept(0, float(reached[number - 1]) + 1e-4) == sorted(ordered[: number + 1])
    assert kept(0, 1e-6) == [1], "the likeliest is always kept"


def test_top_p_of_1_excludes_no_token_whatever_its_neighbours_ask_for():
    """The sum of the likelier tokens rounds to 1 before the least likely ones."""
    logits = np.append(np.zeros(999, np.float32), np.full(1001, -16.0, np.float32))
    assert kept(0, 1.0, logits) == list(range(2000))
    rows = as_arrays([Sampling(temperature=1.0, seed=5, number=number) for number in range(64)])
    several = {name: np.append(field, field[-1:]) for name, field in rows.items()}
    several["top_p"][-1] = 0.5
    alone = draw(jnp.broadcast_to(logits, (64, 2000)), rows, np.zeros(64, np.int32))
    beside = draw(jnp.broadcast_to(logits, (65, 2000)), several, np.zeros(65, np.int32))
    np.testing.assert_array_equal(alone, beside[:64])


def test_top_p_is_of_what_top_k_leaves():
    three = np.exp(LOGITS[[1, 3, 4]])
    first = float(three[0] / three.sum())
    assert kept(3, first - 1e-3) == [1]
    assert kept(3, first + 1e-3) == [1, 3]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature):
    found = np.bincount(drawn(Sampling(temperature=temperature, seed=3)), minlength=LOGITS.size)
    scaled = np.exp(LOGITS / temperature)
    expected = scaled / scaled.sum()
    spread = np.sqrt(ROWS * expected * (1 - expected))
    assert np.all(np.abs(found - ROWS * expected) < 4 * spread), "four standard deviations of a binomial"


def test_kept_tokens_come_in_the_same_proportions():
    found = np.bincount(drawn(Sampling(temperature=1.0, top_k=3)), minlength=LOGITS.size)
    expected = np.where(np.isin(np.arange(6), [1, 3, 4]), np.exp(LOGITS), 0)
    expected = expected / expected.sum()
    assert np.all(np.abs(found - ROWS * expected) <= 4 * np.sqrt(ROWS * expected * (1 - expected)))


def test_the_temperature_comes_first():
    assert set(drawn(Sampling(temperature=1.0, top_p=0.6))) == {1, 3}
    assert set(drawn(Sampling(temperature=5.0, top_p=0.6))) == {1, 3, 4}, "flatter, so that more tokens have 0.6"


def test_temperature_0_takes_the_likeliest():
    assert set(drawn(Sampling())) == {1}
    assert set(drawn(Sampling(top_k=3, top_p=0.5))) == {1}


def test_a_seed_says_all():
    one = Sampling(temperature=1.0, seed=1)
    np.testing.assert_array_equal(drawn(one), drawn(one))
    assert np.mean(drawn(one) == drawn(Sampling(temperature=1.0, seed=2))) < 0.9
    assert np.mean(drawn(one) == drawn(one, count=1)) < 0.9


def test_a_row_does_not_see_its_neighbours():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, LOGITS.size)).astype(np.float32)
    mine = Sampling(temperature=0.8, top_k=4, top_p=0.9, seed=11)
    places, others = (3, 700, 4000), [Sampling(temperature=2.0, seed=n) for n in range(ROWS)]
    found = []
    for place in places:
        rows, arrays = list(others), logits.copy()
        rows[place], arrays[place] = mine, LOGITS
        found.append(int(draw(jnp.asarray(arrays), as_arrays(rows), np.full(ROWS, 5, np.int32))[place]))
    alone = [mine] * ROWS
    everywhere = draw(
        jnp.broadcast_to(jnp.asarray(LOGITS)[None], logits.shape), as_arrays(alone), np.full(ROWS, 5, np.int32)
    )
    assert set(found) == set(np.asarray(everywhere).tolist())
    assert len(set(found)) == 1


def test_rows_of_other_choices_are_not_compiled_again():
    before = draw._cache_size()
    drawn(Sampling(temperature=0.3, top_k=2))
    drawn(Sampling(temperature=0.9, top_p=0.4))
    assert draw._cache_size() - before <= 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
    ],
)
def test_impossible_choices_are_refused(field, value):
    with pytest.raises(InputError, match=f"{field}={value}"):
        Sampling(**{field: value})


def test_draws_stay_with_their_sequences():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    logits = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    rows = as_arrays([Sampling(temperature=1.0, top_k=5, seed=n) for n in range(8)])
    split = draw(jax.device_put(logits, sharding), rows, np.zeros(8, np.int32))
    np.testing.assert_array_equal(np.asarray(split), np.asarray(draw(jnp.asarray(logits), rows, np.zeros(8, np.int32))))
