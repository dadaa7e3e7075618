"""Copies of a cache's pages in the host's memory: programs that read and write some pages at a time."""

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
"""Pages that a program copies; if there are fewer, others are read or nothing is written for the rest."""


class Copied(Protocol):
    """Something that has the copy of a page: an array for each of the cache's, None while there is none."""

    copy: Sequence[np.ndarray] | None


class HostPages:
    """Moves pages of a cache like this one, which has pages in the first dim of layers or the second of stacks."""

    def __init__(self, cache: Cache, programs: ProgramStore) -> None:
        self._shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.format), cache)
        self._programs, self._before = programs, () if isinstance(next(iter(cache.values())), tuple) else (slice(None),)
        arrays = jax.tree.leaves(cache)
        self._num_pages = arrays[0].shape[len(self._before)]
        self.page_bytes = sum(array.nbytes for array in arrays) // self._num_pages
        self._reading: tuple[Sequence[Copied], list[Array]] = [], []

    def warm_up(self) -> None:
        """Compiles both programs."""
        _ = self._read, self._write

    def move(self, cache: Cache, out: Mapping[Copied, int], back: Mapping[Copied, int]) -> Cache:
        """Copies pages ``out`` of a cache, then copies of others ``back`` to pages, and returns the cache.

        Keys are `Copied`. Copies of the last pages that went out are there after the next call.
        """
        self._finish()
        for part in _parts(out):
            pages = np.zeros(AT_ONCE, np.int32)
            pages[: len(part)] = [page for _, page in part]
            arrays = jax.tree.leaves(self._read(cache, pages))
            for array in arrays:
                array.copy_to_host_async()  # while the part before this one is kept
            self._finish()
            self._reading = [copied for copied, _ in part], arrays
        if back:  # what comes back may be among the copies still on their way
            self._finish()
        for part in _parts(back):
            pages = np.full(AT_ONCE, self._num_pages, np.int32)  # beyond all pages: what is written there is dropped
            pages[: len(part)] = [page for _, page in part]
            fillers = [part[0][0].copy] * (AT_ONCE - len(part))
            copies = zip(*(copied.copy for copied, _ in part), *fillers, strict=True)
            stacked = [np.stack(pieces, len(self._before)) for pieces in copies]
            cache = self._write(cache, pages, jax.tree.unflatten(jax.tree.structure(self._shapes), stacked))
            for copied, _ in part:
                copied.copy = None
        return cache

    def _finish(self) -> None:
        """Keeps what is being read, each page in arrays of its own."""
        (owners, arrays), self._reading = self._reading, ([], [])
        host_arrays = [np.asarray(array) for array in arrays]
        for number, copied in enumerate(owners):
            copied.copy = [array[(*self._before, number)].copy() for array in host_arrays]  # a view keeps all of them

    @cached_property
    def _read(self) -> jax.stages.Compiled:
        def read(cache: Cache, pages: Array) -> Cache:
            return jax.tree.map(lambda array: array[(*self._before, pages)], cache)

        numbers = jax.ShapeDtypeStruct((AT_ONCE,), jnp.int32)
        return self._programs.get("pages-read", lambda: jax.jit(read).lower(self._shapes, numbers))

    @cached_property
    def _write(self) -> jax.stages.Compiled:
        def write(cache: Cache, pages: Array, copies: Cache) -> Cache:
            index = (*self._before, pages)
            return jax.tree.map(lambda array, new: array.at[index].set(new, mode="drop"), cache, copies)

        formats = jax.tree.map(lambda shape: shape.format, self._shapes)
        numbers = jax.ShapeDtypeStruct((AT_ONCE,), jnp.int32)
        copies = jax.tree.map(self._some, self._shapes)
        jitted = jax.jit(write, donate_argnums=0, out_shardings=formats)  # else the cache is there twice
        return self._programs.get("pages-write", lambda: jitted.lower(self._shapes, numbers, copies))

    def _some(self, one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dim = len(self._before)
        shape = (*one.shape[:dim], AT_ONCE, *one.shape[dim + 1 :])
        return jax.ShapeDtypeStruct(shape, one.dtype, sharding=one.sharding)


def _parts(pages: Mapping[Copied, int]) -> Iterator[list[tuple[Copied, int]]]:
    items = iter(pages.items())
    while part := list(islice(items, AT_ONCE)):
        yield part
