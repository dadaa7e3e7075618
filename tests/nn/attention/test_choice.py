"""Attention on one device: values by an explicit softmax over the keys seen, gradients by JAX's of a plain form.

Tiles and blocks are made small, so that small arrays have several.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.nn.attention import blocks, staircase
from meshwright.nn.attention.choice import attention, attention_backward
from meshwright.nn.attention.visibility import AttentionCall, Places, order_of
from tests.nn.arrays import close

SCALE = 0.3


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(staircase, "TILE_ROWS", 16)
    monkeypatch.setattr(blocks, "QUERY_ROWS", 32)
    monkeypatch.setattr(blocks, "KEY_ROWS", 24)


def case(seed=0, *, T=40, S=None, N=4, K=2, H=6, Hv=6, first=0, documents=False, sinks=False, shuffled=False, **rule):
    """Arrays of one attention: queries are rows ``first`` to ``first`` + T of the S rows of keys."""
    rng = np.random.default_rng(seed)
    S = S or T
    order = rng.permutation(S) if shuffled else np.arange(S)
    here = slice(first, first + T)
    arrays = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in {"q": (2, T, N, H), "k": (2, S, K, H), "v": (2, S, K, Hv), "dout": (2, T, N, Hv)}.items()
    }
    places = {"key_positions": np.broadcast_to(order, (2, S)).astype(np.int32)}
    if documents:
        places["key_documents"] = np.sort(rng.integers(0, 4, (2, S)), axis=1)[:, order].astype(np.int32)
    places |= {name.removeprefix("key_"): value[:, here] for name, value in places.items()}
    if sinks:
        arrays["sinks"] = rng.normal(size=N).astype(np.float32)
    return arrays, places, {"scale": SCALE, **rule}


def seen(places, window):
    """[B, T, S], by the rule, pair by pair."""
    query, key = places["positions"], places["key_positions"]
    found = np.zeros((*query.shape, key.shape[1]), bool)
    for b, t, s in np.ndindex(found.shape):
        apart = int(query[b, t]) - int(key[b, s])
        found[b, t, s] = apart >= 0 and (window is None or apart < window)
        if "documents" in places:
            found[b, t, s] &= places["documents"][b, t] == places["key_documents"][b, s]
    return found


def formula(arrays, places, *, scale, window=None, softcap=None):
    """(o, lse) in float64: for each query the softmax over the keys it sees and the sink, if there is one."""
    q, k, v = (np.asarray(arrays[n], np.float64) for n in "qkv")
    sight = seen(places, window)
    group = q.shape[2] // k.shape[2]
    o, lse = np.zeros((*q.shape[:3], v.shape[-1])), np.full(q.shape[:3], -np.inf)
    for b, t, n in np.ndindex(q.shape[:3]):
        keys = np.flatnonzero(sight[b, t])
        logits = k[b, keys, n // group] @ q[b, t, n] * scale
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        extra = [arrays["sinks"][n]] if "sinks" in arrays else []
        total = np.exp(np.concatenate([logits, extra])).sum()
        if total > 0:
            lse[b, t, n] = np.log(total)
            o[b, t, n] = np.exp(logits) / total @ v[b, keys, n // group]
    return o, lse


def plain(arrays, places, *, scale, window=None, softcap=None):
    """The same with whole matrices of scores, for JAX to differentiate."""
    q, k, v = (arrays[n] for n in "qkv")
    group = q.shape[2] // k.shape[2]
    wide = [jnp.repeat(x, group, axis=2) for x in (k, v)]
    logits = jnp.einsum("btnh,bsnh->bnts", q, wide[0]) * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = jnp.where(seen(places, window)[:, None], logits, -jnp.inf)
    extra = (
        [jnp.broadcast_to(arrays["sinks"][None, :, None, None], (*logits.shape[:3], 1))] if "sinks" in arrays else []
    )
    weights = jax.nn.softmax(jnp.concatenate([logits, *extra], axis=-1), axis=-1)[..., : logits.shape[-1]]
    return jnp.einsum("bnts,bsnh->btnh", weights, wide[1])


def call_of(arrays, places, rule, *, in_order, platform="cpu"):
    here, there = (Places(*(places.get(key + name) for name in ("positions", "documents"))) for key in ("", "key_"))
    facts = {"query": here, "key": there, "sinks": arrays.get("sinks"), "platform": platform}
    return AttentionCall(**facts, **rule, order=order_of(arrays["q"], arrays["k"], in_order=in_order))


def ours(arrays, places, rule, **options):
    """(o, lse, cotangents by name) of both passes, compiled."""

    @jax.jit
    def both(arrays, places):
        call, qkv = call_of(arrays, places, rule, **options), [arrays[n] for n in "qkv"]
        o, lse = attention(call, *qkv)
        return o, lse, attention_backward(call, (arrays["dout"], o, lse), *qkv)

    o, lse, found = both(arrays, places)
    return o, lse, dict(zip(("q", "k", "v", "sinks"), found, strict=False))


CASES = {
    "heads": {"K": 4},
    "grouped": {"K": 2, "T": 41},
    "one key head": {"K": 1, "N": 3},
    "one tile": {"T": 9},
    "window": {"window": 13},
    "window of one tile": {"window": 16},
    "soft cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "documents": {"documents": True},
    "narrow values": {"Hv": 3},
    "all": {"window": 11, "softcap": 2.0, "sinks": True, "documents": True, "Hv": 8, "T": 50},
}


ALWAYS = {(True, name) for name in CASES if name not in ("heads", "window of one tile")} | {
    (False, "grouped"),
    (False, "all"),
}


def _pairs():
    for in_order in (True, False):
        for name in CASES:
            marks = [] if (in_order, name) in ALWAYS else [pytest.mark.slow]
            yield pytest.param(in_order, name, marks=marks, id=f"{name}, {'in' if in_order else 'any'} order")


@pytest.mark.parametrize(("in_order", "name"), list(_pairs()))
def test_values_and_gradients(in_order, name):
    arrays, places, rule = case(shuffled=not in_order, **CASES[name])
    o, lse, found = ours(arrays, places, rule, in_order=in_order)
    expected_o, expected_lse = formula(arrays, places, **rule)
    assert lse.dtype == jnp.float32
    close(o, expected_o, what="o")
    close(lse, expected_lse, what="lse")

    wanted = {n: a for n, a in arrays.items() if n != "dout"}
    slopes = jax.jit(jax.grad(lambda x: jnp.sum(plain(x, places, **rule) * arrays["dout"])))(wanted)
    for which, slope in slopes.items():
        close(found[which], slope, what=f"d{which}")


@pytest.mark.parametrize("name", ["grouped", "all"])
def test_gradients_are_slopes_of_the_formula(name):
    arrays, places, rule = case(seed=1, **CASES[name])
    _, _, found = ours(arrays, places, rule, in_order=True)
    rng = np.random.default_rng(2)
    for which, cotangent in found.items():
        direction = rng.normal(size=arrays[which].shape)
        ends = []
        for step in (1e-5, -1e-5):
            moved = {**arrays, which: np.asarray(arrays[which], np.float64) + step * direction}
            ends.append(np.sum(formula(moved, places, **rule)[0] * arrays["dout"]))
        assert np.sum(np.asarray(cotangent, np.float64) * direction) == pytest.approx(
            (ends[0] - ends[1]) / 2e-5, rel=1e-4
        )


@pytest.mark.parametrize("rule", [{}, {"window": 30, "documents": True, "sinks": True}], ids=["causal", "all"])
def test_queries_that_are_a_slice_of_the_rows(rule):
    arrays, places, facts = case(T=20, S=100, first=60, **rule)
    o, lse, found = ours(arrays, places, facts, in_order=True)
    expected = formula(arrays, places, **facts)
    close(o, expected[0])
    close(lse, expected[1])
    slopes = jax.jit(jax.grad(lambda k: jnp.sum(plain({**arrays, "k": k}, places, **facts) * arrays["dout"])))(
        arrays["k"]
    )
    close(found["k"], slopes)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_are_zero_and_not_nan(sinks):
    """Keys later than the first queries, in other documents, and whole blocks of both: nothing is inf - inf."""
    arrays, places, rule = case(T=64, sinks=sinks)
    places["key_positions"] = places["key_positions"] + 50
    places["documents"] = np.zeros((2, 64), np.int32)
    places["key_documents"] = (np.arange(64)[None] % 2).repeat(2, 0).astype(np.int32)
    o, lse, found = ours(arrays, places, rule, in_order=False)
    expected_o, expected_lse = formula(arrays, places, **rule)
    blind = ~seen(places, None).any(-1)
    assert blind.any()
    assert not blind.all()
    assert np.all(np.asarray(o)[blind] == 0)
    close(o, expected_o)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    assert all(np.all(np.isfinite(x)) for x in found.values())
    assert np.all(np.asarray(found["q"])[blind] == 0)


def test_scores_far_apart_do_not_overflow():
    arrays, places, rule = case(T=40)
    arrays["q"] = arrays["q"] * 1000
    o, lse, found = ours(arrays, places, rule, in_order=True)
    assert all(np.all(np.isfinite(x)) for x in (o, lse, *found.values()))
    later, _, _ = ours(arrays, places, rule, in_order=False)
    close(later, o)


def test_all_heads_at_once_give_the_same():
    """The form of other platforms."""
    arrays, places, rule = case(**CASES["all"])
    for in_order in (True, False):
        o, _, found = ours(arrays, places, rule, in_order=in_order, platform="other")
        expected_o, _, expected = ours(arrays, places, rule, in_order=in_order)
        close(o, expected_o)
        for which in expected:
            close(found[which], expected[which], what=which)


def test_bfloat16_is_summed_in_float32():
    arrays, places, rule = case(T=40, H=16, Hv=16)
    low = {n: jnp.asarray(a, jnp.bfloat16) for n, a in arrays.items()}
    rounded = {n: np.asarray(a, np.float32) for n, a in low.items()}
    o, lse, found = ours(low, places, rule, in_order=True)
    expected_o, expected_lse = formula(rounded, places, **rule)
    assert o.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    # The scores are exact to float32 (the scale is applied there); weights and results are rounded to 8 bits.
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(o, np.float32), expected_o, atol=2**-7 * np.abs(expected_o).max())
    assert {n: x.dtype for n, x in found.items()} == dict.fromkeys("qkv", jnp.bfloat16)


def test_the_masked_half_is_not_computed():
    """Products in order, counted in the traced program: those of the tiles on and below the diagonal, and no more."""
    arrays, places, rule = case(T=128, N=1, K=1)
    tiles = 128 // staircase.tile_size(128)

    def count(window):
        call = call_of(arrays, places, {**rule, "window": window}, in_order=True, platform="other")

        def run(q, k, v):
            return attention(call, q, k, v)[0]

        jaxpr = jax.make_jaxpr(run)(arrays["q"], arrays["k"], arrays["v"]).jaxpr
        sizes = [e.outvars[0].aval.shape for e in _dots(jaxpr)]
        return sum(shape[-2] * shape[-1] for shape in sizes if shape[-1] != 6)

    assert tiles == 8
    assert count(None) == 128 * 128 * (tiles + 1) / (2 * tiles)
    assert count(16) == 16 * 16 * (2 * tiles - 1)


def _dots(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from _dots(inner.jaxpr)
