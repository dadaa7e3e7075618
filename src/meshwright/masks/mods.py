"""The catalogue of masks and score rules.

A mask is a function of (b, h, q_idx, kv_idx) to Booleans, a score rule of (score, b, h, q_idx, kv_idx) to scores: the
order of PyTorch's FlexAttention. Indices are integer arrays that broadcast against each other, so that one call covers
a pair, a tile or all pairs. The functions here use only operators, `take` and the array API, so they run on NumPy, JAX
and `Ranges`. Arrays that a function captures may be NumPy or JAX arrays.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from meshwright.core.errors import InputError
from meshwright.masks.ranges import AnyArray, Index, namespace, take

Mask = Callable[[Index, Index, Index, Index], Index]
Score = Callable[[Index, Index, Index, Index, Index], Index]
Terms = dict[str, tuple[Any, ...]]
"""Name of a mask in the catalogue -> its parameters."""


def and_masks(*masks: Mask) -> Mask:
    """Returns the mask of pairs that all of ``masks`` allow."""
    return lambda *index: reduce(lambda x, y: x & y, (mask(*index) for mask in masks))


def or_masks(*masks: Mask) -> Mask:
    """Returns the mask of pairs that any of ``masks`` allows."""
    return lambda *index: reduce(lambda x, y: x | y, (mask(*index) for mask in masks))


def noop() -> Mask:
    """Returns the mask of all pairs."""
    return lambda b, h, q_idx, kv_idx: q_idx * 0 == kv_idx * 0


def causal() -> Mask:
    """Returns the mask of keys that are not later than the query."""
    return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx


def window(size: int) -> Mask:
    """Returns the mask of keys fewer than ``size`` positions before the query, and all keys after it."""
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < size


def sliding_window(size: int) -> Mask:
    """Returns the causal mask of the query and the ``size`` - 1 keys before it: ``size`` keys, as Mistral counts them.

    FlexAttention's examples write ``q_idx - kv_idx <= size``, which keeps one key more: sliding_window(size + 1) here.
    """
    return and_masks(causal(), window(size))


def chunk(size: int) -> Mask:
    """Returns the mask of pairs in the same chunk; chunks of ``size`` positions start at multiples of ``size``."""
    return lambda b, h, q_idx, kv_idx: q_idx // size == kv_idx // size


def chunked(size: int) -> Mask:
    """Returns the causal mask within chunks of ``size`` positions. Source: Llama 4 (2025)."""
    return and_masks(causal(), chunk(size))


def local(radius: int) -> Mask:
    """Returns the mask of keys at most ``radius`` positions from the query, on both sides."""
    return lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) <= radius


def prefix_lm(prefix: AnyArray) -> Mask:
    """Returns the causal mask plus all keys of a prefix, the first ``prefix``[b] positions."""
    return or_masks(causal(), lambda b, h, q_idx, kv_idx: kv_idx < take(prefix, b))


def document(documents: AnyArray) -> Mask:
    """Returns the mask of pairs in the same document; ``documents`` [B, T] are document numbers."""
    return lambda b, h, q_idx, kv_idx: take(documents, b, q_idx) == take(documents, b, kv_idx)


def jagged(lengths: AnyArray) -> Mask:
    """Returns the mask of queries and keys that are not padding: both among the first ``lengths``[b] positions."""
    return lambda b, h, q_idx, kv_idx: (q_idx < take(lengths, b)) & (kv_idx < take(lengths, b))


def padded(lengths: AnyArray) -> Mask:
    """Returns the mask of keys that are not padding, the first ``lengths``[b], for all queries."""
    return lambda b, h, q_idx, kv_idx: (q_idx >= 0) & (kv_idx < take(lengths, b))


def global_sliding(is_global: AnyArray, radius: int) -> Mask:
    """Returns Longformer's mask: keys within ``radius``, all keys of global queries, global keys of all queries;
    ``is_global`` is [B, T], not 0 where a token is global. Source: Beltagy et al., Longformer (2020)."""
    global_mask = or_masks(
        lambda b, h, q_idx, kv_idx: take(is_global, b, q_idx) > 0,
        lambda b, h, q_idx, kv_idx: take(is_global, b, kv_idx) > 0,
    )
    return or_masks(local(radius), global_mask)


def tree(enter: AnyArray, leave: AnyArray) -> Mask:
    """Returns the mask of a token and its ancestors; ``enter`` and ``leave`` [B, T] are results of `tree_walk`."""
    return lambda b, h, q_idx, kv_idx: (
        (take(enter, b, kv_idx) <= take(enter, b, q_idx)) & (take(enter, b, q_idx) < take(leave, b, kv_idx))
    )


def graph(distances: AnyArray, reach: int) -> Mask:
    """Returns the mask of nodes at most ``reach`` edges apart; ``distances`` [B, T, T] are in edges."""
    return lambda b, h, q_idx, kv_idx: take(distances, b, q_idx, kv_idx) <= reach


def neighbourhood(length: int, kernel: int) -> Mask:
    """Returns NATTEN's mask in one dim: the ``kernel`` keys around a query, shifted inward at both ends. Positions
    from ``length`` on have no pairs.

    Raises InputError if ``kernel`` is even or exceeds ``length``. Source: Hassani et al., Neighborhood Attention
    Transformer (2022).
    """
    _check_kernel(kernel, length)

    def mask(b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Index:
        is_near = abs(_inside(q_idx, length, kernel) - kv_idx) <= kernel // 2
        return is_near & (q_idx < length) & (kv_idx < length)

    return mask


def neighbourhood_2d(width: int, height: int, kernel: int, tile: int = 0) -> Mask:
    """Returns NATTEN's mask on a canvas of ``width`` x ``height``, for a window of ``kernel`` x ``kernel``.

    Tokens are in row-major order; with ``tile``, in square tiles of that side, one tile after another, so that
    neighbours share blocks. Positions after the canvas have no pairs. Raises InputError if ``kernel`` is even or
    exceeds the canvas, or ``tile`` does not divide it.
    """
    _check_kernel(kernel, min(width, height))
    if tile and (width % tile or height % tile):
        raise InputError(f"tile={tile} does not divide a canvas of {width} x {height}. Use a common divisor, or 0.")

    def places(index: Index) -> tuple[Index, Index]:
        if not tile:
            return index // width, index % width
        tile_index, in_tile = index // (tile * tile), index % (tile * tile)
        row_tiles = width // tile
        return (tile_index // row_tiles) * tile + in_tile // tile, (tile_index % row_tiles) * tile + in_tile % tile

    def mask(b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Index:
        (row, column), (other_row, other_column) = places(q_idx), places(kv_idx)
        is_near = abs(_inside(row, height, kernel) - other_row) <= kernel // 2
        is_near &= abs(_inside(column, width, kernel) - other_column) <= kernel // 2
        return is_near & (q_idx < width * height) & (kv_idx < width * height)

    return mask


def _check_kernel(kernel: int, length: int) -> None:
    if kernel % 2 == 0 or kernel > length:
        raise InputError(f"kernel={kernel} must be odd and at most {length}: equal numbers of keys on both sides.")


def _inside(index: Index, length: int, kernel: int) -> Index:
    """Returns the centre of the ``kernel`` wide window around an index, shifted so that it is within ``length``."""
    xp = namespace(index)
    return xp.minimum(xp.maximum(index, kernel // 2), length - 1 - kernel // 2)


def shared_prefix(documents: AnyArray, starts: AnyArray, prefix_of: AnyArray) -> Mask:
    """Returns the mask of continuations that share a prompt, which is stored once as a separate document.

    Queries see keys causally within their document, and all keys of its prefix document. ``documents`` [B, T] are the
    documents of tokens, ``starts`` [B, M + 1] their first positions, ``prefix_of`` [B, M] their prefix documents.
    """

    def mask(b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Index:
        own_document = take(documents, b, q_idx)
        prefix_document = take(prefix_of, b, own_document)
        prefix_start, prefix_end = take(starts, b, prefix_document), take(starts, b, prefix_document + 1)
        is_own = (kv_idx >= take(starts, b, own_document)) & (kv_idx <= q_idx)
        return is_own | ((own_document != prefix_document) & (kv_idx >= prefix_start) & (kv_idx < prefix_end))

    return mask


def transfusion(spans: AnyArray) -> Mask:
    """Returns the causal mask plus all pairs in the same image; ``spans`` [B, T] are image numbers, 0 for text.

    Source: Zhou et al., Transfusion (2024).
    """
    image_mask = document(spans)
    return or_masks(causal(), and_masks(image_mask, lambda b, h, q_idx, kv_idx: take(spans, b, q_idx) > 0))


def paged(mask: Mask, owner: AnyArray, page_len: int) -> Mask:
    """Returns ``mask`` with keys given as cache slots; ``owner`` [B, pages] maps a page of the pool to the page index
    in sequence b, negative if the page belongs to another sequence or none."""

    def slots(b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Index:
        own_page = take(owner, b, kv_idx // page_len)
        return (own_page >= 0) & mask(b, h, q_idx, own_page * page_len + kv_idx % page_len)

    return slots


def relative(slope: float = 1.0) -> Score:
    """Returns the rule score + ``slope`` * (query position - key position)."""
    return lambda score, b, h, q_idx, kv_idx: score + slope * (q_idx - kv_idx)


def alibi(slopes: AnyArray) -> Score:
    """Returns the rule score - ``slopes``[h] * (query - key position). Source: Press et al., ALiBi (2021)."""
    return lambda score, b, h, q_idx, kv_idx: score + take(slopes, h) * (kv_idx - q_idx)


def softcap(cap: float) -> Score:
    """Returns the rule cap * tanh(score / cap)."""
    return lambda score, b, h, q_idx, kv_idx: cap * namespace(score).tanh(score / cap)


def head_bias(bias: AnyArray) -> Score:
    """Returns the rule score + ``bias``[h]."""
    return lambda score, b, h, q_idx, kv_idx: score + take(bias, h)


def graph_bias(table: AnyArray, distances: AnyArray) -> Score:
    """Returns the rule score + ``table``[h, distance]; ``distances`` [B, T, T] are in edges.

    Source: Ying et al., Do Transformers Really Perform Badly for Graph Representation? (2021), spatial encoding.
    """
    return lambda score, b, h, q_idx, kv_idx: score + take(table, h, take(distances, b, q_idx, kv_idx))


def edge_bias(table: AnyArray, kinds: AnyArray, counts: AnyArray) -> Score:
    """Returns the rule score + mean over path edges of ``table``[h, index in path, kind]: Graphormer's edge encoding.

    ``kinds`` [B, T, T, steps] are the kinds of edges on the shortest path, ``counts`` [B, T, T] its number of edges.
    """

    def score_mod(score: Index, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Index:
        xp, num_edges = namespace(score), take(counts, b, q_idx, kv_idx)
        for edge_index in range(kinds.shape[-1]):
            bias = take(table, h, edge_index, take(kinds, b, q_idx, kv_idx, edge_index)) / xp.maximum(num_edges, 1)
            score = score + xp.where(edge_index < num_edges, bias, 0.0)
        return score

    return score_mod


def distance_bias(table: AnyArray, *, far: int, causal: bool, first: Index = 0) -> Score:
    """Returns the rule score + ``table``[bucket of the distance, h - first], T5's bias.

    The first half of the buckets is for one small distance each, the second half for logarithmic ranges up to ``far``.
    Unless ``causal``, half of all buckets are for keys after the query.

    Source: Raffel et al., Exploring the Limits of Transfer Learning (2019), section 2.1, as published with the weights.
    """

    def score_mod(score: Index, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Index:
        xp, num_buckets = namespace(score), table.shape[0]
        distance = q_idx - kv_idx
        start = 0
        if not causal:
            num_buckets //= 2
            start, distance = xp.where(distance < 0, num_buckets, 0), abs(distance)
        distance = xp.maximum(distance, 0)
        exact = num_buckets // 2
        log_ratio = xp.log(xp.maximum(distance, 1).astype(np.float32) / exact) / math.log(far / exact)
        bucket = xp.minimum(exact + (log_ratio * (num_buckets - exact)).astype(np.int32), num_buckets - 1)
        return score + take(table, start + xp.where(distance < exact, distance, bucket), h - first).astype(score.dtype)

    return score_mod


def then(*scores: Score) -> Score:
    """Returns the rule that applies several rules in order, each to the previous result."""
    return lambda score, *index: reduce(lambda value, rule: rule(value, *index), scores, score)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns ALiBi's slopes 2^(-8 (h + 1) / N) for N heads, [N] in float32."""
    return (2.0 ** (-8.0 * (np.arange(num_heads) + 1) / num_heads)).astype(np.float32)


def tree_walk(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (enter, leave), [B, T] each: a token's preorder number and the first one after its subtree. ``parents``
    [B, T] are earlier positions, -1 for a root. Raises InputError for a parent that is not earlier."""
    parents = np.asarray(parents)
    num_positions = parents.shape[1]
    if (parents >= np.arange(num_positions)).any():
        raise InputError("a parent comes at or after its child. Give parents as earlier positions, or -1 for a root.")
    subtree_sizes = np.ones_like(parents)
    row_ids = np.arange(len(parents))
    for position in range(num_positions - 1, -1, -1):
        has_parent = parents[:, position] >= 0
        subtree_sizes[row_ids[has_parent], parents[has_parent, position]] += subtree_sizes[has_parent, position]
    enter_times, next_child_times = np.zeros_like(parents), np.zeros_like(parents)
    next_root_time = np.zeros(len(parents), parents.dtype)
    for position in range(num_positions):
        has_parent, parent = parents[:, position] >= 0, np.maximum(parents[:, position], 0)
        enter_times[:, position] = np.where(has_parent, next_child_times[row_ids, parent], next_root_time)
        next_root_time = np.where(has_parent, next_root_time, next_root_time + subtree_sizes[:, position])
        next_child_times[row_ids[has_parent], parent[has_parent]] += subtree_sizes[has_parent, position]
        next_child_times[:, position] = enter_times[:, position] + 1
    return enter_times.astype(np.int32), (enter_times + subtree_sizes).astype(np.int32)
