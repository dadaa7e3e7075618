"""The cache pages of layers with a sliding or chunked window. A request uses the pages of its window; nodes of the
prefix tree keep earlier pages for later requests with the same prefix, until pages are needed."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class PageKeeper(Protocol):
    """A node of the prefix tree that keeps a window page."""

    window: "WindowPage | None"


class WindowPage:
    """A page: its number, how many requests have it in their window, and the tree node that keeps it, if any."""

    __slots__ = ("node", "number", "users")

    def __init__(self, number: int) -> None:
        self.number, self.users = number, 1
        self.node: PageKeeper | None = None


class HeldWindow:
    """The window pages of one request by page index; None before ``first``, where its window has moved on."""

    def __init__(self) -> None:
        self.pages: list[WindowPage | None] = []
        self.first = 0


class WindowPages:
    """A pool of ``num_pages`` pages, numbered from ``first`` on; it must have as many pages as all requests use, see
    `algebra.generation.cache.pages_of_windows`. A ``chunked`` window starts at a multiple of ``window`` positions."""

    def __init__(self, window: int, page_len: int, num_pages: int, first: int = 0, *, chunked: bool = False) -> None:
        self.window, self.page_len, self.chunked = window, page_len, chunked
        self.free = list(range(first, first + num_pages))[::-1]
        self.idle: OrderedDict[WindowPage, None] = OrderedDict()

    def first_of(self, position: int) -> int:
        """Returns the index of the first page that a query at ``position`` attends to."""
        start = position // self.window * self.window if self.chunked else max(0, position - self.window + 1)
        return start // self.page_len

    def usable(self, pages: Sequence[WindowPage | None]) -> int:
        """Returns the most leading pages of a prompt after which a request can start, as its window is cached."""
        num_usable = run_len = 0
        for num_pages, page in enumerate(pages, start=1):
            run_len = run_len + 1 if page else 0
            if run_len >= num_pages - self.first_of(num_pages * self.page_len):
                num_usable = num_pages
        return num_usable

    def begin(self, held: HeldWindow, pages: Sequence[WindowPage | None], row: np.ndarray) -> None:
        """Starts a request after these cached pages: takes those of its window and writes their numbers to ``row``."""
        held.pages, held.first = [None] * len(pages), self.first_of(len(pages) * self.page_len)
        for page_index in range(held.first, len(pages)):
            held.pages[page_index] = page = pages[page_index]
            assert page is not None
            self.idle.pop(page, None)  # absent while another request uses it
            page.users += 1
            row[page_index] = page.number

    def advance(self, held: HeldWindow, start: int, end: int, row: np.ndarray) -> None:
        """Drops pages that queries from ``start`` on do not attend to, and takes pages for positions up to ``end``."""
        self._drop(held, self.first_of(start))  # first: the pages that it frees may be taken below
        while len(held.pages) * self.page_len < end:
            page_number = self.free.pop() if self.free else self._evicted()
            row[len(held.pages)] = page_number
            held.pages.append(WindowPage(page_number))

    def share(self, held: HeldWindow, place: int, node: PageKeeper) -> None:
        """Makes a tree node keep the request's page at index ``place``, if neither has a partner yet."""
        page = held.pages[place] if place < len(held.pages) else None
        if page and node.window is None and page.node is None:
            page.node, node.window = node, page

    def clear(self, held: HeldWindow) -> None:
        """Drops all pages of a request."""
        self._drop(held, len(held.pages))
        held.pages, held.first = [], 0

    def forget(self, node: PageKeeper) -> None:
        """Detaches the page of a node that leaves the tree, and frees the page if no request uses it."""
        if page := node.window:
            page.node = node.window = None
            if not page.users:
                del self.idle[page]
                self.free.append(page.number)

    def _drop(self, held: HeldWindow, end_page: int) -> None:
        for page_index in range(held.first, min(end_page, len(held.pages))):
            page, held.pages[page_index] = held.pages[page_index], None
            assert page is not None
            page.users -= 1
            if not page.users and page.node:
                self.idle[page] = None
            elif not page.users:
                self.free.append(page.number)
        held.first = max(held.first, end_page)

    def _evicted(self) -> int:
        page, _ = self.idle.popitem(last=False)
        assert page.node is not None
        page.node.window = None
        page.node = None
        return page.number
