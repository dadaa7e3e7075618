"""The cache of generation as a table of state, a row per kind of layer and array: counted, sharded and made from it."""

import math
from typing import Literal, get_args

import msgspec

from meshwright.algebra.transformer import LayerKind, layer_kinds
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError, nearest
from meshwright.spec.model import Model

CacheDtype = Literal["bf16", "fp32", "int8"]
CACHE_DTYPES: tuple[str, ...] = get_args(CacheDtype)


class CacheArray(msgspec.Struct, frozen=True, kw_only=True):
    """One array of the cache, the same in each of ``num_layers``; ``dims`` and ``shape`` are those of one layer."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    num_layers: int

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """With the layers of the kind in front, as the weights have them."""
        return (self.num_layers, *self.shape)

    @property
    def num_bytes(self) -> int:
        """Of all its layers, over all devices."""
        return math.prod(self.stacked_shape) * int(DTYPE_BYTES[self.dtype])


def cached_dims(model: Model) -> dict[str, tuple[str, ...]]:
    """What a layer keeps of each position, by its letter: keys and values, or with latent attention the latent ``c``
    and the rotated key part ``p`` that all heads share."""
    if model.latent_attention:
        return {"c": ("Rkv",), "p": ("Hr",)}
    return {"k": ("K", "H"), "v": ("K", "H")}


def cache_name(model: Model, kind: LayerKind, letter: str) -> str:
    """Variable of the program: ``cache_k``, or ``cache_k_local`` where a model has layers of several kinds."""
    return f"cache_{letter}{kind.suffix if len(layer_kinds(model)) > 1 else ''}"


def scale_name(name: str) -> str:
    """The variable beside an int8 array that holds its scales."""
    return f"{name}_scale"


def num_slots(model: Model, kind: LayerKind, *, max_len: int) -> int:
    """Positions that a layer keeps of a sequence: all of them, or as many as its window sees.

    Position p lies in slot p modulo their number.
    """
    return min(max_len, model.sliding_window) if kind.sliding and model.sliding_window else max_len


def cache_table(model: Model, *, batch_seqs: int, max_len: int, dtype: CacheDtype = "bf16") -> tuple[CacheArray, ...]:
    """Rows of the cache of ``batch_seqs`` sequences of up to ``max_len`` positions.

    int8 keeps a float32 scale beside each token and head. Raises InputError for a dtype that is none of `CACHE_DTYPES`.
    """
    require_cache_dtype(dtype)
    rows = []
    for kind in layer_kinds(model):
        slots = num_slots(model, kind, max_len=max_len)
        for letter, dims in cached_dims(model).items():
            array = CacheArray(
                name=cache_name(model, kind, letter),
                dims=("B", "S", *dims),
                shape=(batch_seqs, slots, *(model.dims[dim] for dim in dims)),
                dtype=dtype,
                num_layers=len(kind.layers),
            )
            rows += [array, _scales(array)] if dtype == "int8" else [array]
    return tuple(rows)


def require_cache_dtype(dtype: str) -> None:
    """Raise InputError unless keys and values can be kept so."""
    if dtype not in CACHE_DTYPES:
        options = ", ".join(CACHE_DTYPES)
        raise InputError(f"cache dtype {dtype!r} is not known.{nearest(dtype, CACHE_DTYPES)} Use one of {options}.")


def _scales(array: CacheArray) -> CacheArray:
    return msgspec.structs.replace(
        array, name=scale_name(array.name), dims=array.dims[:-1], shape=array.shape[:-1], dtype="fp32"
    )
