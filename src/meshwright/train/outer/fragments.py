"""Fragments of a model's weights: which layers of which arrays, read to the host as float32 and written back.

Weights are JAX's arrays of any sharding, or NumPy's, which are written in place.
"""

from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from meshwright.algebra.rewrites.frozen import moved_buffers
from meshwright.algebra.rewrites.islands import fragment_numbers
from meshwright.nn.weights import Params
from meshwright.parallel.train_step import State, TrainStep
from meshwright.train.optimizers.rounding import round_to

_Index = tuple[slice, ...]


class FragmentPart(NamedTuple):
    """The layers ``first``, ``first + stride``, ... of an array of stacked layers; all of an array if the stride is
    0."""

    name: str
    first: int = 0
    stride: int = 0


Fragment = tuple[FragmentPart, ...]


def fragments_of(weights: Params, stacked: Collection[str], count: int) -> list[Fragment]:
    """Returns ``count`` fragments, to which `fragment_numbers` assigns the weights; ``stacked`` names arrays of stacked
    layers. Raises InputError if a fragment gets no weight."""
    forms = {n: (w.shape[0], w.ndim - 1) if n in stacked else (0, w.ndim) for n, w in sorted(weights.items())}
    fragments: list[list[FragmentPart]] = [[] for _ in range(count)]
    for name, numbers in fragment_numbers(forms, count).items():
        is_layered = forms[name][0] and count > 1
        for number in numbers:
            fragments[number].append(FragmentPart(name, number, count) if is_layered else FragmentPart(name))
    return [tuple(pieces) for pieces in fragments]


def read(weights: Params, fragment: Fragment) -> list[np.ndarray]:
    """Returns the fragment as float32 arrays in host memory: one for each piece, or, of a piece that other processes
    have parts of, one for each distinct shard of this process.

    The arrays may share memory with the weights.
    """
    blocks = []
    for piece in fragment:
        array = weights[piece.name]
        if isinstance(array, np.ndarray) or _is_here(array):
            blocks.append(array[piece.first :: piece.stride] if piece.stride else array)
        else:
            blocks += [_rows(piece, shard.data, shard.index) for shard in shards_here(array)]
    return [np.asarray(block, np.float32) for block in blocks]


def written(weights: Params, fragment: Fragment, blocks: list[np.ndarray]) -> Params:
    """Returns the weights with the fragment replaced by ``blocks`` (see `read`); NumPy arrays change in place."""
    weights, left = dict(weights), iter(blocks)
    for piece in fragment:
        array = weights[piece.name]
        if isinstance(array, np.ndarray):
            selected = array[piece.first :: piece.stride] if piece.stride else array
            selected[...] = next(left)
        elif _is_here(array):
            weights[piece.name] = _replaced(array, piece.first, piece.stride, next(left))
        else:
            block_at = {shard_key(shard.index): (shard.index, next(left)) for shard in shards_here(array)}
            parts = []
            for shard in array.addressable_shards:
                index, block = block_at[shard_key(shard.index)]
                parts.append(_replaced(shard.data, _first(piece, index), piece.stride, block))
            weights[piece.name] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
    return weights


def exchanged(step: TrainStep, state: State) -> Params:
    """Returns the weights of a state that islands exchange: all that training changes, in float32 where the state has
    float32 copies."""
    changed = step.shards.keys() | moved_buffers(step.program)
    weights = {name: weight for name, weight in step.saved(state.params).items() if name in changed}
    return weights | dict(state.opt_state.master)


def with_exchanged(state: State, weights: Params) -> State:
    """Returns the state with these weights; two-byte weights are rounded from float32 copies."""
    master = {name: weights[name] for name in state.opt_state.master}
    old = {name: state.params[name] for name in weights}
    new = {n: jax.device_put(round_to(weights[n], old[n].dtype), old[n].sharding) for n in master}
    return State(state.params | weights | new, state.opt_state._replace(master=master))


def _is_here(array: Array) -> bool:
    """True if this process has all of the array."""
    return array.is_fully_addressable


def _replaced(array: Array, first: int, stride: int, block: np.ndarray) -> Array:
    if not stride:
        # A copy: on CPU the device's array may be the memory of the block.
        return jax.device_put(block.astype(array.dtype), array.sharding)
    return _replacing(array.sharding, first, stride)(array, block)


@lru_cache(maxsize=4096)
def _replacing(sharding: jax.sharding.Sharding, first: int, stride: int) -> Any:
    def replaced(array: Array, block: Array) -> Array:
        return array.at[first::stride].set(block.astype(array.dtype))

    return jax.jit(replaced, out_shardings=sharding)


def shards_here(array: Array) -> list[jax.Shard]:
    """Returns the distinct shards of an array in this process, replicas once, in the order of their index."""
    return [shard for _, shard in sorted({shard_key(shard.index): shard for shard in array.addressable_shards}.items())]


def shard_key(index: _Index) -> tuple[int, ...]:
    """Returns the start of a shard in each dim, which is equal for replicas."""
    return tuple(part.start or 0 for part in index)


def _first(piece: FragmentPart, index: _Index) -> int:
    """Returns the first layer of the piece within a shard."""
    return (piece.first - (index[0].start or 0)) % piece.stride if piece.stride else 0


def _rows(piece: FragmentPart, data: Array, index: _Index) -> Array:
    return data[_first(piece, index) :: piece.stride] if piece.stride else data
