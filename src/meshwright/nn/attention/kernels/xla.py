"""Attention by XLA on any platform, for every mask and score rule (`blocks`)."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from meshwright.masks.kernels import tile_rows
from meshwright.masks.table import BlockLists
from meshwright.nn.attention.call import AttentionCall, padded, prepared
from meshwright.nn.attention.kernels import blocks, unrolled
from meshwright.nn.attention.kernels.scores import AttentionResult, BackwardInputs, deltas, reads, safe
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


def block_size(length: int, most: int) -> int:
    """Returns ``length`` if at most ``most``, else its largest divisor from a quarter of ``most`` to ``most``, or
    ``most``, so that the last block is padded."""
    if length <= most:
        return length
    divisor = next(size for size in range(most, 0, -1) if length % size == 0)
    return divisor if 4 * divisor >= most else most


def _prepared(call: AttentionCall, q: Array, k: Array, *, over: Side) -> tuple[TileRule, BlockLists, TileSizes]:
    """Returns the rule, the lists of blocks and the sizes of a pass; blocks of ``over`` list those of the other."""
    lengths = q.shape[1], k.shape[1]
    bounds = None
    if call.platform == "cpu" and max(lengths) <= unrolled.LONGEST:
        sizes = min(lengths[0], int(tile_rows(lengths[0]))), min(lengths[1], int(tile_rows(lengths[1])))
        bounds = call.bounds(q.shape[0], q.shape[2], *sizes)
        if bounds is not None and max(lengths) > unrolled.DENSE and bounds.sparsity() < unrolled.SPARSITY:
            bounds = None
    if bounds is None:
        max_sizes = (WIDE, WIDE)
        if call.platform == "cpu":
            max_sizes = (ROWS, LISTED) if over == "queries" else (LISTED, ROWS)
        sizes = block_size(lengths[0], max_sizes[0]), block_size(lengths[1], max_sizes[1])
    rule, table = prepared(call, q, k, sizes)
    q_idx, kv_idx = padded(jnp.asarray(call.q_idx), sizes[0], -1), padded(jnp.asarray(call.kv_idx), sizes[1], -1)
    table = table if call.platform == "cpu" else table.reduced()
    lists = table.lists(over) if bounds is None else bounds.reduced().lists(over)
    is_varying = table.kinds.shape[:2] != (1, 1) or not isinstance(table.kinds, np.ndarray)
    if bounds is not None and is_varying and max(lengths) > unrolled.WHOLE:
        lists = lists._replace(exists=table.exists(over))
    num_together = 1
    if call.platform == "cpu":
        num_together = _together(lists) if bounds is None else 0
    return rule, lists, TileSizes(*sizes, q_idx, kv_idx, call.first_head, num_together)


def _together(lists: BlockLists) -> int:
    """Returns how many blocks of a list are processed together: what takes least, or 4 where lists are not known."""
    max_blocks = lists.index.shape[-1]
    counts = [count for count in TOGETHER if count <= max_blocks]
    if not isinstance(lists.total, np.ndarray):
        return max(counts)
    return min(counts, key=lambda count: float(np.ceil(lists.total / count).sum()) * TOGETHER[count])


def forward(call: AttentionCall, q: Array, k: Array, v: Array) -> AttentionResult:
    """Returns the result and the log-sum-exp in float32."""
    rule, lists, sizes = _prepared(call, q, k, over="queries")
    rows, keys = padded(q, sizes.q_block, 1), [padded(x, sizes.kv_block, 1) for x in (k, v)]
    in_parts = call.platform == "cpu"
    o, lse = blocks.forward(rule, lists, sizes, call.scale, rows, *keys, in_parts=in_parts)
    return o[:, : q.shape[1]], lse[:, : q.shape[1]]


def backward(call: AttentionCall, given: BackwardInputs, q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """Returns (dq, dk, dv) and, where the call learns them, the cotangents of the score rule's arrays."""
    dout, _, lse = given[:3]
    in_parts = call.platform == "cpu"

    def cotangents(rule: TileRule, lists: BlockLists, sizes: TileSizes) -> tuple[Any, ...]:
        rows = [padded(x, sizes.q_block, 1) for x in (q, dout.astype(q.dtype), safe(lse), deltas(given))]
        keys = [padded(x, sizes.kv_block, 1) for x in (k, v)]
        results = blocks.backward(rule, lists, sizes, call.scale, rows, *keys, in_parts=in_parts)
        dq, dk, dv, drule = results
        return (dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : v.shape[1]]), drule

    if not call.learns or call.score is None:
        return cotangents(*_prepared(call, q, k, over="keys"))[0]
    arrays = tuple(jnp.asarray(x) for x in call.score.arrays)

    def read(arrays: tuple[Array, ...]) -> Any:
        score = call.score._replace(arrays=arrays) if call.score else None
        return reads(_prepared(call.with_score(score, learns=True), q, k, over="keys")[0])

    # the kernel has cotangents of what was looked up before it, and JAX takes them on to these arrays
    _, pull = jax.vjp(read, arrays)
    dqkv, drule = cotangents(*_prepared(call, q, k, over="keys"))
    (learned,) = pull(drule)
    return (*dqkv, *learned)
