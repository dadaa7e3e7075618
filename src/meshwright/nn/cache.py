"""Cache of keys and values: writes in place, reads, and attention on it.

A layer of S slots holds the last S positions of each sequence, position p in slot p modulo S. No array of filled slots
is needed: for a query at position p, slot s holds position p - (p - s) mod S, which is negative where nothing has been
written. The cache is a ring where S is a window, and contiguous where S is the longest sequence. In a paged cache the
slots of a sequence are the pages, of Pl slots each, that its row of the page table lists.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout
from jaxtyping import Array, Bool, Float, Int

from meshwright.algebra.sizes import LANES, SUBLANES
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.notation import Axes
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.collectives import first_index, own_entries
from meshwright.nn.contract import FLOATS

Pages = Int[Array, "B Bp"]
"""The page table: the pages of each sequence, in the order of its positions."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer of an array of all layers of a kind; a write changes entries of this layer in that array, in place.

    Without ``layer`` the array, of pages, is the layer's own: with a dim of 1 in front XLA would copy it. With
    ``heads_first`` pages are [K, Pl, ...] in the array, as products on CPUs read them, not [Pl, K, ...].
    """

    stack: Array
    layer: Int[Array, ""] | None
    heads_first: bool = field(default=False, metadata={"static": True})

    def entries(self, *, paged: bool = False) -> Array:
        """Returns the layer, [B, S, ...]; of a paged cache the pages of all layers, [L Pg, Pl, ...], without a copy."""
        if not paged:
            return jax.lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)
        pages = self.stack if self.layer is None else self.stack.reshape(-1, *self.stack.shape[2:])
        return jnp.swapaxes(pages, 1, 2) if self.heads_first else pages

    @property
    def page_sizes(self) -> tuple[int, int]:
        """Pages of the layer, and positions of a page."""
        pages, *dims = self.stack.shape[self.layer is not None :]
        return pages, dims[self.heads_first]

    def in_pool(self, pages: Pages) -> Pages:
        """Returns the numbers of this layer's pages among those of all layers."""
        return pages if self.layer is None else pages + self.layer * self.stack.shape[1]


def cache_layout(platform: str, dims: tuple[str, ...], shape: tuple[int, ...], dtype: str) -> Layout | None:
    """Returns the order in memory of a device's shard, all layers, of a cache with heads; None for the platform's own.

    The slots of a head are together on GPUs, as batched products read them. On TPUs a slot is a tile of heads and
    widths, which a write replaces, unless its heads do not fill a word of 4 bytes, and scales have slots in the lanes.
    In any other order XLA copies whole caches.
    """
    on_tpu = platform == "tpu"
    if not dims[2:3] or not dims[2].startswith("K") or not (on_tpu or platform in ("cuda", "rocm")):
        return None
    num_heads, has_widths, packed = shape[3], len(shape) == 5, 4 // int(DTYPE_BYTES[dtype])
    heads_in_tiles = on_tpu and has_widths and num_heads >= max(2, packed)
    order = (0, 1, 2, 3, 4) if heads_in_tiles else (0, 1, 3, 2, 4)[: len(shape)]
    if not on_tpu:
        return Layout(order)
    rows = min(SUBLANES, max(packed, 1 << (num_heads - 1).bit_length()))
    if has_widths and not heads_in_tiles:
        rows = SUBLANES * (4 if packed == 4 else 1)
    return Layout(order, tiling=((rows, LANES), (packed, 1)) if packed > 1 else ((rows, LANES),))


@dataclass(frozen=True)
class OwnSlots:
    """The slots of a sequence that a device has: those from ``first`` on, of ``total``."""

    first: Array | int
    total: int

    @classmethod
    def of(cls, cache: LayerCache, axes: tuple[str, ...]) -> "OwnSlots":
        """Returns the slots of this device in a cache that ``axes`` split over its slots."""
        own = cache.stack.shape[2]
        return cls(first_index(axes, own), own * lax.axis_size(axes) if axes else own)


def write_prompt(cache: LayerCache, values: Array, last: Int[Array, " B"], slots: OwnSlots | None = None) -> LayerCache:
    """Writes positions 0 to ``last`` of each row of values[B, T, ...], or those of these that the slots hold.

    Padding after ``last`` is written too: later positions overwrite it before it is read.
    """
    num_slots, slots = cache.stack.shape[2], slots or OwnSlots.of(cache, ())
    if values.shape[1] > num_slots or num_slots < slots.total:
        held = held_positions(last, num_slots, slots)
        index = jnp.maximum(held, 0).reshape(*held.shape, *(1,) * (values.ndim - 2))
        values = jnp.take_along_axis(values, index, axis=1)
    start: list[Any] = [cache.layer, *[0] * values.ndim]
    values = stored(values[None], cache.stack.dtype)
    return LayerCache(jax.lax.dynamic_update_slice(cache.stack, values, start), cache.layer)


def stored(values: Array, dtype: Any) -> Array:
    """Returns values in the dtype of a cache, or as its bits; beyond the range of 8-bit floats they are its ends, not
    NaN."""
    bits = dtype if dtype in FLOATS else None
    dtype = FLOATS.get(dtype, dtype)
    if dtype == jnp.float8_e4m3fn:
        largest = float(jnp.finfo(dtype).max)
        values = jnp.clip(values, -largest, largest)
    values = values.astype(dtype)
    return values if bits is None else lax.bitcast_convert_type(values, bits)


def write_position(
    cache: LayerCache, values: Array, positions: Int[Array, "B 1"], slots: OwnSlots | None = None
) -> LayerCache:
    """Writes one position of each row, values[B, 1, ...], on the device that has its slot; positions are at least 0."""
    rows, num_slots, slots = jnp.arange(values.shape[0]), cache.stack.shape[2], slots or OwnSlots.of(cache, ())
    own = positions[:, 0] % slots.total
    if num_slots < slots.total:
        own, _ = own_entries(own, slots.first, num_slots, elsewhere=num_slots)
    values = values[:, 0]
    index = (cache.layer, *_by_head((rows, own), values, cache.stack.dtype))
    return LayerCache(cache.stack.at[index].set(stored(values, cache.stack.dtype), mode="drop"), cache.layer)


def _by_head(index: tuple[Any, ...], values: Array, dtype: Any) -> tuple[Any, ...]:
    """Returns the index of slots for values[R, ...], with heads where they are outside of slots on a TPU, as
    `cache_layout` says: written one by one, else XLA copies the whole array."""
    few = LANES // 2 if values.ndim == 2 else 4 // dtype.itemsize
    if default_platform() != "tpu" or not (values.ndim != 2) < values.shape[1] < few:
        return index
    return (*(one[:, None] for one in index), jnp.arange(values.shape[1])[None])


def write_slots(
    cache: LayerCache, values: Array, slots: Int[Array, " R"], pages: Axes = (), of_page: Axes = ()
) -> LayerCache:
    """Writes values[R, ...] into slots of a layer's pages, counted through those of all devices: axes ``pages`` split
    the pages, ``of_page`` the slots of each. Slots of other devices are dropped."""
    num_pages, page_len = cache.page_sizes
    whole = page_len * (lax.axis_size(of_page) if of_page else 1)
    page, slot = slots // whole - first_index(pages, num_pages), slots % whole - first_index(of_page, page_len)
    if pages:
        page = jnp.where(page < 0, num_pages, page)
    if of_page:
        page = jnp.where((slot < 0) | (slot >= page_len), num_pages, page)
    # past the last page of a layer is past the last of all, not the next layer's first
    page = jnp.minimum(page, num_pages)
    by_head = _by_head((page, slot), values, cache.stack.dtype)
    index: tuple[Any, ...] = (page, slice(None), slot) if cache.heads_first else by_head
    index = index if cache.layer is None else (cache.layer, *index)
    return replace(cache, stack=cache.stack.at[index].set(stored(values, cache.stack.dtype), mode="drop"))


def held_positions(last: Int[Array, " B"], num_slots: int, slots: OwnSlots | None = None) -> Int[Array, "B S"]:
    """Returns the position in each of a device's slots after ``last`` has been written; negative in an empty slot."""
    slots = slots or OwnSlots(0, num_slots)
    latest, own = last[:, None], slots.first + jnp.arange(num_slots, dtype=last.dtype)[None]
    return latest - (latest - own) % slots.total


def visible_slots(
    position: Int[Array, " B"], num_slots: int, *, window: int | None, slots: OwnSlots | None = None
) -> Bool[Array, "B S"]:
    """True for slots that a query at ``position``, already written, may see: filled, and within the window."""
    held = held_positions(position, num_slots, slots)
    seen = held >= 0
    return seen if window is None else seen & (position[:, None] - held < window)


@dataclass(frozen=True, kw_only=True)
class ScorePart:
    """Part of the scores: queries of N heads and the part of the keys' width that they are multiplied with.

    ``keys`` have K heads, N = K * G; int8 keys have a ``scale`` for each slot and head.
    """

    queries: Float[Array, "B T N H"]
    keys: Array
    scale: Float[Array, "B S K"] | None = None

    def scores(self) -> Float[Array, "B K G T S"]:
        """Returns the products in float32."""
        batch, length, heads, width = self.queries.shape
        kv_heads = self.keys.shape[2]
        grouped = self.queries.reshape(batch, length, kv_heads, heads // kv_heads, width)
        keys = self.keys.astype(grouped.dtype)
        found = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, keys, preferred_element_type=jnp.float32)
        return found if self.scale is None else found * _over_queries(self.scale)


class OwnAttention(NamedTuple):
    """Attention on the slots of one device, with each query's largest score and sum of exp(score - largest)."""

    result: Float[Array, "B T N Hv"]
    peak: Float[Array, "B T N"]
    total: Float[Array, "B T N"]


def cached_attention(
    parts: Sequence[ScorePart],
    values: Array,
    seen: Bool[Array, "B S"],
    *,
    scale: float,
    value_scale: Float[Array, "B S K"] | None = None,
    score: Callable[[Float[Array, "B K G T S"]], Array] | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> OwnAttention:
    """Returns the values of K heads, weighted by the softmax over visible slots; ``parts`` of the scores are summed.

    ``score`` maps scaled scores to scores, minus infinity where a mask forbids. ``sinks`` are an additional logit per
    head. Scales of int8 values multiply the weights, usually the smaller array of the two. A device without visible
    slots has a result of 0 and a largest score of minus infinity.
    """
    scores = scale * sum((part.scores() for part in parts[1:]), parts[0].scores())
    found = scores if score is None else score(scores)
    weights, peak, total = _softmax(jnp.where(seen[:, None, None, None], found, -jnp.inf), sinks)
    if value_scale is not None:
        weights = weights * _over_queries(value_scale)
    dtype = parts[0].queries.dtype
    factors = weights.astype(dtype), values.astype(dtype)
    mixed = jnp.einsum("BKGTS,BSKH->BKGTH", *factors, preferred_element_type=jnp.float32).astype(dtype)
    rows = parts[0].queries.shape[:3]
    result, peak, total = (jnp.moveaxis(array, 3, 1).reshape(*rows, -1) for array in (mixed, peak, total))
    return OwnAttention(result, peak[..., 0], total[..., 0])


def _over_queries(scale: Float[Array, "B S K"]) -> Float[Array, "B K 1 1 S"]:
    return scale.transpose(0, 2, 1)[:, :, None, None]


def _softmax(scores: Float[Array, "B K G T S"], sinks: Float[Array, " N"] | None) -> tuple[Array, Array, Array]:
    """Returns the weights, the largest score of each row and its sum of exponentials, of which sinks are part."""
    peak, extra = jnp.max(scores, axis=-1, keepdims=True), jnp.full((1, *scores.shape[1:3], 1, 1), -jnp.inf)
    if sinks is not None:
        extra = sinks.astype(jnp.float32).reshape(extra.shape)
        peak = jnp.maximum(peak, extra)
    finite = jnp.maximum(peak, jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - finite)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(extra - finite)
    return weights / jnp.where(total > 0, total, 1.0), peak, total
