"""Masks and score rules for tests, and attention written densely in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.masks import mods
from meshwright.masks.names import example_data, mask_named, score_named
from meshwright.nn.attention.tiles import Mod

BATCH, HEADS = 2, 4


def equations(jaxpr):
    """All equations of a traced program in order, those of inner programs after the one that has them."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def mask_of(text, length, *, seed=0):
    """A mask of the catalogue with example arrays."""
    rule = mask_named(text)
    data = example_data(rule, length=length, batch=BATCH, heads=HEADS, seed=seed)
    return Mod(rule.make, data, rule.terms)


def score_of(text, length, *, seed=0):
    """A score rule of the catalogue with example arrays."""
    rule = score_named(text)
    return Mod(rule.make, example_data(rule, length=length, batch=BATCH, heads=HEADS, seed=seed), rule.terms)


def distance_bias(heads=HEADS):
    """T5's rule."""
    table = np.random.default_rng(3).normal(size=(8, heads)).astype(np.float32)
    return Mod(lambda table: mods.distance_bias(table, far=20, causal=False), (table,))


def own_score(length):
    """A score that reads learnt arrays by sequence, head, query and key, and is not linear."""
    draw = np.random.default_rng(4).normal

    def make(by_query, by_key, by_head):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * by_query[b, q_idx] + by_key[h, kv_idx] * jnp.tanh(score * by_head[h])

        return score_mod

    shapes = ((BATCH, length), (HEADS, length), (HEADS,))
    return Mod(make, tuple(draw(size=shape).astype(np.float32) for shape in shapes))


MASKS = {
    "all": None,
    "causal": "causal",
    "window": "sliding_window(13)",
    "chunks": "chunked(13)",
    "documents": "causal & document",
    "windows of documents": "local(9) & document",
    "prefix": "prefix_lm",
    "jagged": "jagged",
    "padded": "padded",
    "global": "global_sliding(5)",
    "tree": "tree",
    "graph": "graph(3)",
    "neighbourhood": "neighbourhood({length},7)",
    "canvas": "neighbourhood_2d(10,{tenth},3)",
    "shared prefix": "shared_prefix",
    "transfusion": "transfusion",
    "pages": "paged(4)",
    "two joined": "local(3) | causal & document",
}
SCORES = {
    "softcap": "softcap(2)",
    "alibi": "alibi",
    "relative": "relative(0.1)",
    "graph": "graph_bias",
    "edges": "edge_bias",
    "several": "alibi + softcap(3)",
}


def rule_of(mask, score, length):
    """The two functions of a case by its names."""
    text = MASKS[mask]
    made = None if text is None else mask_of(text.format(length=length, tenth=-(-length // 10)), length)
    own = {"distance": distance_bias, "own": partial(own_score, length)}
    return made, score and (own[score]() if score in own else score_of(SCORES[score], length))


def arrays(seed=0, *, T, S=None, N=HEADS, K=2, H=8, Hv=None, batch=BATCH):
    """q, k, v and the cotangent of the result, float32."""
    draw = np.random.default_rng(seed).normal
    shapes = {"q": (batch, T, N, H), "k": (batch, S or T, K, H), "v": (batch, S or T, K, Hv or H)}
    shapes["dout"] = (batch, T, N, Hv or H)
    return {name: draw(size=shape).astype(np.float32) for name, shape in shapes.items()}


def dense(xp, scale, mask, score, sinks, q, k, v, *, q_idx=None, kv_idx=None):
    """(o, lse) by a softmax over all scores, in the type of q."""
    batch, length, heads, _ = q.shape
    q_idx = np.arange(length) if q_idx is None else q_idx
    kv_idx = np.arange(k.shape[1]) if kv_idx is None else kv_idx
    places = (np.arange(batch), np.arange(heads), q_idx, kv_idx)
    at = [xp.asarray(x).reshape([-1 if dim == n else 1 for dim in range(4)]) for n, x in enumerate(places)]
    k, v = (xp.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    scores = xp.einsum("btnh,bsnh->bnts", q, k) * scale
    if score is not None:
        scores = score(scores, *at)
    scores = xp.broadcast_to(scores, (batch, heads, length, k.shape[1]))
    if mask is not None:
        scores = xp.where(mask(*at), scores, -xp.inf)
    extra = xp.full((1, heads, 1, 1), -xp.inf) if sinks is None else sinks.reshape(1, -1, 1, 1)
    peak = xp.maximum(scores.max(-1, keepdims=True), extra)
    peak = xp.where(peak > -xp.inf, peak, 0.0)
    peak = peak if xp is np else jax.lax.stop_gradient(peak)
    weights = xp.exp(scores - peak)
    total = weights.sum(-1, keepdims=True) + xp.exp(extra - peak)
    some = total > 0
    o = xp.einsum("bnts,bsnh->btnh", weights / xp.where(some, total, 1.0), v)
    lse = xp.where(some, peak + xp.log(xp.where(some, total, 1.0)), -xp.inf)
    return o, xp.moveaxis(lse[..., 0], 1, 2)


def expected(scale, mask, score, sinks, given):
    """(o, lse, gradients of q, k, v, sinks and the arrays of the score rule) in float64."""
    wide = {name: np.asarray(value, np.float64) for name, value in given.items()}
    qkv = [wide[name] for name in "qkv"]
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        floats = [np.issubdtype(np.asarray(x).dtype, np.floating) for x in (score.arrays if score else ())]
        held = [
            jnp.asarray(x, jnp.float64)
            for x, is_float in zip(score.arrays if score else (), floats, strict=True)
            if is_float
        ]

        def loss(qkv, sinks, held):
            left = iter(held)
            own = [
                next(left) if f else jnp.asarray(x) for x, f in zip(score.arrays if score else (), floats, strict=True)
            ]
            o, lse = dense(jnp, scale, mask, score and score._replace(arrays=tuple(own)), sinks, *qkv)
            return jnp.sum(o * wide["dout"]), (o, lse)

        wide_sinks = None if sinks is None else jnp.asarray(sinks, jnp.float64)
        args = [jnp.asarray(x) for x in qkv], wide_sinks, held
        grads, (o, lse) = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*args)
        found = [*grads[0], *([] if sinks is None else [grads[1]])]
        left = iter(grads[2])
        learned = [next(left) if f else None for f in floats]
        return [None if x is None else np.asarray(x) for x in (o, lse, *found, *learned)]


def close(value, wanted, what=""):
    """Equal within 1e-5 of the largest entry."""
    value, wanted = np.asarray(value, np.float64), np.asarray(wanted)
    finite = np.isfinite(wanted)
    assert value.shape == wanted.shape, what
    np.testing.assert_array_equal(np.isfinite(value), finite, err_msg=what)
    scale = np.abs(wanted[finite]).max(initial=0.0)
    np.testing.assert_allclose(value[finite], wanted[finite], rtol=0, atol=1e-5 * max(scale, 1e-2), err_msg=what)
