"""Flash attention on TPUs by Pallas kernels that fetch and compute only the blocks in a list, under any rule.

A step of a kernel computes one tile of scores, of a block of queries and a block of keys. The backward pass is one
kernel, which computes scores once: the cotangents of a head's keys and values stay in vector memory while it runs over
the queries. Source of the running softmax and of its derivative: Dao, FlashAttention-2 (2023).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from meshwright.nn.attention.kernels.scores import LOWEST, AttentionResult, BackwardInputs, QkvCotangents, deltas, safe
from meshwright.nn.attention.platform import default_device, default_platform
from meshwright.nn.attention.tiles import BlockLists, DynamicInt, Tile, TileRule

BLOCKS = 512, 512
"""Queries and keys of a block: both passes then fit in vector memory of all TPUs in bf16 and float32, heads to 256."""

LANES = 128
"""Elements in a row of a register: sizes of blocks are multiples of it."""

_KEPT_BYTES, _TILE_BYTES = 2**25, 11 * 2**20
"""Vector memory for outputs that stay on a core, and for the arrays of a step with blocks of `BLOCKS`."""

_COMPUTED, _MASKED, _FIRST, _LAST = 1, 2, 4, 8
# a step is one word, as scalar memory is small: 4 flags, 13 bits for a block of keys, the rest for one of queries
_COLUMN_SHIFT, _ROW_SHIFT = 4, 17
_NO_STEP = np.iinfo(np.int32).max
_LOG2_E = float(np.log2(np.e))

_Refs = Sequence[Any]  # Pallas has no public type of its references


def fits(lists: BlockLists) -> bool:
    """True if the steps, 4 bytes for each entry of the lists, fit in scalar memory: 1 MiB, less 16 KiB for Mosaic."""
    batch, num_heads, num_rows, num_columns = lists.index.shape
    sublanes = min(8, pl.next_power_of_2(num_heads))
    num_places = batch * -(-num_heads // sublanes) * sublanes * -(-num_rows * num_columns // LANES) * LANES
    return 4 * num_places < 2**20 - 2**14


def _resident_bytes() -> int:
    """Returns the vector memory for dk and dv: a core of TPU v4 has 16 MiB, later ones have at least 64 MiB."""
    is_v4 = default_platform() == "tpu" and default_device().device_kind == "TPU v4"
    return _KEPT_BYTES // 8 if is_v4 else _KEPT_BYTES


def _steps(lists: BlockLists, span: range) -> tuple[Int[Array, "B|1 N|1 steps"], Int[Array, ""]]:
    """Returns the steps of each list as words (block of queries, block of keys, flags), and the most steps of a list.

    ``span`` are the blocks of keys to visit. A row without blocks has one step that computes nothing; steps after a
    list's last one compute and fetch nothing.
    """
    row, list_slot = (lax.broadcasted_iota(jnp.int32, lists.index.shape, dim) for dim in (2, 3))
    is_used = (list_slot < lists.total[..., None]) & (lists.index >= span.start) & (lists.index < span.stop)
    kind_flags = is_used * _COMPUTED + (list_slot < lists.partial[..., None]) * _MASKED
    words = (row << _ROW_SHIFT) + (jnp.where(is_used, lists.index, span.start) << _COLUMN_SHIFT) + is_used * kind_flags
    # rows in order, and blocks of keys in order within a row
    is_empty = (list_slot == 0) & ~jnp.any(is_used, axis=-1, keepdims=True)
    words = jnp.sort(jnp.where(is_used | is_empty, words, _NO_STEP).reshape(*words.shape[:2], -1))
    is_step = words < _NO_STEP
    is_edge = jnp.diff(words >> _ROW_SHIFT, axis=-1) != 0
    is_first, is_last = (jnp.pad(is_edge, ((0, 0), (0, 0), side), constant_values=True) for side in ((1, 0), (0, 1)))
    # idle steps name the last blocks again: Pallas fetches a block only where its number changes
    idle_word = jnp.max(jnp.where(is_step, words, 0), axis=-1, keepdims=True) >> _COLUMN_SHIFT << _COLUMN_SHIFT
    words = jnp.where(is_step, words + is_first * _FIRST + is_last * _LAST, idle_word)
    return words, jnp.max(jnp.sum(is_step, axis=-1, dtype=jnp.int32))


def _run(
    rule: TileRule,
    steps: tuple[Array, Array],
    blocks: tuple[int, int],
    arrays: tuple[Sequence[Array], Sequence[Array]],
    *,
    row_values: Sequence[Float[Array, "B N T"]] = (),
    add: Callable[[Tile, Array | None, _Refs, _Refs, _Refs, Array], None],
    finish: Callable[[_Refs, _Refs], None],
    outs: Sequence[jax.ShapeDtypeStruct],
    resident: Sequence[jax.ShapeDtypeStruct] = (),
    sums: Sequence[tuple[int, float]],
    name: str,
    interpret: bool,
) -> list[Array]:
    """Runs ``add(tile, mask, arrays, sums, resident, block of keys)`` on every tile of a block of queries, and
    ``finish(outs, sums)`` after its last tile.

    ``arrays`` are those of queries, [B, N, T, width], and of keys, [B, K, S, width]; ``row_values`` become the last
    ``rows`` of a tile. ``sums`` are widths and initial values of float32 sums over a block of queries. ``outs`` are [B,
    N, T, width] or, for a value per row, [B, N, 1, T]. ``resident`` outputs, [B, K, blocks, block, width], begin as
    zeros and stay on the core for all queries of a group of heads.
    """
    queries, keys = arrays
    batch, kv_heads = keys[0].shape[:2]
    group_size = queries[0].shape[1] // kv_heads
    (step_words, num_steps), rule = steps, rule.widened()
    # [1, T]: the last two dims of a block are multiples of 8 and 128, or whole
    vectors = [x[:, :, None] for x in (*rule.rows, *row_values, *rule.columns)]
    num_by_row, scalars = len(rule.rows) + len(row_values), rule.heads

    def lead(x: Array | jax.ShapeDtypeStruct, b: DynamicInt, h: DynamicInt) -> tuple[DynamicInt, DynamicInt]:
        return (b if x.shape[0] > 1 else 0), (h if x.shape[1] > 1 else 0)

    def locate(
        b: Array, kv_head: Array, group_head: Array, step: Array, step_words: Array
    ) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:
        """Returns the word of a step, its (query, key) heads and its (query, key) blocks."""
        head = kv_head * group_size + group_head
        step_word = step_words[(*lead(step_words, b, head), step)]
        key_block = (step_word >> _COLUMN_SHIFT) & ((1 << _ROW_SHIFT - _COLUMN_SHIFT) - 1)
        return step_word, (head, kv_head), (step_word >> _ROW_SHIFT, key_block)

    def spec(x: Array | jax.ShapeDtypeStruct, side: int, *, is_value: bool) -> pl.BlockSpec:
        def index(*args: Array) -> tuple[DynamicInt, ...]:
            _, heads, block_indices = locate(*args[:5])
            lead_index = lead(x, args[0], heads[0 if is_value else side])
            return (*lead_index, 0, block_indices[side]) if is_value else (*lead_index, block_indices[side], 0)

        block_len = blocks[side]
        return pl.BlockSpec((None, None, 1, block_len) if is_value else (None, None, block_len, x.shape[-1]), index)

    def kernel(step_words: Array, *refs: Any) -> None:
        counts = (len(scalars), len(queries) + len(keys), len(vectors), len(outs), len(resident), len(sums), num_by_row)
        ref_ends = np.cumsum(counts)
        scalar_refs, array_refs, value_refs, out_refs, resident_refs, sum_refs, wide_refs = (
            refs[end - count : end] for end, count in zip(ref_ends, counts, strict=True)
        )
        b, kv_head, group_head, step_index = (pl.program_id(axis) for axis in range(4))
        step_word, heads, block_indices = locate(b, kv_head, group_head, step_index, step_words)

        @pl.when((group_head == 0) & (step_index == 0))
        def _() -> None:
            for ref in resident_refs:
                ref[...] = jnp.zeros(ref.shape, ref.dtype)

        @pl.when((step_word & _FIRST) != 0)
        def _() -> None:
            for ref, (_, init_value) in zip(sum_refs, sums, strict=True):
                ref[...] = jnp.full(ref.shape, init_value, jnp.float32)
            for ref, wide_ref in zip(value_refs[:num_by_row], wide_refs, strict=True):
                # once a row of blocks: values of rows come along the lanes, and scores have rows along the sublanes
                wide_ref[...] = jnp.broadcast_to(ref[...], wide_ref.shape[::-1]).T

        def compute(*, masked: bool) -> None:
            q_idx, kv_idx = (blocks[i] * block_indices[i] + lax.broadcasted_iota(jnp.int32, blocks, i) for i in (0, 1))
            tile = Tile(
                q_idx,
                kv_idx,
                tuple(ref[lead(ref, b, heads[0])] for ref in scalar_refs),
                tuple(_repeated(ref[...], blocks[1]) for ref in wide_refs),
                tuple(jnp.broadcast_to(ref[...], blocks) for ref in value_refs[num_by_row:]),
            )
            is_seen = jnp.broadcast_to(rule.mask(tile), blocks) if masked and rule.mask else None
            add(tile, is_seen, array_refs, sum_refs, resident_refs, block_indices[1])

        kind_flags = step_word & (_COMPUTED | _MASKED)
        pl.when(kind_flags == _COMPUTED if rule.mask else kind_flags != 0)(partial(compute, masked=False))
        if rule.mask:
            pl.when(kind_flags == _COMPUTED | _MASKED)(partial(compute, masked=True))
        pl.when((step_word & _LAST) != 0)(lambda: finish(out_refs, sum_refs))

    operands = [(x, side, False) for side in (0, 1) for x in arrays[side]]
    operands += [(x, int(i >= num_by_row), True) for i, x in enumerate(vectors)]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(scalars),
            grid=(batch, kv_heads, group_size, num_steps),
            in_specs=[spec(x, side, is_value=is_value) for x, side, is_value in operands],
            out_specs=[
                *(spec(x, 0, is_value=x.shape[2] == 1) for x in outs),
                *(pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h, *_: (b, h, 0, 0, 0)) for x in resident),
            ],
            scratch_shapes=[
                *(pltpu.VMEM((blocks[0], width), jnp.float32) for width, _ in sums),
                *(pltpu.VMEM((blocks[0], LANES), x.dtype) for x in vectors[:num_by_row]),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            # heads of a group and their blocks add to the same dk and dv, so that they run in order
            dimension_semantics=("parallel", "parallel", "arbitrary" if resident else "parallel", "arbitrary"),
            vmem_limit_bytes=_resident_bytes() + _TILE_BYTES,
        ),
        out_shape=[*outs, *resident],
        name=name,
        interpret=interpret,
    )(step_words, *scalars, *(x for x, _, _ in operands))


def _repeated(x: Array, width: int) -> Array:
    """Widens an array, whose lanes are all equal, to ``width`` lanes."""
    return jnp.tile(x, (1, pl.cdiv(width, LANES)))[:, :width]


def _product(a: Array, b: Array, dims: tuple[int, int]) -> Array:
    """Returns the product over one dim of each array, in float32."""
    return lax.dot_general(a, b, (((dims[0],), (dims[1],)), ((), ())), preferred_element_type=jnp.float32)


def _scores(
    rule: TileRule, tile: Tile, q: Array, k: Array, scale: float
) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
    """Returns the scores times log2(e), since exponentials are of base 2, and their pullback to scaled products."""
    products, score = _product(q, k, (1, 1)), rule.score
    if score is None:
        return products * (scale * _LOG2_E), lambda ds: (ds,)
    s, pull_back = jax.vjp(lambda s: score(s, tile), products * scale)
    return s * _LOG2_E, pull_back


def _by_head(x: Array) -> Array:
    return jnp.swapaxes(x, 1, 2)


def forward(
    rule: TileRule,
    lists: BlockLists,
    blocks: tuple[int, int],
    scale: float,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    *,
    interpret: bool = False,
) -> AttentionResult:
    """Returns the result [B, T, N, Hv] and the log-sum-exp [B, T, N] in float32.

    ``blocks`` are the queries and the keys of a block, multiples of 128 that divide T and S. A row that sees nothing
    has the result 0 and the log-sum-exp minus infinity.
    """
    batch, query_len, num_heads, _ = q.shape
    v_width = v.shape[-1]

    def add(tile: Tile, is_seen: Array | None, arrays: _Refs, sums: _Refs, resident: _Refs, key_block: Array) -> None:
        q, k, v = arrays
        acc_ref, peak_ref, sum_ref = sums
        s, _ = _scores(rule, tile, q[...], k[...], scale)
        if is_seen is not None:
            s = jnp.where(is_seen, s, LOWEST)
        old_peak = peak_ref[...]
        new_peak = jnp.maximum(old_peak, jnp.max(s, axis=1, keepdims=True))
        p = jnp.exp2(s - _repeated(new_peak, blocks[1]))
        fade = jnp.exp2(old_peak - new_peak)
        peak_ref[...] = new_peak
        sum_ref[...] = sum_ref[...] * fade + jnp.sum(p, axis=1, keepdims=True)
        acc_ref[...] = acc_ref[...] * _repeated(fade, v_width) + _product(p.astype(v.dtype), v[...], (1, 0))

    def finish(outs: _Refs, sums: _Refs) -> None:
        out_sum, peak, exp_sum = (ref[...] for ref in sums)
        # masked scores weigh 1 until a row sees its first key, and 0 from then on
        has_key = peak > LOWEST
        outs[0][...] = (out_sum * _repeated(jnp.where(has_key, 1.0 / exp_sum, 0.0), v_width)).astype(outs[0].dtype)
        outs[1][...] = jnp.where(has_key, peak / _LOG2_E + jnp.log(exp_sum), -jnp.inf).T[:1]

    o, lse = _run(
        rule,
        _steps(lists, range(lists.index.shape[-1])),
        blocks,
        ((_by_head(q),), (_by_head(k), _by_head(v))),
        add=add,
        finish=finish,
        outs=(
            jax.ShapeDtypeStruct((batch, num_heads, query_len, v_width), q.dtype),
            jax.ShapeDtypeStruct((batch, num_heads, 1, query_len), jnp.float32),
        ),
        sums=((v_width, 0.0), (LANES, LOWEST), (LANES, 0.0)),
        name="flash_attention_forward",
        interpret=interpret,
    )
    return _by_head(o), _by_head(lse[:, :, 0])


def backward(
    rule: TileRule,
    lists: tuple[BlockLists, BlockLists],
    blocks: tuple[int, int],
    scale: float,
    given: BackwardInputs,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    *,
    interpret: bool = False,
) -> QkvCotangents:
    """Returns (dq, dk, dv) for (dout, o, lse) of `forward`; only ``lists[0]``, by blocks of queries, is read.

    If dk and dv of one head do not fit on a core, a kernel runs for each span of keys.
    """
    dout, o, lse = given
    row_values = [_by_head(x) for x in (safe(lse) * _LOG2_E, deltas((dout, o, lse)))]
    q_arrays, kv_arrays = [_by_head(x) for x in (q, dout)], [_by_head(x) for x in (k, v)]
    num_blocks = kv_arrays[0].shape[2] // blocks[1]
    # two buffers in float32
    block_bytes = 8 * blocks[1] * sum(pl.cdiv(x.shape[-1], LANES) * LANES for x in kv_arrays)
    span_len = max(1, _resident_bytes() // block_bytes)

    def add(
        span_first: int, tile: Tile, is_seen: Array | None, arrays: _Refs, sums: _Refs, resident: _Refs, k_block: Array
    ) -> None:
        q, dout, k, v = (ref[...] for ref in arrays)
        lse, delta = tile.rows[-2:]
        s, pull_back = _scores(rule, tile, q, k, scale)
        p = jnp.exp2(s - lse)
        if is_seen is not None:
            p = jnp.where(is_seen, p, 0.0)
        (ds,) = pull_back(p * (_product(dout, v, (1, 1)) - delta))
        sums[0][...] += _product(ds.astype(k.dtype), k, (1, 0))
        for ref, weights, x in zip(resident, (ds, p), (q, dout), strict=True):
            ref[k_block - span_first] += _product(weights.astype(x.dtype), x, (0, 0))

    def finish(outs: _Refs, sums: _Refs) -> None:
        outs[0][...] = (sums[0][...] * scale).astype(outs[0].dtype)

    span_results = []
    for first_block in range(0, num_blocks, span_len):
        key_blocks = range(first_block, min(first_block + span_len, num_blocks))
        kv_shapes = [(*x.shape[:2], len(key_blocks), blocks[1], x.shape[3]) for x in kv_arrays]
        span_results.append(
            _run(
                rule,
                _steps(lists[0], key_blocks),
                blocks,
                (q_arrays, kv_arrays),
                row_values=row_values,
                add=partial(add, first_block),
                finish=finish,
                # float32 where several kernels' dq are added
                outs=[jax.ShapeDtypeStruct(q_arrays[0].shape, q.dtype if span_len >= num_blocks else jnp.float32)],
                resident=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in kv_shapes],
                sums=[(q.shape[-1], 0.0)],
                name="flash_attention_backward",
                interpret=interpret,
            )
        )
    dqs, dks, dvs = zip(*span_results, strict=True)
    dk, dv = (jnp.concatenate(x, axis=2).reshape(y.shape) for x, y in zip((dks, dvs), kv_arrays, strict=True))
    return _by_head(sum(dqs).astype(q.dtype)), _by_head((dk * scale).astype(k.dtype)), _by_head(dv.astype(v.dtype))
