"""Slots of a cache and attention over them, against positions and softmax written out in NumPy."""

from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.algebra.notation import parse_array
from meshwright.algebra.ops.cached_attention import CachedAttention
from meshwright.nn.activations import capped
from meshwright.nn.cache import (
    LayerCache,
    ScorePart,
    cached_attention,
    held_positions,
    visible_slots,
    write_position,
    write_prompt,
)
from meshwright.nn.ops import cached_attention as ops
from meshwright.nn.ops.cached_latent_attention import cached_latent_attention
from meshwright.nn.quantisation import absmax_scale, quantise
from tests.nn.arrays import close
from tests.tier import sampled

BATCH, WIDTH, LAYERS = 3, 4, 2
LENGTHS = np.array([7, 1, 10])


def values(length: int, seed: int = 0) -> np.ndarray:
    """Row b, position t: a vector that is like no other."""
    return np.random.default_rng(seed).normal(size=(BATCH, length, WIDTH)).astype(np.float32)


def empty(num_slots: int) -> LayerCache:
    return LayerCache(jnp.zeros((LAYERS, BATCH, num_slots, WIDTH)), jnp.int32(1))


@pytest.mark.parametrize("num_slots", [4, 16])
def test_a_cache_holds_the_last_positions_of_each_row(num_slots):
    rows = values(14)
    cache = write_prompt(empty(num_slots), jnp.asarray(rows[:, :10]), jnp.asarray(LENGTHS - 1))
    for count in range(5):
        seen = np.asarray(cache.entries())
        last = LENGTHS - 1 + count
        for b in range(BATCH):
            for position in range(max(0, last[b] - num_slots + 1), last[b] + 1):
                np.testing.assert_array_equal(seen[b, position % num_slots], rows[b, position])
        at = last + 1
        if at.max() < rows.shape[1]:
            token = jnp.asarray(rows[np.arange(BATCH), at][:, None])
            cache = write_position(cache, token, jnp.asarray(at[:, None]))
    assert not np.asarray(cache.stack[0]).any(), "the other layer is as it was"


@pytest.mark.parametrize("num_slots", [4, 5, 16])
def test_a_slot_holds_the_latest_position_that_fell_on_it(num_slots):
    last = jnp.arange(12, dtype=jnp.int32)
    found = np.asarray(held_positions(last, num_slots))
    for p in range(12):
        for slot in range(num_slots):
            fell = [x for x in range(p + 1) if x % num_slots == slot]
            assert (found[p, slot] == fell[-1]) if fell else (found[p, slot] < 0)


def test_a_query_sees_what_is_filled_and_within_the_window():
    seen = np.asarray(visible_slots(jnp.array([0, 2, 9], jnp.int32), 6, window=3))
    held = [[0], [0, 1, 2], [7, 8, 9]]
    for row, positions in zip(seen, held, strict=True):
        assert sorted(np.flatnonzero(row)) == sorted(p % 6 for p in positions)


def plain_attention(q, k, v, seen, *, scale, softcap=None, sinks=None):
    """Row by row and head by head in float64; q[B,N,H], k[B,S,K,H]."""
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    group = q.shape[1] // k.shape[2]
    for b, n in np.ndindex(*q.shape[:2]):
        scores = scale * k[b, :, n // group].astype(np.float64) @ q[b, n]
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        weights = np.where(seen[b], np.exp(scores), 0)
        total = weights.sum() + (np.exp(sinks[n]) if sinks is not None else 0)
        out[b, n] = weights / total @ v[b, :, n // group]
    return out


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in ((2, 8, 6), (2, 12, 4, 6), (2, 12, 4, 5)))
    seen = rng.random((2, 12)) < 0.6
    seen[:, 0] = True
    return q, k, v, seen


@pytest.mark.parametrize("options", [{}, {"softcap": 0.8}, {"sinks": np.linspace(-1, 2, 8).astype(np.float32)}])
def test_attention_over_slots_is_the_softmax_of_what_is_seen(arrays, options):
    q, k, v, seen = arrays
    given = {"score": partial(capped, softcap=0.8)} if "softcap" in options else options
    meeting = ScorePart(queries=jnp.asarray(q[:, None]), keys=jnp.asarray(k))
    found = cached_attention([meeting], jnp.asarray(v), jnp.asarray(seen), scale=0.3, **given).result[:, 0]
    expected = plain_attention(q, k, v, seen, scale=0.3, **options)
    close(found, expected)


def test_keys_may_come_in_parts(arrays):
    q, k, v, seen = arrays
    parts = [
        ScorePart(queries=jnp.asarray(q[:, None, :, p]), keys=jnp.asarray(k[..., p]))
        for p in (slice(0, 2), slice(2, 6))
    ]
    found = cached_attention(parts, jnp.asarray(v), jnp.asarray(seen), scale=0.3).result[:, 0]
    expected = plain_attention(q, k, v, seen, scale=0.3)
    close(found, expected)


def test_int8_keys_and_values_are_off_by_no_more_than_their_rounding(arrays):
    """A key entry is off by half its scale at most, so a score by delta = scale |q|_1 / 2 x the largest scale.

    Every weight of the softmax is then within exp(+-2 delta) of the exact one, and the result within
    (exp(2 delta) - 1) max |v| + max value scale / 2.
    """
    q, k, v, seen = arrays
    stored = []
    for array in (k, v):
        scale = absmax_scale(jnp.asarray(array), (3,))
        stored += [quantise(jnp.asarray(array), scale, (3,)), scale]
    keys, key_scale, mixed, value_scale = stored
    meeting = ScorePart(queries=jnp.asarray(q[:, None]), keys=keys, scale=key_scale)
    found = cached_attention([meeting], mixed, jnp.asarray(seen), scale=0.3, value_scale=value_scale).result[:, 0]
    exact = plain_attention(q, k, v, seen, scale=0.3)
    delta = 0.3 * np.abs(q).sum(-1).max() * float(key_scale.max()) / 2
    bound = np.expm1(2 * delta) * np.abs(v).max() + float(value_scale.max()) / 2
    assert 0 < np.abs(found - exact).max() <= bound
    whole = [np.asarray(a, np.float32) * np.asarray(s)[..., None] for a, s in ((keys, key_scale), (mixed, value_scale))]
    expected = plain_attention(q, *whole, seen, scale=0.3)
    close(found, expected)


@pytest.mark.parametrize("latent", sampled([False, True], True))
def test_drafts_are_attended_as_if_they_came_one_by_one(latent):
    """Up to three new positions of each sequence, packed rows; pages of a layer that is not the first."""
    rng = np.random.default_rng(0)
    context = SimpleNamespace(model=SimpleNamespace(attention_scale=0.3, qk_nope_head_dim=0), longest=3)
    arrays = tuple(map(parse_array, ("q[B,T,N,H]", "k[Pg,Pl,K,H]")))
    step = SimpleNamespace(details=CachedAttention(packed=True, window=9), more=(), inputs=arrays)
    heads = () if latent else (2,)
    widths = (6, 3) if latent else (6, 5)
    caches = [
        LayerCache(jnp.asarray(rng.normal(size=(LAYERS, 12, 4, *heads, n)), jnp.float32), jnp.int32(1)) for n in widths
    ]
    pages = jnp.asarray(rng.permutation(12).reshape(BATCH, 4), jnp.int32)
    positions = np.array([[6, 7, 8], [0, -1, -1], [13, 14, -1]], np.int32)
    queries = [jnp.asarray(rng.normal(size=(9, 1, 4, n)), jnp.float32) for n in (widths if latent else widths[:1])]
    attend = cached_latent_attention if latent else ops.cached_attention

    def attended(first, own):
        """The rows from ``first`` on that have ``own`` positions of each sequence, [9, 1, 4, Hv]."""
        given = first, (own >= 0).sum(axis=1), own.max(axis=1) + 1
        return np.asarray(attend(context, step, *queries, *caches, *(jnp.asarray(x, jnp.int32) for x in given), pages))

    firsts = np.arange(0, 9, 3)
    together = attended(firsts, positions).reshape(3, 3, 4, -1)
    for t in range(3):
        one = attended(firsts + t, positions[:, t : t + 1])[firsts + t, 0]
        close(together[:, t], one)
        np.testing.assert_array_equal(one[positions[:, t] < 0], 0)
        assert np.abs(one[positions[:, t] >= 0]).min() > 0
