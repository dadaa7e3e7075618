"""Reading ahead: the next items are made in one background thread while the present one is used."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """``(number, make(number))`` for start, start + stride, ... without end, in this order.

    A context manager, within which one thread keeps ``depth`` items ready; at its end the thread is gone and what
    it made is dropped. An error of ``make`` is raised where its item is asked for.
    """

    def __init__(self, make: Callable[[int], T], *, start: int, stride: int, depth: int = 2) -> None:
        self._make, self._next, self._stride, self._depth = make, start, stride, depth
        self._ready: deque[tuple[int, Future[T]]] = deque()
        # One worker, so that items are made in order and `make` need not be safe for several threads.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")

    def __enter__(self) -> Self:
        self._fill()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ready.clear()

    @property
    def is_ready(self) -> bool:
        """Whether the next item is there without a wait."""
        return bool(self._ready) and self._ready[0][1].done()

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return self

    def __next__(self) -> tuple[int, T]:
        self._fill()
        number, item = self._ready.popleft()
        self._fill()
        return number, item.result()

    def _fill(self) -> None:
        while len(self._ready) < self._depth:
            self._ready.append((self._next, self._pool.submit(self._make, self._next)))
            self._next += self._stride
