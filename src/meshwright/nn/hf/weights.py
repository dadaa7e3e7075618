"""Weights from and to Hugging Face checkpoints: each device reads its own shards, each tensor is written by itself."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.files import write_text_whole
from meshwright.nn.hf.files import DTYPES, Entry, Tensors, open_checkpoint, write_checkpoint
from meshwright.nn.hf.format import Box, Place, places
from meshwright.nn.hf.mxfp4 import with_unpacked
from meshwright.nn.weights import Params, rows, stacked_shape
from meshwright.spec.hf.write import TOKEN_KEYS, config_from_model, text_model
from meshwright.spec.model import Model
from meshwright.spec.weights import Weight

CONFIG = "config.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Size of one file, as transformers has it."""

Fetch = Callable[[str, tuple[int, ...]], np.ndarray]
"""(variable, leading indices) -> one layer, or one expert of one layer, on the host."""


# -- reading ------------------------------------------------------------------------------------------


def load_params(
    model: Model,
    folder: Path | str,
    shardings: Mapping[str, Sharding] | None = None,
    dtype: Any = None,
) -> Params:
    """The weights of a checkpoint, each array in its sharding (all on the first device where none are given).

    Shard after shard is read from the mapped files and put on its devices, so that a host never holds more than one
    shard besides what its devices hold. In ``dtype``, or in the files' own. Raises InputError for a missing or
    misshapen tensor.
    """
    with open_checkpoint(Path(folder)) as tensors:
        return read_params(model, with_unpacked(tensors), shardings, dtype)


def params_from_hf(model: Model, tensors: Mapping[str, np.ndarray], *, dtype: Any = None) -> Params:
    """Weights from a Hugging Face state dict (names to arrays) of the same model, on the first device."""
    return read_params(model, tensors, None, dtype)


def read_params(model: Model, tensors: Tensors, shardings: Mapping[str, Sharding] | None, dtype: Any) -> Params:
    """`load_params` from tensors of any kind."""
    table = checked_places(model, tensors)
    one_device = SingleDeviceSharding(jax.devices()[0])
    params = {}
    for variable, weight in rows(model).items():
        sharding = shardings[variable] if shardings else one_device
        params[variable] = _array(weight, table[variable], tensors, sharding, dtype)
    return params


def checked_places(model: Model, tensors: Tensors) -> dict[str, dict[tuple[int, ...], Place]]:
    """Variable -> leading indices -> where it lies, all of it there and of the right shape."""
    found: dict[str, dict[tuple[int, ...], Place]] = {}
    # DeepSeek-V3 adds numbers to the router's scores that no gradient trains; here they can only be zero.
    for name in tensors:
        if name.endswith(".e_score_correction_bias") and tensors[name][slice(0, None),].any():
            raise CannotRunError(f"{name} is not zero: a corrected router is not run in this version.")
    for place in places(model, tensors):
        if place.tensor not in tensors:
            raise InputError(_missing(place, tensors))
        shape = tuple(tensors[place.tensor].shape)
        if shape != place.shape:
            raise InputError(f"{place.tensor} has shape {shape}; {model.name} needs {place.shape}. Is it its config?")
        found.setdefault(place.variable, {})[place.leading] = place
    return found


def _missing(place: Place, names: Collection[str]) -> str:
    quantised = next((name for name in names if name.endswith(("_blocks", "_scale_inv", ".qweight", ".SCB"))), "")
    if quantised:
        return f"the checkpoint is quantised (it has {quantised}). Give one in bf16, fp16 or fp32."
    return f"the checkpoint lacks {place.tensor} ({place.variable}). Give one made for this model."


def _array(
    weight: Weight, table: Mapping[tuple[int, ...], Place], tensors: Tensors, sharding: Sharding, dtype: Any
) -> jax.Array:
    """One variable, read shard by shard: devices that hold the same shard get it from one reading."""
    shape = stacked_shape(weight)
    devices_of: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        region = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        devices_of.setdefault(region, []).append(device)
    arrays = []
    for region, devices in devices_of.items():
        block = _block(table, tensors, tuple(slice(*ends) for ends in region), dtype)
        arrays += [jax.device_put(block, device) for device in devices]
        jax.block_until_ready(arrays[-1])  # the host's copy is free before the next one is made
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _block(table: Mapping[tuple[int, ...], Place], tensors: Tensors, region: Box, dtype: Any) -> np.ndarray:
    """A region of a variable's array: leading dims are layers and experts, each in a place of its own."""
    leading = len(next(iter(table)))
    box = region[leading:]
    block: np.ndarray | None = None
    for index in np.ndindex(*(part.stop - part.start for part in region[:leading])):
        place = table[tuple(i + part.start for i, part in zip(index, region, strict=False))]
        part = place.read(tensors, box)
        if block is None:
            block = np.empty([s.stop - s.start for s in region], dtype or part.dtype)
        block[index] = part
    if block is None:
        raise AssertionError("a shard without any layer")
    return block


# -- writing ------------------------------------------------------------------------------------------


def save_hf(
    model: Model,
    params: Params,
    folder: Path | str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    dtype: str | None = None,
    config: Mapping[str, Any] = {},
) -> list[Path]:
    """A Hugging Face folder of the model: ``config.json`` and safetensors files, written one tensor at a time.

    ``dtype`` is one of `DTYPES`; the weights' own where it is not given. ``config`` are further keys of config.json.
    Every process of a run calls this, and the first one writes. Returns the files of weights.
    """
    dtypes = {name: np.dtype(array.dtype) for name, array in params.items()}

    def fetch(name: str, index: tuple[int, ...]) -> np.ndarray:
        return _on_host(params[name], index)

    return write_hf(model, fetch, dtypes, Path(folder), dtype=dtype, max_shard_bytes=max_shard_bytes, config=config)


def _on_host(array: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """A part of an array on this host; over several processes all of them ask for it together."""
    if not array.is_fully_addressable:
        return np.asarray(gathered_part(array, index).addressable_data(0))
    return np.asarray(array[index] if index else array)


def gathered_part(array: jax.Array, index: tuple[int, ...]) -> jax.Array:
    """A part of a sharded array, whole on every device. Compiled once for all parts of one shape."""
    assert isinstance(array.sharding, NamedSharding)
    return _gather(array.sharding.mesh)(array, tuple(np.int32(number) for number in index))


@cache
def _gather(mesh: Mesh | AbstractMesh) -> Callable[[jax.Array, tuple[np.int32, ...]], jax.Array]:
    def part(array: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
        for number in index:
            array = lax.dynamic_index_in_dim(array, number, keepdims=False)
        return array

    return jax.jit(part, out_shardings=NamedSharding(mesh, PartitionSpec()))


def write_hf(
    model: Model,
    fetch: Fetch,
    dtypes: Mapping[str, np.dtype],
    folder: Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Mapping[str, Any] = {},
) -> list[Path]:
    """`save_hf` from any source of layers."""
    model = text_model(model)
    if dtype:
        dtypes = dict.fromkeys(dtypes, DTYPES[dtype])
    entries = list(hf_entries(model, fetch, dtypes))
    if jax.process_index() != 0:
        for entry in entries:
            entry.make()
        return []
    files = write_checkpoint(folder, entries, max_bytes=max_shard_bytes)
    keys = config_from_model(model) | {"dtype": entries[0].dtype.name, **config}
    write_text_whole(folder / CONFIG, msgspec.json.format(msgspec.json.encode(keys)).decode() + "\n")
    return files


def hf_entries(model: Model, fetch: Fetch, dtypes: Mapping[str, np.dtype]) -> Iterator[Entry]:
    """Every tensor of the published form, each made when it is written."""
    parts: dict[str, list[Place]] = {}
    for place in places(model):
        parts.setdefault(place.tensor, []).append(place)
    for name, found in parts.items():
        dtype = dtypes[found[0].variable]
        yield Entry(name, found[0].shape, dtype, partial(_made, found, fetch, dtype))


def _made(found: Sequence[Place], fetch: Fetch, dtype: np.dtype) -> np.ndarray:
    stored = np.empty(found[0].shape, dtype)
    for place in found:
        place.put(stored, fetch(place.variable, place.leading))
    return stored


def convert_hf(
    model: Model, source: Path, folder: Path, *, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[Path]:
    """Another folder of the same weights in the published form: another dtype, other files. Tensor by tensor."""
    with open_checkpoint(source) as opened:
        tensors = with_unpacked(opened)
        table = checked_places(model, tensors)
        whole = {name: tuple(slice(0, size) for size in stacked_shape(weight)) for name, weight in rows(model).items()}

        def fetch(variable: str, index: tuple[int, ...]) -> np.ndarray:
            return table[variable][index].read(tensors, whole[variable][len(index) :])

        dtypes = {name: tensors[next(iter(found.values())).tensor].dtype for name, found in table.items()}
        keys = special_tokens(source)
        return write_hf(model, fetch, dtypes, folder, dtype=dtype, max_shard_bytes=max_shard_bytes, config=keys)


def special_tokens(folder: Path) -> dict[str, Any]:
    """The numbers of special tokens in the config.json of a folder."""
    keys = msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    keys = {**keys.get("text_config", {}), **keys}
    return {key: keys[key] for key in TOKEN_KEYS if keys.get(key) is not None}
