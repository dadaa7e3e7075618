"""Counts the pages of a KV cache: those of shared prefixes stay until their room is needed, those of sources while a
request reads them."""

from collections import OrderedDict
from collections.abc import Hashable


class HeldSource:
    """A source that requests read: its pages by count, their numbers once an engine has given it some, and its
    users."""

    __slots__ = ("num_pages", "pages", "users")

    def __init__(self, num_pages: int) -> None:
        self.num_pages, self.users = num_pages, 0
        self.pages: list[int] = []


class PagePool:
    """Free pages, and prefixes with the pages that hold them.

    A prefix in use is pinned. An idle one may be evicted, the one that has been idle longest first. The pool counts
    and does not number pages.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._pages: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_idle = 0
        self.sources: dict[Hashable, HeldSource] = {}

    @property
    def room(self) -> int:
        """Pages that can be taken: free ones and those of idle prefixes."""
        return self.num_free + self._num_idle

    def room_beside(self, prefix: int | None) -> int:
        """Returns the pages that can be taken while a prefix is in use."""
        return self.room - (self.kept(prefix) if prefix in self._idle else 0)

    def take(self, num_pages: int) -> None:
        """Takes pages, from idle prefixes if need be. The caller has checked `room`."""
        while self.num_free < num_pages:
            prefix, _ = self._idle.popitem(last=False)
            del self._users[prefix]
            num_evicted = self._pages.pop(prefix)
            self._num_idle -= num_evicted
            self.num_free += num_evicted
        self.num_free -= num_pages

    def give(self, num_pages: int) -> None:
        """Frees pages that `take` returned."""
        self.num_free += num_pages

    def hold_source(self, source: Hashable, num_pages: int) -> bool:
        """Counts one more user of a source; returns True for the first, who takes its pages. The caller has checked
        `room`."""
        is_new = source not in self.sources
        if is_new:
            self.take(num_pages)
        self.sources.setdefault(source, HeldSource(num_pages)).users += 1
        return is_new

    def drop_source(self, source: Hashable) -> list[int]:
        """Counts one user less of a source; the last one frees its pages, whose numbers are returned."""
        held_source = self.sources[source]
        held_source.users -= 1
        if held_source.users:
            return []
        self.give(held_source.num_pages)
        return self.sources.pop(source).pages

    def kept(self, prefix: int | None) -> int:
        """Returns the pages of a prefix that the pool holds, 0 if none."""
        return 0 if prefix is None else self._pages.get(prefix, 0)

    def usable(self, prefix: int | None, most: int) -> int:
        """Returns with how many of the pages of a prefix that the pool holds, at most ``most``, a request can begin."""
        return min(self.kept(prefix), most)

    def pin(self, prefix: int, num_pages: int) -> None:
        """Counts one more user of ``num_pages`` of a prefix that the pool holds, and so of all of it."""
        if prefix in self._idle:
            del self._idle[prefix]
            self._num_idle -= self._pages[prefix]
        self._users[prefix] += 1

    def unpin(self, prefix: int) -> None:
        """Counts one user less; a prefix without users is idle."""
        self._users[prefix] -= 1
        if not self._users[prefix]:
            self._idle[prefix] = None
            self._num_idle += self._pages[prefix]

    def keep(self, prefix: int, num_pages: int) -> None:
        """Turns pages that a user of a prefix has taken into pages of it; one that is new has this user alone."""
        self._pages[prefix] = self.kept(prefix) + num_pages
        self._users.setdefault(prefix, 1)
