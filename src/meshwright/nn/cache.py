"""Cache of keys and values in pages of Pl slots each: their order in memory, writes in place, reads."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout
from jaxtyping import Array, Int

from meshwright.algebra.sizes import LANES, SUBLANES
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.notation import Axes
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.collectives import first_index
from meshwright.nn.contract import FLOATS

Pages = Int[Array, "B Bp"]
"""The page table: the pages of each sequence, in the order of its positions."""

PART_SLOTS, PART_LAYOUT = 16, Layout((0, 1, 2, 4, 3, 5), tiling=((SUBLANES, LANES), (4, 1)))
"""Slots of a part of a page, and the order in memory of pages in parts, all layers; see `page_parts`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer of ``stack``, an array with all layers of a kind; a write changes this layer's entries in place.

    Without ``layer`` the array has this layer's pages only: with a leading dim of 1 XLA would copy it. With
    ``heads_first`` pages are stored as [K, Pl, ...], as products on CPUs read them, not [Pl, K, ...]. Pages in parts
    are [parts, slots of a part, K, H].
    """

    stack: Array
    layer: Int[Array, ""] | None
    heads_first: bool = field(default=False, metadata={"static": True})

    @property
    def pages(self) -> Array:
        """The pages of all layers, [L Pg, Pl, ...], without a copy."""
        if self.in_parts:
            return self.stack.reshape(-1, self.page_sizes[1], *self.stack.shape[4:])
        pages = self.stack if self.layer is None else self.stack.reshape(-1, *self.stack.shape[2:])
        return jnp.swapaxes(pages, 1, 2) if self.heads_first else pages

    @property
    def in_parts(self) -> bool:
        """True if pages are stored in parts, see `page_parts`."""
        return self.stack.ndim == 6

    @property
    def page_sizes(self) -> tuple[int, int]:
        """Number of pages of the layer, and positions of a page."""
        num_pages, *page_dims = self.stack.shape[self.layer is not None :]
        return num_pages, page_dims[0] * page_dims[1] if self.in_parts else page_dims[self.heads_first]

    def in_pool(self, pages: Pages) -> Pages:
        """Returns the indices of this layer's pages among the pages of all layers."""
        return pages if self.layer is None else pages + self.layer * self.stack.shape[1]


def fills_tiles(num_heads: int) -> bool:
    """True if ``num_heads`` rows fill whole tiles of a TPU, which have 8 rows, or 1, 2 or 4 for fewer rows."""
    return num_heads % min(SUBLANES, 1 << (num_heads - 1).bit_length()) == 0


def page_parts(platform: str, dims: tuple[str, ...], shape: tuple[int, ...], dtype: str) -> int:
    """Returns into how many parts of `PART_SLOTS` slots a page is stored, for a device's shard of all layers; 1 if
    whole.

    On TPUs a page of one 8-bit head wider than a tile has tiles of 32 slots, and XLA copies the array into tiles of 8
    before it writes single slots. Parts have tiles of 8. For shards XLA accepts no layout with other tiles than its
    default for the shape."""
    is_wide = len(shape) == 5 and shape[3] == 1 and shape[4] > LANES and DTYPE_BYTES[dtype] == 1
    in_parts = platform == "tpu" and is_wide and dims[2].startswith("K") and shape[2] % PART_SLOTS == 0
    return shape[2] // PART_SLOTS if in_parts else 1


def cache_layout(platform: str, dims: tuple[str, ...], shape: tuple[int, ...], dtype: str) -> Layout | None:
    """Returns the memory order of a device's shard, all layers, of a cache with heads; None for the platform's default.

    On GPUs the slots of a head are contiguous, as batched products read them. On TPUs a slot is a tile of heads and
    widths, which a write replaces, unless its heads do not fill a word of 4 bytes; scales, and narrow keys stored next
    to latents, have slots in the lanes. In any other order XLA copies whole caches.
    """
    is_tpu, per_word = platform == "tpu", 4 // int(DTYPE_BYTES[dtype])
    if not dims[2:3] or not (is_tpu or platform in ("cuda", "rocm")):
        return None
    num_heads, has_widths, tile_rows = shape[3], len(shape) == 5, SUBLANES
    heads_in_tiles = is_tpu and has_widths and num_heads >= max(2, per_word)
    dim_order = (0, 1, 2, 3, 4) if heads_in_tiles else (0, 1, 3, 2, 4)[: len(shape)]
    if not dims[2].startswith("K"):
        if not is_tpu or len(shape) < 4 or shape[3] >= LANES:
            return None
    elif not is_tpu:
        return Layout(dim_order)
    elif not has_widths or heads_in_tiles:
        tile_rows = min(SUBLANES, max(per_word, 1 << (num_heads - 1).bit_length()))
    elif per_word == 4 and shape[2] > PART_SLOTS:
        tile_rows *= 4
    return Layout(dim_order, tiling=((tile_rows, LANES), (per_word, 1)) if per_word > 1 else ((tile_rows, LANES),))


def stored(values: Array, dtype: jnp.dtype) -> Array:
    """Returns values in the dtype of a cache, or as its bits; values beyond the range of 8-bit floats are clipped, not
    NaN."""
    bits_dtype = dtype if dtype in FLOATS else None
    dtype = FLOATS.get(dtype, dtype)
    if dtype == jnp.float8_e4m3fn:
        max_value = float(jnp.finfo(dtype).max)
        values = jnp.clip(values, -max_value, max_value)
    values = values.astype(dtype)
    return values if bits_dtype is None else lax.bitcast_convert_type(values, bits_dtype)


def _by_head(index: tuple[Array, ...], values: Array, dtype: jnp.dtype) -> tuple[Array, ...]:
    """Returns the index of slots for values[R, ...]; on TPUs with an index of heads too if heads are outside of slots
    (`cache_layout`): written one by one, else XLA copies the whole array. Scales whose heads do not fill tiles are
    written without it, since XLA would copy them then."""
    max_heads = LANES // 2 if values.ndim == 2 else 4 // dtype.itemsize
    if values.ndim == 2 and not fills_tiles(values.shape[1]):
        return index
    if default_platform() != "tpu" or values.ndim == 1 or not (values.ndim != 2) < values.shape[1] < max_heads:
        return index
    return (*(array[:, None] for array in index), jnp.arange(values.shape[1])[None])


def write_slots(
    cache: LayerCache, values: Array, slots: Int[Array, " R"], pages: Axes = (), of_page: Axes = ()
) -> LayerCache:
    """Writes values[R, ...] into slots of a layer's pages, numbered over the pages of all devices: axes ``pages`` split
    the pages, ``of_page`` the slots of each page. Slots on other devices are dropped."""
    if cache.in_parts:  # which are written as if they were pages
        parts = replace(cache, stack=cache.stack.reshape(len(cache.stack), -1, *cache.stack.shape[3:]))
        return replace(cache, stack=write_slots(parts, values, slots, pages).stack.reshape(cache.stack.shape))
    num_pages, page_len = cache.page_sizes
    full_len = page_len * (lax.axis_size(of_page) if of_page else 1)
    page, slot = slots // full_len - first_index(pages, num_pages), slots % full_len - first_index(of_page, page_len)
    if pages:
        page = jnp.where(page < 0, num_pages, page)
    if of_page:
        page = jnp.where((slot < 0) | (slot >= page_len), num_pages, page)
    # past the last page of a layer is past the last of all, not the next layer's first
    page = jnp.minimum(page, num_pages)
    index_by_head = _by_head((page, slot), values, cache.stack.dtype)
    full_index: tuple[Array | slice, ...] = (page, slice(None), slot) if cache.heads_first else index_by_head
    full_index = full_index if cache.layer is None else (cache.layer, *full_index)
    return replace(cache, stack=cache.stack.at[full_index].set(stored(values, cache.stack.dtype), mode="drop"))
