"""Attention of one device's queries on the keys that it has, forward and backward: which way it is computed.

Queries and keys are [B, T, N, H] and [B, S, K, H], values [B, S, K, Hv]; query heads n = k G .. k G + G - 1 read key
head k. A query sees a key that is not later, in the same document, and less than the window back. The backward pass
takes the result and the log-sum-exp of the forward pass, and makes the weights again from them.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.nn.attention import blocks as blockwise
from meshwright.nn.attention import staircase
from meshwright.nn.attention.cudnn import cudnn_backward, cudnn_forward
from meshwright.nn.attention.platform import Case, Way, attention_way, default_platform
from meshwright.nn.attention.rows import Core, by_heads
from meshwright.nn.attention.scores import row_products, safe, sink_cotangents
from meshwright.nn.attention.splash import splash_backward, splash_forward
from meshwright.nn.attention.visibility import NOWHERE, Order, Places, Rule


class Sight(NamedTuple):
    """Where queries and keys are, [B, T] and [B, S], and how it is known what the one see of the other."""

    query: Places
    key: Places
    order: Order


def all_seen(q: Float[Array, "B T N H"], k: Float[Array, "B S K H"]) -> Sight:
    """Every query sees every key; where they are does not matter."""
    query, key = (jnp.zeros(x.shape[:2], jnp.int32) for x in (q, k))
    return Sight(Places(query), Places(key), "all")


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    *,
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    documents: Int[Array, "B T"] | None = None,
    key_documents: Int[Array, "B S"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    in_order: bool,
    platform: str = "",
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """The mixed values, and the log-sum-exp of each query's scores in float32, the sink's logit included.

    A query that sees nothing gets zeros and minus infinity. ``in_order`` promises that positions rise by one along
    the rows (within a document), so that what cannot be seen is left out while tracing where T = S. ``platform`` is
    "cpu", "cuda" or "tpu" where it is not the default backend's.
    """
    rule = Rule(scale=scale, window=window, softcap=softcap)
    sight = _sight(q, k, positions, key_positions, documents, key_documents, in_order)
    return look(q, k, v, sinks, rule=rule, sight=sight, platform=platform)


def attention_backward(
    dout: Float[Array, "B T N Hv"],
    o: Float[Array, "B T N Hv"],
    lse: Float[Array, "B T N"],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    *,
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    documents: Int[Array, "B T"] | None = None,
    key_documents: Int[Array, "B S"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    in_order: bool,
    platform: str = "",
) -> tuple[Array, ...]:
    """Cotangents (dq, dk, dv) and, where there are sinks, dsinks, given that of the result and `attention`'s results.

    dS = P (dout v^T - delta), P = exp(S - lse), delta = the row sums of dout o.
    """
    rule = Rule(scale=scale, window=window, softcap=softcap)
    sight = _sight(q, k, positions, key_positions, documents, key_documents, in_order)
    found = look_back(dout, o, lse, q, k, v, rule=rule, sight=sight, platform=platform, sinks=sinks)
    return found if sinks is None else (*found, sink_cotangents(sinks, lse, row_products(dout, o)))


def _sight(
    q: Array,
    k: Array,
    positions: Array,
    key_positions: Array,
    documents: Array | None,
    key_documents: Array | None,
    in_order: bool,
) -> Sight:
    order: Order = "rows" if in_order and q.shape[1] == k.shape[1] else "places"
    return Sight(Places(positions, documents), Places(key_positions, key_documents), order)


def look(
    q: Array, k: Array, v: Array, sinks: Array | None, *, rule: Rule, sight: Sight, platform: str = ""
) -> tuple[Array, Array]:
    """`attention` with the rule and the sight put together; the sight may be "all"."""
    way = _way(q, k, v, sinks, rule, sight, platform)
    if way == "cudnn":
        return cudnn_forward(q, k, v, rule=rule, causal=sight.order == "rows")
    if way == "splash":
        return splash_forward(q, k, v, sight.query.document, sinks, rule=rule)
    rows = () if sinks is None else (jnp.broadcast_to(sinks.astype(jnp.float32)[None, None], q.shape[:3]),)
    (o, lse), _ = _run("forward", way, (q, *rows), (k, v), rule, sight, platform)
    return o, lse


def look_back(
    dout: Array,
    o: Array,
    lse: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    rule: Rule,
    sight: Sight,
    platform: str = "",
    sinks: Array | None = None,
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of `look` on these keys, where ``o`` and ``lse`` may come from more keys than these."""
    way = _way(q, k, v, sinks, rule, sight, platform)
    if way == "cudnn":
        return cudnn_backward(dout, o, lse, q, k, v, rule=rule, causal=sight.order == "rows")
    if way == "splash":
        return splash_backward(dout, o, lse, q, k, v, sight.query.document, rule=rule)
    rows = (q, dout.astype(q.dtype), safe(lse), row_products(dout, o))
    (dq,), (dk, dv) = _run("backward", way, rows, (k, v), rule, sight, platform)
    return dq, dk, dv


def _way(q: Array, k: Array, v: Array, sinks: Array | None, rule: Rule, sight: Sight, platform: str) -> Way:
    return attention_way(
        platform or default_platform(),
        Case(
            dtype=jnp.dtype(q.dtype).name,
            num_queries=q.shape[1],
            num_keys=k.shape[1],
            width=q.shape[-1],
            value_width=v.shape[-1],
            order=sight.order,
            window=rule.window is not None,
            softcap=rule.softcap is not None,
            sinks=sinks is not None,
            documents=sight.query.document is not None,
        ),
    )


def _run(
    phase: str, way: str, queries: tuple[Array, ...], keys: tuple[Array, ...], rule: Rule, sight: Sight, platform: str
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    one_by_one = (platform or default_platform()) == "cpu"
    query, key, order = sight
    if way == "staircase":
        return by_heads(partial(getattr(staircase, phase), rule), queries, keys, query, key, one_by_one=one_by_one)
    length, heads = queries[0].shape[1:3]
    num_keys, kv_heads = keys[0].shape[1:3]
    group = heads // kv_heads
    here = blockwise.block_positions(length, max(16, blockwise.QUERY_ROWS // group), order)
    there = blockwise.block_positions(num_keys, blockwise.KEY_ROWS, order)
    core: Core = partial(getattr(blockwise, phase), rule, order, blockwise.Blocks(here * group, there))
    by_query, by_key = by_heads(
        core,
        [blockwise.filled(x, here) for x in queries],
        [blockwise.filled(x, there) for x in keys],
        blockwise.filled_places(query, here, -1),
        blockwise.filled_places(key, there, NOWHERE),
        one_by_one=one_by_one,
    )
    return tuple(x[:, :length] for x in by_query), tuple(x[:, :num_keys] for x in by_key)
