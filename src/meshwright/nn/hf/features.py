"""Reads feature files, the input of encoders like Whisper's in place of tokens."""

import math
from io import BytesIO

import numpy as np

from meshwright.core.errors import InputError


def read_features(npy: bytes, name: str) -> np.ndarray:
    """Returns the features in a NumPy file as float32 [features, 2 positions]; the file has floats of that shape or of
    [1, features, 2 positions], as Whisper's feature extractors write them. Raises InputError for other files; ``name``
    is the file's name in the message."""
    advice = "Save log-mel features by numpy.save, floats [bins, frames]."
    file = BytesIO(npy)
    try:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read_header(file)
    except ValueError:
        raise InputError(f"{name} is not a NumPy file with an array. {advice}") from None
    shape = shape[1:] if shape[:1] == (1,) else shape
    if dtype.kind != "f" or len(shape) != 2 or len(npy) - file.tell() != math.prod(shape) * dtype.itemsize:
        raise InputError(f"{name} has {dtype} {list(shape)} in {len(npy):,} bytes. {advice}")
    values = np.frombuffer(npy, dtype, offset=file.tell()).reshape(shape, order="F" if is_fortran else "C")
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(values).all():
        raise InputError(f"{name} has values that are not finite in float32. {advice}")
    return values
