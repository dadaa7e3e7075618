"""Moves cache pages between devices and host memory, a few pages at a time."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from meshwright.parallel.generation.held_arrays import Cache
from meshwright.parallel.generation.program_store import ProgramStore

AT_ONCE = 8
"""Pages that one run of a program copies; unused entries read page 0, or write nowhere."""


class Copied(Protocol):
    """The owner of a page's copy on the host: an array for each array of the cache; None if there is no copy."""

    copy: Sequence[np.ndarray] | None


class HostPages:
    """Moves pages of caches shaped like ``cache``; pages are dim 0 of per-layer arrays, dim 1 of stacked ones."""

    def __init__(self, cache: Cache, programs: ProgramStore) -> None:
        self._shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.format), cache)
        self._programs, self._before = programs, () if isinstance(next(iter(cache.values())), tuple) else (slice(None),)
        cache_arrays = jax.tree.leaves(cache)
        self._num_pages = cache_arrays[0].shape[len(self._before)]
        self.page_bytes = sum(array.nbytes for array in cache_arrays) // self._num_pages
        self._reading: tuple[Sequence[Copied], list[Array]] = [], []

    def warm_up(self) -> None:
        """Compiles the programs that read and write pages."""
        _ = self._read, self._write

    def move(self, cache: Cache, out: Mapping[Copied, int], back: Mapping[Copied, int]) -> Cache:
        """Copies pages ``out`` (owner -> page) to the host, then copies ``back`` (owner -> page) to the cache, and
        returns the cache. The last pages that went out have their ``copy`` set only in the next call.
        """
        self._finish()
        for batch_items in _parts(out):
            page_ids = np.zeros(AT_ONCE, np.int32)
            page_ids[: len(batch_items)] = [page for _, page in batch_items]
            device_arrays = jax.tree.leaves(self._read(cache, page_ids))
            for array in device_arrays:
                array.copy_to_host_async()  # overlaps with storing the previous batch
            self._finish()
            self._reading = [copied for copied, _ in batch_items], device_arrays
        if back:  # a page to copy back may still be in flight to the host
            self._finish()
        for batch_items in _parts(back):
            page_ids = np.full(AT_ONCE, self._num_pages, np.int32)  # an index beyond all pages: its writes are dropped
            page_ids[: len(batch_items)] = [page for _, page in batch_items]
            filler_copies = [batch_items[0][0].copy] * (AT_ONCE - len(batch_items))
            pieces_by_array = zip(*(copied.copy for copied, _ in batch_items), *filler_copies, strict=True)
            stacked_pieces = [np.stack(pieces, len(self._before)) for pieces in pieces_by_array]
            cache = self._write(cache, page_ids, jax.tree.unflatten(jax.tree.structure(self._shapes), stacked_pieces))
            for copied, _ in batch_items:
                copied.copy = None
        return cache

    def _finish(self) -> None:
        """Waits for the pages in flight and stores each in separate arrays as its owner's ``copy``."""
        (copied_pages, device_arrays), self._reading = self._reading, ([], [])
        host_arrays = [np.asarray(array) for array in device_arrays]
        for index, copied in enumerate(copied_pages):
            copied.copy = [array[(*self._before, index)].copy() for array in host_arrays]  # a view keeps all pages

    @cached_property
    def _read(self) -> jax.stages.Compiled:
        def read(cache: Cache, pages: Array) -> Cache:
            return jax.tree.map(lambda array: array[(*self._before, pages)], cache)

        pages_struct = jax.ShapeDtypeStruct((AT_ONCE,), jnp.int32)
        return self._programs.get("pages-read", lambda: jax.jit(read).lower(self._shapes, pages_struct))

    @cached_property
    def _write(self) -> jax.stages.Compiled:
        def write(cache: Cache, pages: Array, copies: Cache) -> Cache:
            page_index = (*self._before, pages)
            return jax.tree.map(lambda array, new: array.at[page_index].set(new, mode="drop"), cache, copies)

        format_tree = jax.tree.map(lambda shape: shape.format, self._shapes)
        pages_struct = jax.ShapeDtypeStruct((AT_ONCE,), jnp.int32)
        copy_structs = jax.tree.map(self._some, self._shapes)
        jitted_write = jax.jit(write, donate_argnums=0, out_shardings=format_tree)  # else the cache exists twice
        return self._programs.get("pages-write", lambda: jitted_write.lower(self._shapes, pages_struct, copy_structs))

    def _some(self, array_struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        page_dim = len(self._before)
        shape = (*array_struct.shape[:page_dim], AT_ONCE, *array_struct.shape[page_dim + 1 :])
        return jax.ShapeDtypeStruct(shape, array_struct.dtype, sharding=array_struct.sharding)


def _parts(pages: Mapping[Copied, int]) -> Iterator[list[tuple[Copied, int]]]:
    item_iterator = iter(pages.items())
    while batch_items := list(islice(item_iterator, AT_ONCE)):
        yield batch_items
