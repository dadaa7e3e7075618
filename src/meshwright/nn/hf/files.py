"""Reads parts of tensors from a folder's weight files, and writes safetensors files one tensor at a time."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from meshwright.core.errors import InputError
from meshwright.core.files import read_json, write_text_whole, write_whole
from meshwright.core.progress import tracked
from meshwright.nn.hf.pickled import unpickled

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
"""Weight files from before safetensors, read only if a folder has no safetensors file."""

DTYPES: dict[str, np.dtype] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}
"""Names of dtypes in which weights are written -> NumPy dtype."""
_NARROW = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
           "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu)}  # fmt: skip
"""Code of a dtype that safetensors does not read as a NumPy array -> NumPy dtype."""
_CODES = {DTYPES["fp32"]: "F32", DTYPES["bf16"]: "BF16", DTYPES["fp16"]: "F16"}


class Tensor(Protocol):
    """A tensor of which boxes can be read; a NumPy array is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray: ...


Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file mapped into memory; ``file`` opens it at the first access."""

    name: str
    file: Callable[[], Any]
    path: Path

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file().get_slice(self.name).get_shape())

    @property
    def dtype(self) -> np.dtype:
        code = self.file().get_slice(self.name).get_dtype()
        dtype_of = _NARROW | {name: dtype for dtype, name in _CODES.items()}
        return dtype_of[code] if code in dtype_of else self[tuple(slice(0, min(1, size)) for size in self.shape)].dtype

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        tensor_slice = self.file().get_slice(self.name)
        if narrow_dtype := _NARROW.get(tensor_slice.get_dtype()):
            return np.asarray(_mapped(self.path, self.name, narrow_dtype)[box])
        values: np.ndarray = tensor_slice[box]
        return values


def _mapped(path: Path, name: str, dtype: np.dtype) -> np.ndarray:
    with path.open("rb") as file:
        (header_len,) = struct.unpack("<Q", file.read(8))
        header_entry = json.loads(file.read(header_len))[name]
    start_byte, end_byte = header_entry["data_offsets"]
    tensor_bytes = np.memmap(path, np.uint8, "r", 8 + header_len + start_byte, (end_byte - start_byte,))
    return tensor_bytes.view(dtype).reshape(header_entry["shape"])


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[dict[str, Tensor]]:
    """Yields the tensors of a folder's files by name; only the parts that are indexed are read."""
    with ExitStack() as stack:
        open_file = cache(lambda path: stack.enter_context(_opened(path)))
        unpickle = cache(unpickled)
        yield {
            name: unpickle(path)[name] if path.suffix == ".bin" else StoredTensor(name, partial(open_file, path), path)
            for name, path in _files(folder).items()
        }


def _opened(path: Path) -> Any:
    try:
        if not path.is_file():
            raise InputError(f"{path} is missing, and the index of its folder names it. Fetch it.")
        return safe_open(path, framework="numpy").__enter__()
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is not a whole safetensors file ({error}). Fetch or write it again.") from None


def _names(path: Path) -> set[str]:
    if path.suffix == ".bin":
        return set(unpickled(path))
    with _opened(path) as file:
        return set(file.keys())


def _files(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor, among the files of the index, else the single file, else all files.

    Raises InputError for a file that is missing, cut short, or without a tensor that the index places in it, and for
    two files with the same tensor.
    """
    safe_paths = sorted(folder.glob("*.safetensors"))
    # Some folders hold the same weights again under other names; transformers reads these files.
    index_name, single_name = (INDEX, SINGLE) if safe_paths or (folder / INDEX).is_file() else (PICKLED_INDEX, PICKLED)
    index_path, single_path = folder / index_name, folder / single_name
    indexed_paths = _indexed(folder, index_path) if index_path.is_file() else {}
    paths = sorted({*indexed_paths.values()}) or ([single_path] if single_path.is_file() else safe_paths)
    if not paths:
        raise InputError(
            f"{folder} has neither *.safetensors nor {PICKLED}. Give the folder of a model or of a finished run."
        )
    path_of: dict[str, Path] = {}
    for path in paths:
        for name in _names(path):
            if name in path_of:
                raise InputError(f"{path_of[name]} and {path} both have the tensor {name}. Remove one of the files.")
            path_of[name] = path
    for name, path in indexed_paths.items():
        if path_of.get(name) != path:
            raise InputError(f"{path} has no tensor {name}, which its index places there. Fetch both again.")
    return path_of


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    try:
        weight_map = msgspec.convert(read_json(index, "Fetch it again.").get("weight_map"), dict[str, str])
    except msgspec.ValidationError:
        raise InputError(f"{index} is not an index of weight files: it has no weight_map. Fetch it again.") from None
    for file_name in weight_map.values():
        if Path(file_name).name != file_name:
            raise InputError(f"{index} names {file_name!r}, which is not a file of its folder. Fetch the index again.")
    return {tensor: folder / file_name for tensor, file_name in weight_map.items()}


# -- writing ------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One tensor to write; ``make`` returns its values and is called just before they are written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def shards(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """Splits entries, in order, into files of at most ``max_bytes``; a larger tensor gets a file for itself."""
    file_entries: list[list[Entry]] = [[]]
    file_bytes = 0
    for entry in entries:
        if file_entries[-1] and file_bytes + entry.num_bytes > max_bytes:
            file_entries.append([])
            file_bytes = 0
        file_entries[-1].append(entry)
        file_bytes += entry.num_bytes
    return file_entries


def write_checkpoint(folder: Path, entries: Sequence[Entry], *, max_bytes: int) -> list[Path]:
    """Writes safetensors files, with an index if there are several, and returns them; at most one tensor is in memory.

    Removes files of an earlier checkpoint in the folder afterwards.
    """
    file_entries = shards(entries, max_bytes)
    count = len(file_entries)
    file_names = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for name, shard in zip(file_names, file_entries, strict=True):
        write_file(folder / name, shard)
    if count > 1:
        weight_map = {entry.name: name for name, shard in zip(file_names, file_entries, strict=True) for entry in shard}
        total_bytes = sum(entry.num_bytes for entry in entries)
        index_keys = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_text_whole(folder / INDEX, json.dumps(index_keys, indent=1) + "\n")
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for stale_path in set(folder.glob("model*.safetensors")) - {folder / name for name in file_names}:
        stale_path.unlink()
    return [folder / name for name in file_names]


def write_file(path: Path, entries: Sequence[Entry]) -> None:
    """Writes one safetensors file atomically; at most one tensor is in memory.

    The file has the length of the header in 8 bytes, the header as JSON padded to 8 bytes, then the tensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        offsets = [offset, offset + entry.num_bytes]
        header[entry.name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        offset += entry.num_bytes
    header_bytes = json.dumps(header, separators=(",", ":")).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header_bytes)) + header_bytes)
            for entry in tracked(entries, "writing weights"):
                # The bytes of a transposed view are in the order of its base.
                values = np.ascontiguousarray(entry.make(), dtype=entry.dtype)
                if values.shape != entry.shape:
                    raise AssertionError(f"{entry.name} has shape {values.shape}, announced as {entry.shape}")
                file.write(values.reshape(-1).view(np.uint8).data)

    write_whole(path, write)
