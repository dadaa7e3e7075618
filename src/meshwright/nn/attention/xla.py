"""Attention by XLA on any platform, for every mask and score rule (`blocks`)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshwright.masks.table import BlockTable
from meshwright.nn.attention import blocks, unrolled
from meshwright.nn.attention.call import AttentionCall, padded, prepared
from meshwright.nn.attention.scores import AttentionResult, BackwardInputs, reads, row_products, safe
from meshwright.nn.attention.tiles import Sizes, TileRule

QUERY_ROWS, KEY_ROWS = 512, 512
"""Maximum rows of a block: its scores and their exponentials then fit in a core's cache."""


def takes(call: AttentionCall, q: Array, k: Array, v: Array) -> bool:
    """True: these loops compute every attention."""
    return True


def block_size(length: int, most: int) -> int:
    """Returns ``length`` if at most ``most``, else its largest divisor from a quarter of ``most`` to ``most``, or
    ``most``, so that the last block is padded."""
    if length <= most:
        return length
    divisor = next(size for size in range(most, 0, -1) if length % size == 0)
    return divisor if 4 * divisor >= most else most


def block_sizes(call: AttentionCall, length: int, num_keys: int) -> tuple[int, int]:
    """Returns the queries and keys of a block."""
    if call.platform == "cpu" and max(length, num_keys) <= unrolled.LONGEST and call.is_known:
        return block_size(length, unrolled.tile_rows(length)), block_size(num_keys, unrolled.tile_rows(num_keys))
    return block_size(length, QUERY_ROWS), block_size(num_keys, KEY_ROWS)


def _prepared(call: AttentionCall, q: Array, k: Array) -> tuple[TileRule, BlockTable, Sizes]:
    """Returns the rule, table and sizes of an attention."""
    sizes = block_sizes(call, q.shape[1], k.shape[1])
    rule, table = prepared(call, q, k, sizes)
    index = (padded(jnp.asarray(x), size, -1) for x, size in zip((call.q_idx, call.kv_idx), sizes, strict=True))
    whole = table if call.platform == "cpu" else table.reduced()
    return rule, whole, Sizes(*sizes, *index, call.first_head)


def forward(call: AttentionCall, q: Array, k: Array, v: Array) -> AttentionResult:
    """Returns the result and the log-sum-exp in float32."""
    rule, table, sizes = _prepared(call, q, k)
    rows, keys = padded(q, sizes.q_block, 1), [padded(x, sizes.kv_block, 1) for x in (k, v)]
    in_parts = call.platform == "cpu"
    o, lse = blocks.forward(rule, table.lists(), sizes, call.scale, rows, *keys, in_parts=in_parts)
    return o[:, : q.shape[1]], lse[:, : q.shape[1]]


def backward(call: AttentionCall, given: BackwardInputs, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """Returns (dq, dk, dv) and, where the call learns them, the cotangents of the score rule's arrays."""
    dout, o, lse = given
    in_parts = call.platform == "cpu"

    def cotangents(rule: TileRule, table: BlockTable, sizes: Sizes) -> tuple[Any, ...]:
        rows = [padded(x, sizes.q_block, 1) for x in (q, dout.astype(q.dtype), safe(lse), row_products(dout, o))]
        keys = [padded(x, sizes.kv_block, 1) for x in (k, v)]
        found = blocks.backward(rule, table.lists("keys"), sizes, call.scale, rows, *keys, in_parts=in_parts)
        dq, dk, dv, more = found
        return (dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : v.shape[1]]), more

    if not call.learns or call.score is None:
        return cotangents(*_prepared(call, q, k))[0]
    arrays = tuple(jnp.asarray(x) for x in call.score.arrays)

    def read(arrays: tuple[Array, ...]) -> Any:
        score = call.score._replace(arrays=arrays) if call.score else None
        return reads(_prepared(call.with_score(score, learns=True), q, k)[0])

    _, pull = jax.vjp(read, arrays)
    found, more = cotangents(*_prepared(call, q, k))
    (learned,) = pull(more)
    return (*found, *learned)
