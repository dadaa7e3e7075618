"""Loads and saves Hugging Face checkpoints: devices read their own shards, tensors are written one at a time."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array
from msgspec.structs import replace

from meshwright.algebra.generation.stored import quantised_weights
from meshwright.algebra.program import Variable
from meshwright.algebra.transformer import local_name, rows
from meshwright.core.digests import write_sums
from meshwright.core.files import read_json, write_json_whole
from meshwright.core.host_memory import returning_freed_memory
from meshwright.core.progress import tracked
from meshwright.nn import quantisation
from meshwright.nn.hf.adapter import ADAPTER_CONFIG, ADAPTER_MODEL, adapter_config, base_folder, open_tensors
from meshwright.nn.hf.files import DTYPES, INDEX, Entry, Tensors, write_checkpoint, write_file
from meshwright.nn.hf.format import Box, StoredPart, checked_parts, mtp_copies, stored_parts
from meshwright.nn.hf.published import KeptPart, PublishedMatrix
from meshwright.nn.hf.tokenizer import CONFIG
from meshwright.nn.weights import STORED_DTYPES, Params, param_shapes, stacked_shape
from meshwright.spec.hf.write import TOKEN_KEYS, config_from_model, text_model
from meshwright.spec.model import Model
from meshwright.spec.weights import Weight, adapted, frozen_base

MAX_SHARD_BYTES = 5 * 10**9
"""Maximum size of one weight file, as in transformers."""

Fetch = Callable[[str, tuple[int, ...]], np.ndarray]
"""(variable, leading indices) -> one layer, or one expert of one layer, on the host."""


@dataclasses.dataclass(frozen=True)
class OutputsFirst:
    """The sharding ``own`` of a weight, or of one layer of it, as a matrix [outputs, inputs]; ``given`` shards its
    usual dims, the first ``inputs`` of which are inputs. It is loaded as a tuple, of one array without layers."""

    given: Sharding
    own: Sharding
    inputs: int


# -- reading ------------------------------------------------------------------------------------------


def load_params(
    model: Model,
    folder: Path | str,
    shardings: Mapping[str, Any] | None = None,
    dtype: Any = None,
    adapters: Sequence[Path] = (),
) -> Params:
    """Loads the weights of a checkpoint in their shardings, by default on the first device, in ``dtype`` if given.

    A model with an adapter is read from the adapter's folder and its base's; with several ``adapters``, from the base's
    folder and theirs. Shards are read from the mapped files one by one and put on their devices, so a host holds at
    most one shard in addition to its devices' memory. With a tuple of shardings in place of one, each layer of a
    variable is an array. Raises InputError for a tensor that is missing, misshapen or unknown, CannotRunError for files
    changed since they were written.
    """
    with returning_freed_memory(), open_tensors(model, Path(folder), adapters) as tensors:
        return read_params(model, tensors, shardings, dtype)


def read_params(
    model: Model, tensors: Tensors, shardings: Mapping[str, Any] | None = None, dtype: Any = None
) -> Params:
    """Loads weights as `load_params` does, from tensors of any kind: files, or a state dict of NumPy arrays."""
    parts_by_variable = checked_parts(model, tensors)
    if dtype is not None:
        matrices = {name: matrix for name, matrix in tensors.items() if isinstance(matrix, PublishedMatrix)}
        tensors = {**tensors, **{name: dataclasses.replace(x, dtype=np.dtype(dtype)) for name, x in matrices.items()}}
    default_sharding = SingleDeviceSharding(jax.devices()[0])
    pair_by_variable = quantised_weights(model, "")
    shape_by_name = quantisation.param_shapes(model, param_shapes(model), "")
    params: dict[str, Any] = {}
    for variable, weight in tracked(rows(model).items(), "loading weights"):
        parts_by_array: dict[str, Mapping[tuple[int, ...], Any]] = {variable: parts_by_variable[variable]}
        target_dtype = STORED_DTYPES.get(weight.dtype, dtype) if dtype is not None else None
        if variable in pair_by_variable:
            parts_by_array = _kept_parts(model, weight, pair_by_variable[variable], parts_by_variable[variable])
        for name, parts in parts_by_array.items():
            sharding = shardings[name] if shardings else default_sharding
            array_dtype = shape_by_name[name].dtype if variable in pair_by_variable else target_dtype
            array = _array(shape_by_name[name].shape, parts, tensors, sharding, array_dtype)
            params[name] = (array,) if isinstance(sharding, OutputsFirst) else array
    return params


def _kept_parts(
    model: Model, weight: Weight, pair: tuple[Variable, Variable], parts: Mapping[tuple[int, ...], StoredPart]
) -> dict[str, Mapping[tuple[int, ...], Any]]:
    """Returns, by array name, the parts of the values and of the scales of a weight that stays quantised as stored."""
    values_var, scale_var = pair
    part_dims = weight.dims[len(next(iter(parts))) - bool(weight.layers) :]
    group_size_of = {dim: model.dims[dim] // model.dims[f"{dim}g"] for dim in part_dims if f"{dim}g" in scale_var.dims}
    is_packed = values_var.dtype == "int4"
    strides = tuple(2 if is_packed and dim in group_size_of else 1 for dim in part_dims)
    scale_strides = tuple(1 if dim in scale_var.dims else group_size_of.get(dim, 0) for dim in part_dims)
    group_size = next(iter(group_size_of.values())) if is_packed else 0
    return {
        values_var.name: {index: KeptPart(part, strides, False, group_size) for index, part in parts.items()},
        scale_var.name: {index: KeptPart(part, scale_strides, True) for index, part in parts.items()},
    }


def _array(
    shape: tuple[int, ...], part_of: Mapping[tuple[int, ...], Any], tensors: Tensors, sharding: Any, dtype: Any
) -> Any:
    """Reads one variable shard by shard; devices with the same shard share one read. With a tuple of shardings, returns
    a tuple with an array per layer."""
    if isinstance(sharding, tuple):
        tables = ({index[1:]: part for index, part in part_of.items() if index[0] == n} for n in range(len(sharding)))
        layer_pairs = zip(tables, sharding, strict=True)
        return tuple(_array(shape[1:], parts, tensors, layer_sharding, dtype) for parts, layer_sharding in layer_pairs)
    outputs_first = sharding if isinstance(sharding, OutputsFirst) else None
    placement = outputs_first.given if outputs_first else sharding
    devices_by_region: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, box in placement.addressable_devices_indices_map(shape).items():
        region = tuple(dim_slice.indices(dim_size)[:2] for dim_slice, dim_size in zip(box or (), shape, strict=True))
        devices_by_region.setdefault(region, []).append(device)
    shards = []
    for region, devices in devices_by_region.items():
        block = _block(part_of, tensors, tuple(slice(*span) for span in region), dtype)
        if outputs_first:
            block = np.ascontiguousarray(block.reshape(math.prod(block.shape[: outputs_first.inputs]), -1).T)
        shards += [jax.device_put(block, device) for device in devices]
        jax.block_until_ready(shards[-1])  # the host's copy is free before the next one is made
    if outputs_first:
        num_inputs = math.prod(shape[: outputs_first.inputs])
        shape = math.prod(shape) // num_inputs, num_inputs
    return jax.make_array_from_single_device_arrays(shape, outputs_first.own if outputs_first else sharding, shards)


def _block(part_of: Mapping[tuple[int, ...], Any], tensors: Tensors, region: Box, dtype: Any) -> np.ndarray:
    """Reads a box ``region`` of a variable's array; each layer and expert of its leading dims is a stored part."""
    num_leading = len(next(iter(part_of)))
    box = region[num_leading:]
    region_values: np.ndarray | None = None
    for leading_index in np.ndindex(*(dim_slice.stop - dim_slice.start for dim_slice in region[:num_leading])):
        stored_part = part_of[tuple(i + dim_slice.start for i, dim_slice in zip(leading_index, region, strict=False))]
        values = stored_part.read(tensors, box)
        if region_values is None:
            region_values = np.empty([s.stop - s.start for s in region], dtype or values.dtype)
        region_values[leading_index] = values
    if region_values is None:
        raise AssertionError("a shard without any layer")
    return region_values


# -- writing ------------------------------------------------------------------------------------------


def save_hf(
    model: Model,
    params: Params,
    folder: Path | str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    config: Mapping[str, Any] = {},
) -> list[Path]:
    """Writes a Hugging Face folder: ``config.json``, safetensors files and their digests; one tensor at a time.

    ``config`` has further keys of config.json. Every process of a run calls this, and the first one writes. Returns the
    weight files, [] in other processes.
    """
    fetch, dtypes = source_of(params)
    return write_hf(model, fetch, dtypes, Path(folder), max_shard_bytes=max_shard_bytes, config=config)


def source_of(params: Params) -> tuple[Fetch, dict[str, np.dtype]]:
    """Returns a function that fetches one layer of weights from devices, and the dtypes of the weights."""

    def fetch(name: str, index: tuple[int, ...]) -> np.ndarray:
        array = params[name]
        if not array.is_fully_addressable:
            return np.asarray(gathered_part(array, index).addressable_data(0))
        return np.asarray(array[index] if index else array)

    return fetch, {name: np.dtype(array.dtype) for name, array in params.items()}


def gathered_part(array: Array, index: tuple[int, ...]) -> Array:
    """Gathers ``array[index]`` of a sharded array to every device; compiled once for all parts of one shape."""
    assert isinstance(array.sharding, NamedSharding)
    return _gather(array.sharding.mesh)(array, tuple(np.int32(leading_index) for leading_index in index))


@cache
def _gather(mesh: Mesh | AbstractMesh) -> Callable[[Array, tuple[np.int32, ...]], Array]:
    def part(array: Array, index: tuple[Array, ...]) -> Array:
        for leading_index in index:
            array = lax.dynamic_index_in_dim(array, leading_index, keepdims=False)
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
    """Writes a folder as `save_hf` does, from any function that fetches layers with these ``dtypes``.

    ``dtype``, one of `DTYPES`, replaces them, except for weights with a fixed dtype.
    """
    model = text_model(model)
    if dtype:
        own_dtype_names = {name for name, weight in rows(model).items() if weight.dtype}
        dtypes = {name: old_dtype if name in own_dtype_names else DTYPES[dtype] for name, old_dtype in dtypes.items()}
    entries = list(hf_entries(model, fetch, dtypes))
    if jax.process_index() != 0:
        for entry in entries:
            entry.make()
        return []
    weight_files = write_checkpoint(folder, entries, max_bytes=max_shard_bytes)
    config_keys = config_from_model(model) | {"dtype": entries[0].dtype.name, **config}
    write_json_whole(folder / CONFIG, config_keys)
    write_sums(folder, [file for file in (*weight_files, folder / INDEX, folder / CONFIG) if file.is_file()])
    return weight_files


def save_adapter(
    model: Model, fetch: Fetch, dtypes: Mapping[str, np.dtype], folder: Path, *, base: str, dtype: str | None = None
) -> list[Path]:
    """Writes the adapter of a model as PEFT does and returns its file; ``base`` is the folder of the frozen weights,
    which ``fetch`` need not provide."""
    adapter_rows = {name: row for name, row in rows(model).items() if row.part == "adapter"}
    entries = list(hf_entries(model, fetch, {name: DTYPES[dtype] if dtype else dtypes[name] for name in adapter_rows}))
    if jax.process_index() != 0:
        for entry in entries:
            entry.make()
        return []
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / ADAPTER_MODEL, entries)
    write_json_whole(folder / ADAPTER_CONFIG, adapter_config(model, base))
    write_sums(folder, [folder / ADAPTER_MODEL, folder / ADAPTER_CONFIG])
    return [folder / ADAPTER_MODEL]


def merged(model: Model, fetch: Fetch) -> Fetch:
    """Returns a function that fetches W + (alpha / rank) A B, summed in float32, from one for layers of W, A and B."""
    if model.lora is None:
        return fetch
    lora_scale, weight_by_name, a_of = model.lora.scale, rows(model), adapted(model)

    def read(name: str, index: tuple[int, ...]) -> np.ndarray:
        base_value, stem = fetch(name, index), local_name(weight_by_name[name])
        if stem not in a_of:
            return base_value
        suffix = name.removeprefix(stem)
        a, b = (fetch(f"{factor}{suffix}", index).astype(np.float32) for factor in (a_of[stem], f"{stem}_lora_b"))
        return (base_value + lora_scale * np.tensordot(a, b, 1)).astype(base_value.dtype)

    return read


def hf_entries(model: Model, fetch: Fetch, dtypes: Mapping[str, np.dtype]) -> Iterator[Entry]:
    """Yields each tensor of the published layout whose variables are in ``dtypes``; values are fetched when written."""
    parts_by_tensor: dict[str, list[StoredPart]] = {}
    copy_by_variable = mtp_copies(model)
    for part in stored_parts(model):
        if part.variable in dtypes:
            parts_by_tensor.setdefault(part.tensor, []).append(part)
            if part.variable in copy_by_variable:
                parts_by_tensor[copy_by_variable[part.variable]] = [part]
    for name, tensor_parts in parts_by_tensor.items():
        dtype = dtypes[tensor_parts[0].variable]
        yield Entry(name, tensor_parts[0].shape, dtype, partial(_made, tensor_parts, fetch, dtype))


def _made(parts: Sequence[StoredPart], fetch: Fetch, dtype: np.dtype) -> np.ndarray:
    tensor_values = np.empty(parts[0].shape, dtype)
    for part in parts:
        part.put(tensor_values, fetch(part.variable, part.leading))
    return tensor_values


def convert_hf(
    model: Model, source: Path, folder: Path, *, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[Path]:
    """Rewrites a folder in the published layout, in another dtype or file size, one tensor at a time; merges an adapter
    with its base. Returns the weight files."""
    token_keys = token_numbers(base_folder(source) if model.lora else source)
    with open_source(model, source) as (fetch, dtypes):
        fetch, model = merged(model, fetch), frozen_base(model)
        return write_hf(model, fetch, dtypes, folder, dtype=dtype, max_shard_bytes=max_shard_bytes, config=token_keys)


def with_stored_mtp(model: Model, folder: Path) -> Model:
    """Returns the model, with its multi-token-prediction layer (loss weight 1) if the folder has all its tensors."""
    model_with_mtp = replace(model, mtp_weight=1.0) if model.num_mtp_layers == 1 else model
    with open_tensors(model, folder) as tensors:
        return model_with_mtp if all(part.tensor in tensors for part in stored_parts(model_with_mtp)) else model


@contextmanager
def open_source(model: Model, folder: Path) -> Iterator[tuple[Fetch, dict[str, np.dtype]]]:
    """Opens the weights of a folder: a function that fetches one layer, and the dtypes of the weights."""
    with open_tensors(model, folder) as tensors:
        parts_of = checked_parts(model, tensors)
        box_of = {name: tuple(slice(0, size) for size in stacked_shape(weight)) for name, weight in rows(model).items()}

        def fetch(variable: str, index: tuple[int, ...]) -> np.ndarray:
            return parts_of[variable][index].read(tensors, box_of[variable][len(index) :])

        yield fetch, {name: tensors[next(iter(parts.values())).tensor].dtype for name, parts in parts_of.items()}


def token_numbers(folder: Path) -> dict[str, Any]:
    """Returns the special token ids in the config.json of a folder."""
    config = read_json(folder / CONFIG, "Give the folder of a model.")
    config = {**config.get("text_config", {}), **config}
    return {key: config[key] for key in TOKEN_KEYS if config.get(key) is not None}
