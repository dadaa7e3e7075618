"""How far the work of this process is: loops count what they have done, and the command line shows it."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from threading import current_thread, main_thread
from time import perf_counter
from typing import TypeVar

_Item = TypeVar("_Item")


class RunningWork:
    """Work that has begun, of which ``done`` of ``total`` items are done; a total of 0 means unknown.

    ``rated_s`` is the time from which the seconds of an item are counted: the last one at which none was done.
    """

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self.start_s = self.rated_s = perf_counter()

    def at(self, done: int, total: int) -> None:
        """Sets the counts."""
        self.done, self.total = done, total
        if not done:
            self.rated_s = perf_counter()


_hooks: list[Callable[[Sequence[RunningWork]], None]] = []
_running: list[RunningWork] = []


@contextmanager
def working(what: str, total: int = 0) -> Iterator[RunningWork]:
    """Returns a context of running work, such as "pricing strategies"; calls the hook when the work begins and ends.

    Calls no hook outside of `shown_by`, nor in threads other than the main one.
    """
    work = RunningWork(what, total)
    if not _hooks or current_thread() is not main_thread():
        yield work
        return
    _running.append(work)
    try:
        _hooks[-1](_running)
        yield work
    finally:
        _running.remove(work)
        _hooks[-1](_running)


def tracked(items: Iterable[_Item], what: str, total: int = 0) -> Iterator[_Item]:
    """Yields the items, and counts as done those that the caller has finished, as `working` on ``what``.

    ``total`` is the number of items, where they have no length.
    """
    with working(what, len(items) if isinstance(items, Sized) else total) as work:
        for item in items:
            yield item
            work.done += 1


@contextmanager
def shown_by(hook: Callable[[Sequence[RunningWork]], None]) -> Iterator[None]:
    """Returns a context in which ``hook`` gets all running work, outermost first, whenever some begins or ends."""
    _hooks.append(hook)
    try:
        yield
    finally:
        _hooks.pop()
