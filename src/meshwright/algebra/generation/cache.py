"""The cache that steps of generation read and write: its arrays, pages and bytes."""

import math

import msgspec
from msgspec.structs import replace

from meshwright.algebra.generation.program import AS_WRITTEN, Storage, caches_of, plain_program
from meshwright.algebra.rewrites.repeated_heads import repeating, strategy_of_heads
from meshwright.algebra.sizes import Number
from meshwright.core.dims import DTYPE_BYTES
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, held_dims

ONE_DEVICE = Strategy(mesh={})
"""The strategy of one device."""


class CacheArray(msgspec.Struct, frozen=True):
    """One cache array that each of ``num_layers`` layers has; ``dims`` and ``shape`` are of one layer."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    num_layers: int

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Shape with the layers as the first dim: (num_layers, *shape)."""
        return (self.num_layers, *self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the unsharded array over all layers, without copies."""
        return math.prod(self.stacked_shape) * int(DTYPE_BYTES[self.dtype])


def pages_of_window(window: int, page_len: Number, rows: Number = 1) -> Number:
    """Returns the most pages that a sequence's window touches together with the next ``rows`` that it writes."""
    return (window + rows - 3) // page_len + 2


def pages_of_windows(window: int, page_len: int, *, num_seqs: int, num_rows: int) -> int:
    """Returns the most pages that windows of ``num_seqs`` sequences need while a step writes ``num_rows`` rows."""
    # a sequence that writes several rows fills whole pages, and a part of one more
    return num_seqs * int(pages_of_window(window, page_len)) + num_rows // page_len + min(num_seqs, num_rows // 2)


def cache_sizes(*, batch_seqs: int, max_len: int, storage: Storage = AS_WRITTEN, source_len: int = 0) -> dict[str, int]:
    """Returns the sizes of the dims that only caches have, for sequences of up to ``max_len`` positions with sources of
    up to ``source_len``.

    There are pages for every sequence and source at full length, unless ``storage.num_pages`` says how many.
    """
    page_len = storage.page_len or max(max_len, source_len)
    pages_per_seq, pages_per_source = -(-max_len // page_len), -(-source_len // page_len)
    num_pages = storage.num_pages or batch_seqs * (pages_per_seq + pages_per_source)
    sizes = {"S": max_len, "Pl": page_len, "Bp": pages_per_seq, "Bx": pages_per_source}
    return sizes | {"Pg": num_pages, "Pw": storage.window_pages}


def source_len(model: Model) -> int:
    """Returns the most positions of an encoder's source, 0 in a model without an encoder."""
    return model.encoder.length if model.encoder else 0


def cache_table(
    model: Model,
    *,
    batch_seqs: int,
    max_len: int,
    storage: Storage = AS_WRITTEN,
    strategy: Strategy = ONE_DEVICE,
) -> tuple[CacheArray, ...]:
    """Returns the cache arrays of ``batch_seqs`` sequences of up to ``max_len`` positions, whole, over all devices.

    int8 keeps a float32 scale for each token and head, or for each token of latents.
    """
    program = repeating(plain_program(model, storage), strategy_of_heads(strategy, model.common_kv_heads))
    sizes = held_dims(model.dims, strategy.mesh) | {"B": batch_seqs}
    sizes |= cache_sizes(batch_seqs=batch_seqs, max_len=max_len, storage=storage, source_len=source_len(model))
    cache_arrays = []
    for block in program.blocks:
        for variable in (program.variables[name] for name in caches_of(block)):
            shape = tuple(sizes[dim] for dim in variable.dims)
            cache_arrays.append(CacheArray(variable.name, variable.dims, shape, variable.dtype, block.repeat))
    return tuple(cache_arrays)


def sequence_bytes(model: Model, num_positions: int, storage: Storage) -> int:
    """Returns the bytes of one sequence's cache over all devices; layers with a window keep positions of the window."""
    window = min(model.sliding_window or 0, num_positions)
    exact_storage = replace(storage, page_len=1, num_pages=num_positions, window_pages=window)
    return sum(row.num_bytes for row in cache_table(model, batch_seqs=1, max_len=num_positions, storage=exact_storage))
