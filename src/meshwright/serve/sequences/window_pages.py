"""The pages of layers with a window: a request holds those of its window, and nodes of the prefix tree keep others for
the next request that begins behind them, until their room is needed."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class PageKeeper(Protocol):
    """What keeps a page: a node of the prefix tree."""

    window: "WindowPage | None"


class WindowPage:
    """A page by its number, how many requests have it in their window, and the node of the tree that keeps it."""

    __slots__ = ("node", "number", "users")

    def __init__(self, number: int) -> None:
        self.number, self.users = number, 1
        self.node: PageKeeper | None = None


class HeldWindow:
    """Pages of one request by place, None where its window is past them or it has not begun with them."""

    def __init__(self) -> None:
        self.pages: list[WindowPage | None] = []
        self.first = 0


class WindowPages:
    """Numbers ``num_pages`` pages from ``first`` on. There must be as many as requests hold, see
    `algebra.generation.cache.pages_of_windows`. ``chunked`` windows begin where chunks of as many positions do."""

    def __init__(self, window: int, page_len: int, num_pages: int, first: int = 0, *, chunked: bool = False) -> None:
        self.window, self.page_len, self.chunked = window, page_len, chunked
        self.free = list(range(first, first + num_pages))[::-1]
        self.idle: OrderedDict[WindowPage, None] = OrderedDict()

    def first_of(self, position: int) -> int:
        """Returns the place of the first page that a query at a position sees."""
        start = position // self.window * self.window if self.chunked else max(0, position - self.window + 1)
        return start // self.page_len

    def usable(self, pages: Sequence[WindowPage | None]) -> int:
        """Returns behind how many of these pages of a prompt a request can begin, as its window is there."""
        num_usable = run_len = 0
        for num_pages, page in enumerate(pages, start=1):
            run_len = run_len + 1 if page else 0
            if run_len >= num_pages - self.first_of(num_pages * self.page_len):
                num_usable = num_pages
        return num_usable

    def begin(self, held: HeldWindow, pages: Sequence[WindowPage | None], row: np.ndarray) -> None:
        """Lets a request begin behind these pages; ``row`` of the table of windows names those of its own window."""
        held.pages, held.first = [None] * len(pages), self.first_of(len(pages) * self.page_len)
        for page_index in range(held.first, len(pages)):
            held.pages[page_index] = page = pages[page_index]
            assert page is not None
            self.idle.pop(page, None)  # not there while another request has it
            page.users += 1
            row[page_index] = page.number

    def advance(self, held: HeldWindow, start: int, end: int, row: np.ndarray) -> None:
        """Lets go of what queries from ``start`` on do not see, and takes the pages of positions up to ``end``."""
        self._drop(held, self.first_of(start))  # first: what it frees may be taken below
        while len(held.pages) * self.page_len < end:
            page_number = self.free.pop() if self.free else self._evicted()
            row[len(held.pages)] = page_number
            held.pages.append(WindowPage(page_number))

    def share(self, held: HeldWindow, place: int, node: PageKeeper) -> None:
        """Lets a node of the tree keep the page that a request has there, if it has none yet."""
        page = held.pages[place] if place < len(held.pages) else None
        if page and node.window is None and page.node is None:
            page.node, node.window = node, page

    def clear(self, held: HeldWindow) -> None:
        """Lets go of all that a request holds."""
        self._drop(held, len(held.pages))
        held.pages, held.first = [], 0

    def forget(self, node: PageKeeper) -> None:
        """Frees the page of a node that leaves the tree once no window has it."""
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
