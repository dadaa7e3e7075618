"""How float32 values travel between islands."""

from typing import Protocol

import numpy as np


class Codec(Protocol):
    """Turns float32 values into bytes and back."""

    def encode(self, values: np.ndarray) -> memoryview: ...

    def decode(self, buffer: memoryview, size: int) -> np.ndarray: ...

    def num_bytes(self, size: int) -> int: ...


class Float32:
    """The values as they are."""

    def encode(self, values: np.ndarray) -> memoryview:
        return memoryview(np.ascontiguousarray(values, np.float32)).cast("B")

    def decode(self, buffer: memoryview, size: int) -> np.ndarray:
        return np.frombuffer(buffer, np.float32, size)

    def num_bytes(self, size: int) -> int:
        return 4 * size


FP32 = Float32()
