"""Runs flash attention on TPUs by Pallas kernels that fetch and compute only the blocks in a list, under any rule.

A step of a kernel computes one tile of scores: the rows of a major block, which stays until its last step, and the
columns of a minor block. Queries are the major blocks of the forward pass and of dq, keys those of dk and dv, so no
tile of scores is ever transposed. Source of the running softmax and of its derivative: Dao, FlashAttention-2 (2023).
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
from jaxtyping import Array, Int

from meshwright.nn.attention.scores import (
    LOWEST,
    AttentionResult,
    BackwardInputs,
    QkvCotangents,
    row_products,
)
from meshwright.nn.attention.tiles import BlockLists, Tile, TileRule

LANES = 128
_COMPUTED, _MASKED, _FIRST, _LAST = 1, 2, 4, 8
_COLUMN_SHIFT, _ROW_SHIFT = 4, 17
_LOG2_E = float(np.log2(np.e))
_NO_STEP = np.iinfo(np.int32).max
_COLUMN_AXIS = (((1,), (1,)), ((), ()))


def _steps(lists: BlockLists, heads: int) -> tuple[Int[Array, "B|1 heads|1 steps"], Int[Array, ""]]:
    """Returns the steps of each grid head as words (block of rows, block of columns, flags), and the most there are.

    Lists of more heads than the grid's are joined: block ``i`` of the columns of a group's head ``g`` is then
    ``g columns + i``. A row without blocks has a step that computes nothing, and so have the steps after the last.
    """
    batch, num_lists, rows, columns = lists.index.shape
    group = max(1, num_lists // heads)
    head, row, slot = (lax.broadcasted_iota(jnp.int32, lists.index.shape, dim) for dim in (1, 2, 3))
    member = head % group
    computed = slot < lists.total[..., None]
    column = jnp.where(computed, lists.index, 0) + member * columns
    flags = computed * _COMPUTED + (slot < lists.partial[..., None]) * _MASKED
    word = (row << _ROW_SHIFT) + (column << _COLUMN_SHIFT) + flags
    word = jnp.where(computed | ((slot == 0) & (member == 0)), word, _NO_STEP)
    word = jnp.sort(word.reshape(batch, num_lists // group, group * rows * columns))
    exists = word < _NO_STEP
    edge = jnp.diff(word >> _ROW_SHIFT, axis=-1) != 0
    first = jnp.pad(edge, ((0, 0), (0, 0), (1, 0)), constant_values=True)
    last = jnp.pad(edge, ((0, 0), (0, 0), (0, 1)), constant_values=True)
    final = jnp.max(jnp.where(exists, word, 0), axis=-1, keepdims=True) >> _COLUMN_SHIFT << _COLUMN_SHIFT
    word = jnp.where(exists, word + first * _FIRST + last * _LAST, final)
    return word, jnp.max(jnp.sum(exists, axis=-1, dtype=jnp.int32))


def _run(
    rule: TileRule,
    lists: BlockLists,
    blocks: tuple[int, int],
    arrays: tuple[Sequence[Array], Sequence[Array]],
    *,
    row_values: Sequence[Array] = (),
    add: Callable[..., None],
    finish: Callable[..., None],
    outs: Sequence[jax.ShapeDtypeStruct],
    sums: Sequence[tuple[int, float]],
    by_key: bool = False,
    name: str,
    interpret: Any,
) -> Any:
    """Runs ``add`` on every tile of a major block and ``finish`` after its last.

    ``arrays`` are those of queries, [B, N, T, width], and of keys, [B, K, S, width]. ``row_values`` are [B, N, T], and
    the last rows of the tile. ``sums`` are the width and initial value of float32 sums over the tiles of a major block.
    An output is of the major side, [B, heads, rows, width], or has one value per row, [B, heads, 1, rows].
    """
    queries, keys = arrays
    batch, num_heads = queries[0].shape[:2]
    group = num_heads // keys[0].shape[1]
    columns = lists.index.shape[-1]
    heads = num_heads // group if by_key else num_heads
    words, num_steps = _steps(lists, heads)
    per_head = lists.index.shape[1] > 1
    members = group if by_key and not per_head else 1
    shape = blocks[::-1] if by_key else blocks
    values = [_words(x)[:, :, None] for x in (*rule.rows, *row_values, *rule.columns)]
    sides = [0] * (len(rule.rows) + len(row_values)) + [1] * len(rule.columns)
    scalars = [_words(x) for x in rule.heads]

    def lead(x: Any, b: Any, h: Any) -> tuple[Any, Any]:
        return (b if x.shape[0] > 1 else 0), (h if x.shape[1] > 1 else 0)

    def locate(b: Any, h: Any, step: Any, member: Any, words: Any) -> Any:
        """Returns the word of a step, its heads and its blocks, each of queries and of keys."""
        word = words[(*lead(words, b, h), step)]
        row, column = word >> _ROW_SHIFT, (word >> _COLUMN_SHIFT) & ((1 << _ROW_SHIFT - _COLUMN_SHIFT) - 1)
        if not by_key:
            return word, (h, lax.div(h, group)), (row, column)
        if per_head and group > 1:
            member, column = lax.div(column, columns), lax.rem(column, columns)
        return word, (h * group + member, h), (column, row)

    def spec(x: Any, side: int, *, is_value: bool) -> pl.BlockSpec:
        def index(*args: Any) -> Any:
            _, heads, at = locate(*args[:5])
            first = lead(x, args[0], heads[0 if is_value else side])
            return (*first, 0, at[side]) if is_value else (*first, at[side], 0)

        size = blocks[side]
        return pl.BlockSpec((None, None, 1, size) if is_value else (None, None, size, x.shape[-1]), index)

    def kernel(words: Any, *refs: Any) -> None:
        counts = (len(scalars), len(queries) + len(keys), len(values), len(outs), len(sums))
        ends = np.cumsum(counts)
        scalar_refs, array_refs, value_refs, out_refs, sum_refs, stored = (
            refs[start:end] for start, end in zip((0, *ends), (*ends, len(refs)), strict=True)
        )
        stored = list(stored)
        b, h, step, member = (pl.program_id(axis) for axis in range(4))
        word, heads, at = locate(b, h, step, member, words)
        starts = ((word & _FIRST) != 0) & (member == 0)

        @pl.when(starts)
        def _() -> None:
            for ref, (_, value) in zip(sum_refs, sums, strict=True):
                ref[...] = jnp.full(ref.shape, value, jnp.float32)

        wide = [stored.pop(0) if side == by_key else None for side in sides]
        for x, ref, kept in zip(values, value_refs, wide, strict=True):
            if kept is not None:
                # a group's heads may have values of their own for the same keys
                @pl.when(starts | (by_key and group > 1 and x.shape[1] > 1))
                def _(ref: Any = ref, kept: Any = kept) -> None:
                    kept[...] = jnp.broadcast_to(ref[...], (LANES, shape[0])).T

        def tile() -> Tile:
            whole = [
                jnp.broadcast_to(ref[...], shape) if kept is None else _repeated(kept[...], shape[1])
                for ref, kept in zip(value_refs, wide, strict=True)
            ]
            index = [blocks[i] * at[i] + lax.broadcasted_iota(jnp.int32, shape, i ^ by_key) for i in (0, 1)]
            num_rows = len(rule.rows) + len(row_values)
            given = tuple(ref[lead(ref, b, heads[0])] for ref in scalar_refs)
            return Tile(*index, given, tuple(whole[:num_rows]), tuple(whole[num_rows:]))

        def compute(*, masked: bool) -> None:
            here = tile()
            seen = jnp.broadcast_to(rule.mask(here), shape) if masked and rule.mask else None
            add(here, seen, array_refs, sum_refs)

        kind = word & (_COMPUTED | _MASKED)
        pl.when(kind == _COMPUTED if rule.mask else kind != 0)(partial(compute, masked=False))
        if rule.mask:
            pl.when(kind == _COMPUTED | _MASKED)(partial(compute, masked=True))
        pl.when(((word & _LAST) != 0) & (member == members - 1))(lambda: finish(out_refs, sum_refs))

    given = [(x, side, False) for side in (0, 1) for x in arrays[side]]
    given += [(x, side, True) for x, side in zip(values, sides, strict=True)]
    kept = [pltpu.VMEM((shape[0], LANES), x.dtype) for x, side in zip(values, sides, strict=True) if side == by_key]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(scalars),
            grid=(batch, heads, num_steps, members),
            in_specs=[spec(x, side, is_value=is_value) for x, side, is_value in given],
            out_specs=[spec(x, int(by_key), is_value=x.shape[2] == 1) for x in outs],
            scratch_shapes=[*(pltpu.VMEM((shape[0], width), jnp.float32) for width, _ in sums), *kept],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        ),
        out_shape=list(outs),
        name=name,
        interpret=interpret,
    )(words, *scalars, *(x for x, _, _ in given))


def _words(x: Array) -> Array:
    """Converts to 32 bits, which scalar memory and transposes need."""
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def _repeated(x: Array, width: int) -> Array:
    """Widens an array whose lanes are all equal."""
    return jnp.tile(x, (1, pl.cdiv(width, LANES)))[:, :width]


def _times(a: Array, b: Array) -> Array:
    """Returns the products of every row of ``a`` with every row of ``b``."""
    return lax.dot_general(a, b, _COLUMN_AXIS, preferred_element_type=jnp.float32)


def _scores(rule: TileRule, tile: Tile, a: Array, b: Array, scale: float) -> tuple[Array, Callable[[Array], Any]]:
    """Returns the scores times log2(e), as exponents of 2 are an operation of the chip, and the derivative's transpose."""
    if rule.score is None:
        return _times(a, b) * (scale * _LOG2_E), lambda ds: (ds,)
    s, slope = jax.vjp(lambda s: rule.score(s, tile), _times(a, b) * scale)
    return s * _LOG2_E, slope


def _sums(weights: Array, b: Array) -> Array:
    """Returns the sums of the rows of ``b`` by weights."""
    return jnp.dot(weights.astype(b.dtype), b, preferred_element_type=jnp.float32)


def _by_head(x: Array) -> Array:
    return jnp.swapaxes(x, 1, 2)


def forward(
    rule: TileRule,
    lists: BlockLists,
    blocks: tuple[int, int],
    scale: float,
    q: Array,
    k: Array,
    v: Array,
    *,
    interpret: Any = False,
) -> AttentionResult:
    """Returns the result [B, T, N, Hv] and the log-sum-exp [B, T, N] in float32 of q [B, T, N, H] on k [B, S, K, H].

    ``blocks`` are the rows of a block of queries and of keys, multiples of 128 that divide T and S. A row that sees
    nothing has the result 0 and the log-sum-exp minus infinity.
    """
    batch, length, heads, _ = q.shape
    width = v.shape[-1]

    def add(tile: Tile, seen: Array | None, arrays: Any, sums: Any) -> None:
        q, k, v = arrays
        mixed, peak, total = sums
        s, _ = _scores(rule, tile, q[...], k[...], scale)
        if seen is not None:
            s = jnp.where(seen, s, LOWEST)
        before = peak[...]
        after = jnp.maximum(before, jnp.max(s, axis=1, keepdims=True))
        p = jnp.exp2(s - _repeated(after, blocks[1]))
        fade = jnp.exp2(before - after)
        peak[...] = after
        total[...] = total[...] * fade + jnp.sum(p, axis=1, keepdims=True)
        mixed[...] = mixed[...] * _repeated(fade, width) + _sums(p, v[...])

    def finish(outs: Any, sums: Any) -> None:
        mixed, peak, total = (ref[...] for ref in sums)
        # Masked scores weigh 1 until a row sees its first key, and 0 from then on.
        some = peak > LOWEST
        outs[0][...] = (mixed * _repeated(jnp.where(some, 1.0 / total, 0.0), width)).astype(outs[0].dtype)
        outs[1][...] = jnp.where(some, peak / _LOG2_E + jnp.log(total), -jnp.inf).T[:1]

    o, lse = _run(
        rule,
        lists,
        blocks,
        ((_by_head(q),), (_by_head(k), _by_head(v))),
        add=add,
        finish=finish,
        outs=(
            jax.ShapeDtypeStruct((batch, heads, length, width), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32),
        ),
        sums=((width, 0.0), (LANES, LOWEST), (LANES, 0.0)),
        name="flash_attention_forward",
        interpret=interpret,
    )
    return _by_head(o), _by_head(lse[:, :, 0])


def backward(
    rule: TileRule,
    by_query: BlockLists,
    by_key: BlockLists,
    blocks: tuple[int, int],
    scale: float,
    given: BackwardInputs,
    q: Array,
    k: Array,
    v: Array,
    *,
    interpret: Any = False,
) -> QkvCotangents:
    """Returns (dq, dk, dv) for (dout, o, lse) of `forward`, with the blocks listed by block of queries and of keys."""
    dout, o, lse = given
    # weights of a row that sees nothing are 2 ** LOWEST = 0
    values = [_by_head(x) for x in (jnp.where(lse == -jnp.inf, -LOWEST, lse * _LOG2_E), row_products(dout, o))]
    arrays = (_by_head(q), _by_head(dout)), (_by_head(k), _by_head(v))

    def cotangents(lists: BlockLists, side: int, factors: tuple[float, ...]) -> Any:
        """Returns the cotangents of the arrays of one side, as many as ``factors``: what each is multiplied by."""

        def add(tile: Tile, seen: Array | None, refs: Any, sums: Any) -> None:
            pairs = [ref[...] for ref in refs[:2]], [ref[...] for ref in refs[2:]]
            major, minor = pairs[side], pairs[1 - side]
            lse, delta = tile.rows[-2:]
            s, slope = _scores(rule, tile, major[0], minor[0], scale)
            p = jnp.exp2(s - lse)
            if seen is not None:
                p = jnp.where(seen, p, 0.0)
            (ds,) = slope(p * (_times(major[1], minor[1]) - delta))
            for ref, weights, x in zip(sums, (ds, p), minor, strict=False):
                ref[...] += _sums(weights, x)

        def finish(outs: Any, sums: Any) -> None:
            for ref, total, factor in zip(outs, sums, factors, strict=True):
                ref[...] = (total[...] * factor).astype(ref.dtype)

        of = arrays[side][: len(factors)]
        return _run(
            rule,
            lists,
            blocks,
            arrays,
            row_values=values,
            add=add,
            finish=finish,
            outs=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in of],
            sums=[(x.shape[-1], 0.0) for x in of],
            by_key=side == 1,
            name=f"flash_attention_backward_{'keys' if side else 'queries'}",
            interpret=interpret,
        )

    (dq,) = cotangents(by_query, 0, (scale,))
    dk, dv = cotangents(by_key, 1, (scale, 1.0))
    return _by_head(dq), _by_head(dk), _by_head(dv)
