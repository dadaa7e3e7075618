"""Classifies blocks of attention scores by a mask: empty, partial or full."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from meshwright.core.errors import InputError
from meshwright.masks.mods import Mask, noop
from meshwright.masks.ranges import AnyArray, Index, NoRangesError, Ranges, namespace

NOTHING, PARTIAL, FULL = 0, 1, 2
"""Kinds of blocks: the mask allows none, some or all of a block's pairs."""

MOST_BLOCKS = 2**26
"""Maximum number of blocks of a table."""

POINTS_AT_ONCE = 2**22
"""Pairs that one call of a mask evaluates."""

MARKS = {"empty": "·", "partial": "░", "full": "█"}
"""Name of a kind of block -> its mark in text, in order of the kinds' numbers."""


class BlockLists(NamedTuple):
    """For each block of rows (queries, or keys in a backward pass), its nonempty blocks of columns.

    The first ``partial`` entries of ``index`` are partial blocks, whose mask must be evaluated; the entries from there
    to ``total`` are full; both parts ascend, later entries are undefined. ``partial`` and ``total`` are int32
    [B | 1, N | 1, rows], ``index`` is [B | 1, N | 1, rows, columns]. If a list includes empty blocks, ``exists``, of
    the shape of ``index``, is False for them.
    """

    partial: AnyArray
    total: AnyArray
    index: AnyArray
    exists: AnyArray | None = None


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """The kind of every block of ``q_block`` queries and ``kv_block`` keys: ``kinds``, [B | 1, N | 1, queries, keys].

    A dim of 1 means that the mask is the same for all sequences, or heads. ``q_len`` and ``kv_len`` are positions; the
    last block of each may be shorter (a short block of keys is never full). ``mask`` is the mask that was classified.
    """

    kinds: AnyArray
    q_block: int
    kv_block: int
    q_len: int
    kv_len: int
    mask: Mask | None = None

    def sparsity(self) -> float:
        """Returns the share of empty blocks, 0 to 1."""
        return float((np.asarray(self.kinds) == NOTHING).mean())

    def count(self, kind: int) -> int:
        """Returns the number of blocks of a kind, over all sequences and heads of ``kinds``."""
        return int((np.asarray(self.kinds) == kind).sum())

    def lists(self, over: Literal["queries", "keys"] = "queries") -> BlockLists:
        """Returns the nonempty blocks for each block of queries, or of keys."""
        xp = namespace(self.kinds)
        kinds = self.kinds if over == "queries" else xp.matrix_transpose(self.kinds)
        num_partial = xp.sum(kinds == PARTIAL, axis=-1).astype(np.int32)
        num_existing = num_partial + xp.sum(kinds == FULL, axis=-1).astype(np.int32)
        sort_rank = xp.where(kinds == PARTIAL, 0, xp.where(kinds == FULL, 1, 2))
        return BlockLists(num_partial, num_existing, xp.argsort(sort_rank, axis=-1, stable=True).astype(np.int32))

    def exists(self, over: Literal["queries", "keys"] = "queries") -> AnyArray:
        """Returns True for nonempty blocks, with blocks of queries, or of keys, as rows."""
        is_present = self.kinds != NOTHING
        return is_present if over == "queries" else namespace(is_present).matrix_transpose(is_present)

    def reduced(self) -> "BlockTable":
        """Merges sequences and heads into one table: a block is full (empty) if full (empty) in all, else partial."""
        xp = namespace(self.kinds)
        min_kind, max_kind = (reduce(self.kinds, axis=(0, 1), keepdims=True) for reduce in (xp.min, xp.max))
        kinds = xp.where(min_kind == max_kind, min_kind, PARTIAL).astype(self.kinds.dtype)
        return replace(self, kinds=kinds)

    def resized(self, q_block: int, kv_block: int) -> "BlockTable":
        """Returns the table for blocks of another size; kinds stay safe, but may be partial where they need not."""
        kinds = _resized(self.kinds, -2, self.q_block, q_block)
        kinds = _resized(kinds, -1, self.kv_block, kv_block)
        kinds = kinds[..., : -(-self.q_len // q_block), : -(-self.kv_len // kv_block)]
        return replace(self, kinds=kinds, q_block=q_block, kv_block=kv_block)

    def text(self, *, sequence: int = 0, head: int = 0, width: int = 64) -> str:
        """Returns the blocks of one sequence and head as lines of `MARKS`, at most ``width`` wide.

        A block is two marks wide, as letters are twice as high as wide; in a larger table a mark merges several blocks:
        full or empty if all of them are, else partial.
        """
        num_blocks = max(self.kinds.shape[-2:])
        repeat, blocks = (2, 1) if 2 * num_blocks <= width else (1, -(-num_blocks // width))
        kinds = self.of(sequence, head).resized(self.q_block * blocks * 2 // repeat, self.kv_block * blocks).kinds[0, 0]
        marks = np.repeat(np.array([*MARKS.values()])[kinds], repeat, axis=1)
        return "\n".join(map("".join, marks))

    def of(self, sequence: int, head: int) -> "BlockTable":
        """Returns the table of one sequence and head, as NumPy arrays."""
        indices = (min(index, num - 1) for index, num in zip((sequence, head), self.kinds.shape[:2], strict=True))
        return replace(self, kinds=np.asarray(self.kinds)[tuple(slice(x, x + 1) for x in indices)])

    def pairs(self) -> float:
        """Returns the pairs in nonempty blocks, mean over sequences and heads."""
        q_lens, kv_lens = (_lengths(*side) for side in ((self.q_len, self.q_block), (self.kv_len, self.kv_block)))
        return float(((np.asarray(self.kinds) != NOTHING) * q_lens[:, None] * kv_lens).sum((2, 3)).mean())


def _lengths(length: int, block: int) -> np.ndarray:
    """Returns the number of positions in each block; the last block may have fewer."""
    return np.minimum(block, length - np.arange(0, length, block))


def _resized(kinds: AnyArray, axis: int, block: int, new_block: int) -> AnyArray:
    """Returns kinds for another block size along an axis: smaller blocks copy the kind of the block they are in, larger
    ones are full or empty if all their blocks are, else partial."""
    if block == new_block:
        return kinds
    xp = namespace(kinds)
    if block % new_block == 0:
        return xp.repeat(kinds, block // new_block, axis=axis)
    if new_block % block:
        common_block = math.gcd(block, new_block)
        return _resized(_resized(kinds, axis, block, common_block), axis, common_block, new_block)
    ratio, kinds_last = new_block // block, xp.moveaxis(kinds, axis, -1)
    padding = [(0, 0)] * (kinds.ndim - 1) + [(0, -kinds.shape[axis] % ratio)]
    kind_groups = xp.pad(kinds_last, padding, mode="edge").reshape(*kinds_last.shape[:-1], -1, ratio)
    min_kind, max_kind = xp.min(kind_groups, axis=-1), xp.max(kind_groups, axis=-1)
    return xp.moveaxis(xp.where(min_kind == max_kind, min_kind, PARTIAL).astype(kinds.dtype), -1, axis)


def block_table(
    mask: Mask | None,
    *,
    q_len: int = 0,
    kv_len: int = 0,
    batch: int = 1,
    heads: int = 1,
    block: int | tuple[int, int] = 128,
    q_idx: AnyArray | None = None,
    kv_idx: AnyArray | None = None,
    exact: bool = True,
) -> BlockTable:
    """Returns the kinds of a mask's blocks; ``block`` is the positions of a block, or (queries, keys).

    ``q_idx`` [T] and ``kv_idx`` [S] are the positions of rows and columns, by default 0, 1, 2 up to ``q_len`` and
    ``kv_len``; the table uses their array API. With ``exact``, blocks that are partial by `Ranges` are evaluated pair
    by pair, so that every kind is exact; traced JAX arrays need ``exact=False``.

    A ``mask`` of None allows all pairs. A mask that depends on b or h needs ``batch`` and ``heads``.

    Raises:
        NoRangesError: the mask uses operations without ranges and ``exact`` is False.
        InputError: a size below 1, too many blocks, or a mask that is not Boolean.
    """
    block_lens = (block, block) if isinstance(block, int) else tuple(block)
    if len(block_lens) != 2:
        raise InputError(f"block={block!r}: give the positions of a block, or two numbers, of queries and of keys.")
    q_block, kv_block = block_lens
    q_len, kv_len = (n if x is None else x.shape[0] for n, x in ((q_len, q_idx), (kv_len, kv_idx)))
    table_sizes = {"q_block": q_block, "kv_block": kv_block, "q_len": q_len, "kv_len": kv_len}
    for name, size in {**table_sizes, "batch": batch, "heads": heads}.items():
        if size < 1:
            raise InputError(f"{name}={size} must be at least 1.")
    num_blocks = batch * heads * -(-q_len // q_block) * -(-kv_len // kv_block)
    if num_blocks > MOST_BLOCKS:
        size_words = f"{num_blocks:,} blocks of {q_block} x {kv_block}"
        raise InputError(f"{size_words} are more than the {MOST_BLOCKS:,} of a table. Use larger blocks.")
    q_idx = np.arange(q_len, dtype=np.int32) if q_idx is None else q_idx
    kv_idx = np.arange(kv_len, dtype=np.int32) if kv_idx is None else kv_idx
    mask = noop() if mask is None else mask
    q_indices, kv_indices = in_blocks(q_idx, q_block), in_blocks(kv_idx, kv_block)
    xp = namespace(q_indices)
    b, h = xp.arange(batch).reshape(-1, 1, 1, 1), xp.arange(heads).reshape(1, -1, 1, 1)
    try:
        block_kinds = _by_ranges(mask, b, h, q_indices, kv_indices)
    except Exception as error:
        if not exact:
            reason = "blocks are not known while tracing: the mask indexes arrays, or computes what has no ranges."
            raise NoRangesError(f"{reason} Make the table outside of jit.") from error
        block_kinds = None
    if exact:
        block_kinds = _by_points(mask, b, h, q_indices, kv_indices, block_kinds)
    if table_sizes["kv_len"] % kv_block:
        is_last = (xp.arange(kv_indices.shape[0]) == kv_indices.shape[0] - 1)[None, None, None]
        block_kinds = xp.where(is_last & (block_kinds == FULL), PARTIAL, block_kinds)
    return BlockTable(kinds=block_kinds.astype(np.int8), **table_sizes, mask=mask)


def in_blocks(index: AnyArray, block: int) -> AnyArray:
    """Returns indices [T] as [blocks, block], padding the last block with the last index."""
    xp = namespace(index)
    num_missing = -index.shape[0] % block
    return xp.concat([index, xp.broadcast_to(index[-1:], (num_missing,))]).reshape(-1, block)


def _by_ranges(mask: Mask, b: AnyArray, h: AnyArray, rows: AnyArray, columns: AnyArray) -> AnyArray:
    xp = namespace(rows)
    seen_ranges = mask(b, h, Ranges.of(rows[None, None, :, None]), Ranges.of(columns[None, None, None]))
    if not isinstance(seen_ranges, Ranges):
        raise NoRangesError("the mask did not return ranges.")
    _booleans(seen_ranges)
    block_kinds = xp.where(seen_ranges.low, FULL, xp.where(seen_ranges.high, PARTIAL, NOTHING))
    return xp.broadcast_to(block_kinds, (*block_kinds.shape[:2], len(rows), len(columns)))


def _by_points(mask: Mask, b: AnyArray, h: AnyArray, rows: AnyArray, columns: AnyArray, kinds: AnyArray) -> AnyArray:
    """Returns exact kinds: evaluates the partial blocks of ``kinds`` (None: all blocks) pair by pair."""
    xp = namespace(rows)
    if kinds is None:
        # the shape of one pair shows whether the mask depends on sequence or head
        mask_shape = _booleans(mask(b, h, rows[None, None, :1, :1], columns[None, None, :1, :1])).shape
        kinds = np.full((*mask_shape[:2], len(rows), len(columns)), PARTIAL)
    kinds = np.array(kinds)
    for indices, is_seen in _partial_pairs(mask, rows, columns, kinds):
        is_all_seen, is_any_seen = is_seen.all((1, 2)), is_seen.any((1, 2))
        kinds[tuple(indices.T)] = np.where(is_all_seen, FULL, np.where(is_any_seen, PARTIAL, NOTHING))
    return xp.asarray(kinds)


def _booleans(is_seen: Index) -> AnyArray:
    """Returns a mask's result as an array or range; raises InputError unless it is Boolean."""
    is_seen = np.full((1,) * 4, is_seen) if isinstance(is_seen, bool | np.bool_) else is_seen
    dtype = getattr(is_seen, "dtype", type(is_seen).__name__)
    if dtype != np.dtype(bool):
        raise InputError(f"the mask returns {dtype}. Return Booleans, one for each pair of indices.")
    return is_seen


def _partial_pairs(
    mask: Mask, rows: AnyArray, columns: AnyArray, kinds: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (indices in ``kinds``, mask of their pairs) for batches of partial blocks."""
    xp, partial_indices = namespace(rows), np.argwhere(kinds == PARTIAL)
    chunk_len = max(1, POINTS_AT_ONCE // (rows.shape[1] * columns.shape[1]))
    for indices in (partial_indices[start : start + chunk_len] for start in range(0, len(partial_indices), chunk_len)):
        sequence, head, q_row, kv_row = (xp.asarray(index).reshape(-1, 1, 1) for index in indices.T)
        is_seen = mask(sequence, head, rows[q_row[:, 0, 0]][:, :, None], columns[kv_row[:, 0, 0]][:, None])
        yield indices, np.asarray(xp.broadcast_to(is_seen, (len(indices), rows.shape[1], columns.shape[1])))


class CountedTable(NamedTuple):
    """An exact table, the pairs that its mask allows (mean over sequences and heads), the seconds to make the table,
    and the mask of the first sequence and head, [T, S], if both are at most 512, else None."""

    table: BlockTable
    visible_pairs: float
    table_s: float
    points: np.ndarray | None


def counted_table(mask: Mask, *, q_len: int, kv_len: int, **sizes: Any) -> CountedTable:
    """Returns a mask's exact table and its exact number of pairs; ``sizes`` are further arguments of `block_table`."""
    start_s = time.perf_counter()
    table = block_table(mask, q_len=q_len, kv_len=kv_len, **sizes)
    table_s = time.perf_counter() - start_s
    q_indices, kv_indices = np.arange(q_len, dtype=np.int32), np.arange(kv_len, dtype=np.int32)
    lengths = _lengths(q_len, table.q_block), _lengths(kv_len, table.kv_block)
    num_visible = float(((table.kinds == FULL) * lengths[0][:, None] * lengths[1]).sum())
    index_blocks = in_blocks(q_indices, table.q_block), in_blocks(kv_indices, table.kv_block)
    for ids, pairs in _partial_pairs(mask, *index_blocks, table.kinds):
        is_real = [np.arange(pairs.shape[dim + 1]) < lens[ids[:, dim + 2], None] for dim, lens in enumerate(lengths)]
        num_visible += float((pairs & is_real[0][:, :, None] & is_real[1][:, None]).sum())
    points, zero = None, np.zeros((1, 1), np.int32)
    if max(q_len, kv_len) <= 512:
        points = np.broadcast_to(np.asarray(mask(zero, zero, q_indices[:, None], kv_indices[None])), (q_len, kv_len))
    return CountedTable(table, num_visible / (table.kinds.shape[0] * table.kinds.shape[1]), table_s, points)
