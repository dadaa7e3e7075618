"""Attention by XLA on any platform, for every mask and score rule (`blocks`)."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from meshwright.masks.table import BlockLists, BlockTable
from meshwright.nn.attention.call import AttentionCall, padded, prepared
from meshwright.nn.attention.kernels import blocks, unrolled
from meshwright.nn.attention.kernels.scores import AttentionResult, BackwardInputs, reads, row_products, safe
from meshwright.nn.attention.tiles import TileRule, TileSizes

Side = Literal["queries", "keys"]

ROWS, LISTED = 256, 128
"""On a CPU: the rows of a block (of queries, or of keys in the backward pass), and of the blocks that it lists."""

TOGETHER = {1: 1.54, 2: 3.01, 4: 4.0}
"""Listed blocks that a CPU processes together -> how long that takes, in quarters of the time of 4.

Of all pairs of 4,096 positions, 8 heads of 64, both passes took 1,448, 1,417 and 940 ms so (2026-11-27, two cores of an
AMD EPYC): XLA's threads share products from 16 MFLOP on.
"""

WIDE = 512
"""Rows of all blocks on other devices."""


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


def _prepared(call: AttentionCall, q: Array, k: Array, *, over: Side) -> tuple[TileRule, BlockTable, TileSizes]:
    """Returns the rule, table and sizes of a pass whose blocks of ``over`` list the blocks of the other side."""
    lengths = q.shape[1], k.shape[1]
    unrolls = call.platform == "cpu" and max(lengths) <= unrolled.LONGEST and call.is_known
    if unrolls:
        most = tuple(map(unrolled.tile_rows, lengths))
    elif call.platform == "cpu":
        most = (ROWS, LISTED) if over == "queries" else (LISTED, ROWS)
    else:
        most = (WIDE, WIDE)
    size = min if unrolls else block_size
    sizes = size(lengths[0], most[0]), size(lengths[1], most[1])
    rule, table = prepared(call, q, k, sizes)
    q_idx, kv_idx = padded(jnp.asarray(call.q_idx), sizes[0], -1), padded(jnp.asarray(call.kv_idx), sizes[1], -1)
    table = table if call.platform == "cpu" else table.reduced()
    each = _together(table.lists(over)) if call.platform == "cpu" and not unrolls else 1
    return rule, table, TileSizes(*sizes, q_idx, kv_idx, call.first_head, each)


def _together(lists: BlockLists) -> int:
    """Returns how many blocks of a list are processed together: what takes least, or 4 where lists are not known."""
    most = lists.index.shape[-1]
    able = [count for count in TOGETHER if count <= most]
    if not isinstance(lists.total, np.ndarray):
        return max(able)
    return min(able, key=lambda count: float(np.ceil(lists.total / count).sum()) * TOGETHER[count])


def forward(call: AttentionCall, q: Array, k: Array, v: Array) -> AttentionResult:
    """Returns the result and the log-sum-exp in float32."""
    rule, table, sizes = _prepared(call, q, k, over="queries")
    rows, keys = padded(q, sizes.q_block, 1), [padded(x, sizes.kv_block, 1) for x in (k, v)]
    in_parts = call.platform == "cpu"
    o, lse = blocks.forward(rule, table.lists(), sizes, call.scale, rows, *keys, in_parts=in_parts)
    return o[:, : q.shape[1]], lse[:, : q.shape[1]]


def backward(call: AttentionCall, given: BackwardInputs, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """Returns (dq, dk, dv) and, where the call learns them, the cotangents of the score rule's arrays."""
    dout, o, lse = given
    in_parts = call.platform == "cpu"

    def cotangents(rule: TileRule, table: BlockTable, sizes: TileSizes) -> tuple[Any, ...]:
        rows = [padded(x, sizes.q_block, 1) for x in (q, dout.astype(q.dtype), safe(lse), row_products(dout, o))]
        keys = [padded(x, sizes.kv_block, 1) for x in (k, v)]
        found = blocks.backward(rule, table.lists("keys"), sizes, call.scale, rows, *keys, in_parts=in_parts)
        dq, dk, dv, more = found
        return (dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : v.shape[1]]), more

    if not call.learns or call.score is None:
        return cotangents(*_prepared(call, q, k, over="keys"))[0]
    arrays = tuple(jnp.asarray(x) for x in call.score.arrays)

    def read(arrays: tuple[Array, ...]) -> Any:
        score = call.score._replace(arrays=arrays) if call.score else None
        return reads(_prepared(call.with_score(score, learns=True), q, k, over="keys")[0])

    _, pull = jax.vjp(read, arrays)
    found, more = cotangents(*_prepared(call, q, k, over="keys"))
    (learned,) = pull(more)
    return (*found, *learned)
