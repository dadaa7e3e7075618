"""Reads the dict of tensors in a ``pytorch_model.bin`` file without PyTorch, and runs no code that the file names.

The file is a zip archive of one pickle and the bytes of every storage, which are mapped into memory.
"""

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from meshwright.core.errors import InputError, first_line

MOST_PICKLE_BYTES = 2**26
_LOCAL_HEADER = 30
"""Bytes of a zip entry's local header before its name."""
_STORAGES: dict[str, Any] = {
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "DoubleStorage": np.float64,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}


class _Storage(NamedTuple):
    """The dtype of a storage, which a pickle names as a class of PyTorch."""

    dtype: np.dtype


def unpickled(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file by name, mapped into memory.

    Raises InputError, in one line, for a file from before PyTorch 1.6, a damaged file, a pickle of more than 64 MiB or
    one that names anything but tensors and dicts, big-endian numbers, and contents other than one dict of tensors.
    """
    if not zipfile.is_zipfile(path):
        raise InputError(
            f"{path} is not a zip archive: it is cut short, or from before PyTorch 1.6. Convert it with PyTorch: "
            f"torch.save(torch.load(FILE, weights_only=True), FILE)."
        )
    try:
        value = _read(path)
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{path} has no {error}: it is damaged or not PyTorch's. Fetch it again.") from None
    except Exception as error:  # a pickle may fail in any way
        raise InputError(f"{path} is damaged: {first_line(error)}. Fetch it again.") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}, not a dict of tensors. Give a file of weights by name.")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, np.ndarray):
            raise InputError(f"{path}: {name!r} is not a tensor. Give a file of weights only.")
    return dict(value)


def _read(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        entry_by_name = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if entry_by_name["data.pkl"].file_size > MOST_PICKLE_BYTES:
            raise InputError(f"{path}: its pickle has more than {MOST_PICKLE_BYTES >> 20} MiB. Give safetensors.")
        if "byteorder" in entry_by_name and archive.read(entry_by_name["byteorder"]) != b"little":
            raise InputError(f"{path} is not little-endian. Convert it to safetensors.")
        pickle_bytes = archive.read(entry_by_name["data.pkl"])

    def storage(key: str, dtype: np.dtype, size: int) -> np.ndarray:
        entry = entry_by_name[f"data/{key}"]
        with path.open("rb") as file:
            file.seek(entry.header_offset)
            zip_header = file.read(_LOCAL_HEADER)
        offset = entry.header_offset + _LOCAL_HEADER + sum(struct.unpack_from("<HH", zip_header, 26))
        if entry.compress_type != zipfile.ZIP_STORED or size * dtype.itemsize > entry.file_size:
            raise ValueError(f"storage {key} is compressed or too short")
        raw_bytes = np.memmap(path, np.uint8, "r", offset, (size * dtype.itemsize,)) if size else np.empty(0, np.uint8)
        return raw_bytes.view(dtype)

    return _Reader(BytesIO(pickle_bytes), path, storage).load()


class _Reader(pickle.Unpickler):
    """An unpickler that accepts the names of storages, tensors and ordered dicts, and refuses all other names."""

    def __init__(self, file: BytesIO, path: Path, storage: Callable[[str, np.dtype, int], np.ndarray]) -> None:
        super().__init__(file)
        self._path, self._storage = path, storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _Storage(np.dtype(_STORAGES[name]))
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            # a new function each time, since a pickle may set attributes of what it gets
            return (lambda *args: _tensor(*args)) if name == "_rebuild_tensor_v2" else (lambda tensor, *_: tensor)
        raise InputError(f"{self._path} names {module}.{name}, which is not read or run. Give safetensors.")

    def persistent_load(self, given: Any) -> np.ndarray:
        kind, storage, key, _, num_elements = given
        if kind != "storage" or not isinstance(storage, _Storage):
            raise ValueError("it refers to an object outside of the pickle that is not a storage")
        return self._storage(str(key), storage.dtype, int(num_elements))


def _tensor(storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> np.ndarray:
    """Returns a view of a storage; ``offset`` and ``strides`` count elements. Raises ValueError if it does not fit."""
    size_strides = list(zip(shape, strides, strict=True))
    last_index = offset + sum((size - 1) * step for size, step in size_strides)
    if min((offset, *shape, *strides)) < 0 or (all(shape) and last_index >= len(storage)):
        raise ValueError("a tensor is not within its storage")
    width = storage.itemsize
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, [step * width for step in strides], writeable=False)
