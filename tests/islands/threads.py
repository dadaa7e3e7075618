"""Groups of threads in one process, with the interface of islands that are connected."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import numpy as np

from meshwright.islands.codec import FP32, Codec, Encoded
from meshwright.islands.exchange import ALIGNED

Result = TypeVar("Result")
DEADLINE_S = 60.0


class Shared:
    """What the members of a group share: the chunks that each encoded, the sums that each owns, bytes sent."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size)
        self.chunks: list[list[Encoded]] = [[] for _ in range(size)]
        self.sums: list[Encoded] = [b""] * size
        self.sent_bytes = [0] * size
        self.num_sums = [0] * size


class ThreadMember:
    """A member of a group whose islands are threads: chunks go to their owner, who sums them and sends the sum."""

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank, self.size, self.shared = rank, shared.barrier.parties, shared

    def sum(self, arrays: Sequence[np.ndarray], *, codec: Codec = FP32) -> list[np.ndarray]:
        """See `islands.group.IslandGroup.sum`."""
        shared, rank = self.shared, self.rank
        flat = np.concatenate([np.asarray(array, np.float32).reshape(-1) for array in arrays])
        ends = [-(-flat.size * (i + 1) // (self.size * ALIGNED)) * ALIGNED for i in range(self.size - 1)]
        own_chunks = np.split(flat, ends)  # as `exchange.Links` does
        sizes = [chunk.size for chunk in own_chunks]
        shared.num_sums[rank] += 1
        shared.chunks[rank] = [bytes(codec.encode(chunk)) for chunk in own_chunks]
        self._meet()
        total = np.zeros(sizes[rank], np.float32)
        for member in range(self.size):
            total += codec.decode(shared.chunks[member][rank], sizes[rank])
        shared.sums[rank] = bytes(codec.encode(total))
        others = [len(chunk) for owner, chunk in enumerate(shared.chunks[rank]) if owner != rank]
        shared.sent_bytes[rank] += sum(others) + (self.size - 1) * len(shared.sums[rank])
        self._meet()
        decoded = [codec.decode(encoded, size) for encoded, size in zip(shared.sums, sizes, strict=True)]
        self._meet()
        parts = np.split(np.concatenate(decoded), np.cumsum([array.size for array in arrays])[:-1])
        return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def _meet(self) -> None:
        try:
            self.shared.barrier.wait(DEADLINE_S)
        except BrokenBarrierError:
            raise ConnectionError(f"an island of {self.size} is lost") from None


def members(size: int) -> list[ThreadMember]:
    """Returns the members of a new group."""
    shared = Shared(size)
    return [ThreadMember(rank, shared) for rank in range(size)]


def together(functions: Sequence[Callable[[], Result]]) -> list[Result]:
    """Returns the results of functions that run at the same time, each in a thread."""
    with ThreadPoolExecutor(len(functions)) as threads:
        futures = [threads.submit(function) for function in functions]
    return [future.result() for future in futures]
