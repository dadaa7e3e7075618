"""Counts the pages of a KV cache. Pages of shared prefixes stay until they are needed; pages of encoder sources, while
a request reads them."""

from collections import OrderedDict
from collections.abc import Hashable


class HeldSource:
    """An encoder source that requests read: its number of pages, their numbers once an engine has assigned them, and
    its number of users."""

    __slots__ = ("num_pages", "pages", "users")

    def __init__(self, num_pages: int) -> None:
        self.num_pages, self.users = num_pages, 0
        self.pages: list[int] = []


class PagePool:
    """Counts free pages, and the pages of cached prefixes, without numbering them.

    A prefix in use is pinned; a prefix without users is idle, and the longest idle is evicted first when pages are
    needed.
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
        """Pages that can be taken: free pages and pages of idle prefixes."""
        return self.num_free + self._num_idle

    def room_beside(self, prefix: int | None) -> int:
        """Returns `room` while this prefix is pinned."""
        return self.room - (self.kept(prefix) if prefix in self._idle else 0)

    def take(self, num_pages: int) -> None:
        """Takes pages, evicting idle prefixes if too few are free. The caller has checked `room`."""
        while self.num_free < num_pages:
            prefix, _ = self._idle.popitem(last=False)
            del self._users[prefix]
            num_evicted = self._pages.pop(prefix)
            self._num_idle -= num_evicted
            self.num_free += num_evicted
        self.num_free -= num_pages

    def give(self, num_pages: int) -> None:
        """Frees pages that were taken by `take`."""
        self.num_free += num_pages

    def hold_source(self, source: Hashable, num_pages: int) -> bool:
        """Adds a user to a source; for the first user takes its pages and returns True. The caller has checked
        `room`."""
        is_new = source not in self.sources
        if is_new:
            self.take(num_pages)
        self.sources.setdefault(source, HeldSource(num_pages)).users += 1
        return is_new

    def drop_source(self, source: Hashable) -> list[int]:
        """Removes a user of a source; the last one frees its pages. Returns the numbers of the freed pages."""
        held_source = self.sources[source]
        held_source.users -= 1
        if held_source.users:
            return []
        self.give(held_source.num_pages)
        return self.sources.pop(source).pages

    def kept(self, prefix: int | None) -> int:
        """Returns the number of cached pages of a prefix, 0 if none."""
        return 0 if prefix is None else self._pages.get(prefix, 0)

    def usable(self, prefix: int | None, most: int) -> int:
        """Returns how many cached pages of a prefix, at most ``most``, a request can reuse."""
        return min(self.kept(prefix), most)

    def pin(self, prefix: int, num_pages: int) -> None:
        """Adds a user to a cached prefix, which pins all of its pages; ``num_pages`` is how many the user needs."""
        if prefix in self._idle:
            del self._idle[prefix]
            self._num_idle -= self._pages[prefix]
        self._users[prefix] += 1

    def unpin(self, prefix: int) -> None:
        """Removes a user of a prefix; a prefix without users is idle."""
        self._users[prefix] -= 1
        if not self._users[prefix]:
            self._idle[prefix] = None
            self._num_idle += self._pages[prefix]

    def keep(self, prefix: int, num_pages: int) -> None:
        """Adds pages that a user has taken to a prefix; a new prefix gets this one user."""
        self._pages[prefix] = self.kept(prefix) + num_pages
        self._users.setdefault(prefix, 1)
