"""Safetensors files of a folder: parts of tensors read in place, and files written one tensor at a time."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from meshwright.core.errors import InputError
from meshwright.core.files import write_text_whole, write_whole

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: dict[str, np.dtype] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
}
"""Dtypes in which weights are written -> NumPy's."""
_CODES = {DTYPES["fp32"]: "F32", DTYPES["bf16"]: "BF16", DTYPES["fp16"]: "F16"}


class Tensor(Protocol):
    """A tensor of which parts can be read, as of NumPy's arrays."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray: ...


Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file that is mapped into memory, opened when it is first asked for."""

    name: str
    file: Callable[[], Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file().get_slice(self.name).get_shape())

    @property
    def dtype(self) -> np.dtype:
        return self[tuple(slice(0, min(1, size)) for size in self.shape)].dtype

    def __getitem__(self, box: tuple[slice, ...]) -> np.ndarray:
        part: np.ndarray = self.file().get_slice(self.name)[box]
        return part


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of a folder's safetensors files: only what is asked for is read."""
    with ExitStack() as stack:
        opened = cache(lambda path: stack.enter_context(_opened(path)))
        yield {name: StoredTensor(name, partial(opened, path)) for name, path in _files(folder).items()}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy").__enter__()
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is no whole safetensors file ({error}). Fetch or write it again.") from None


def _files(folder: Path) -> dict[str, Path]:
    """Name of a tensor -> the file that holds it: by the index where there is one, else from the files themselves."""
    index = folder / INDEX
    if index.is_file():
        try:
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{index} is no index of safetensors files: it needs a weight_map.") from None
        return {name: folder / file for name, file in found.items()}
    # Some makers lay the same weights under names of their own beside the file that transformers reads.
    single = folder / SINGLE
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise InputError(f"{folder} has no *.safetensors file. Give the folder of a model or of a finished run.")
    named = {}
    for path in paths:
        with _opened(path) as file:
            named.update(dict.fromkeys(file.keys(), path))
    return named


# -- writing ------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One tensor to write: its values are made when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def shards(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """Entries in order, cut into files of at most ``max_bytes``; a larger tensor has a file of its own."""
    found: list[list[Entry]] = [[]]
    held = 0
    for entry in entries:
        if found[-1] and held + entry.num_bytes > max_bytes:
            found.append([])
            held = 0
        found[-1].append(entry)
        held += entry.num_bytes
    return found


def write_checkpoint(folder: Path, entries: Sequence[Entry], *, max_bytes: int) -> list[Path]:
    """Safetensors files in ``folder``, with an index when there are several; one tensor is in memory at a time.

    Files of an earlier checkpoint there are removed in the end. Returns the files, in order.
    """
    parts = shards(entries, max_bytes)
    number = len(parts)
    names = [SINGLE] if number == 1 else [f"model-{i + 1:05}-of-{number:05}.safetensors" for i in range(number)]
    for name, part in zip(names, parts, strict=True):
        write_whole(folder / name, partial(_write_file, entries=part))
    if number > 1:
        weight_map = {entry.name: name for name, part in zip(names, parts, strict=True) for entry in part}
        total = sum(entry.num_bytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_text_whole(folder / INDEX, json.dumps(index, indent=1) + "\n")
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for stale in set(folder.glob("model*.safetensors")) - {folder / name for name in names}:
        stale.unlink()
    return [folder / name for name in names]


def _write_file(path: Path, entries: Sequence[Entry]) -> None:
    """The format: length of the header in 8 bytes, the header as JSON padded to 8, then the tensors end to end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        offsets = [at, at + entry.num_bytes]
        header[entry.name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            # A transposed view would be written as it lies.
            value = np.ascontiguousarray(entry.make(), dtype=entry.dtype)
            if value.shape != entry.shape:
                raise AssertionError(f"{entry.name} has shape {value.shape}, announced as {entry.shape}")
            file.write(value.reshape(-1).view(np.uint8).data)
