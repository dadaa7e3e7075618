"""The requests that an engine has, and the owners of their sequences: places of the mesh with slots and pages of their
own."""

from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.request import ActiveRequest
from meshwright.batching.scheduler import Scheduler
from meshwright.serve.request import TokenLogprob, TokenRequest
from meshwright.serve.sequences.prefix_tree import PrefixTree
from meshwright.serve.sequences.window_pages import HeldWindow, WindowPages


class Tables(NamedTuple):
    """The pages of each slot, [slots, Bp]: those of all layers, or of those that have no window, and of windows; and
    those of its source, [slots, Bx]."""

    pages: np.ndarray
    windows: np.ndarray
    sources: np.ndarray


class SequenceOwner:
    """Schedules the sequences of one of ``num_owners`` owners, within its share of an engine's ``limits``; ``windows``
    are the positions of a window, the pages of all owners for these, and whether windows are chunks.

    Its slots and pages have the numbers that they have among those of all owners.
    """

    def __init__(
        self, limits: SchedulerLimits, number: int, num_owners: int, *, num_on_host: int, windows: tuple[int, int, bool]
    ) -> None:
        self.limits = quota = replace(
            limits,
            max_requests=limits.max_requests // num_owners,
            num_pages=limits.num_pages // num_owners,
            token_budget=limits.token_budget // num_owners,
        )
        self.pages = PrefixTree(quota.num_pages, quota.page_len, num_on_host // num_owners, number * quota.num_pages)
        window_len, num_pages, chunked = windows
        if num_pages:
            pages_each = num_pages // num_owners
            first_page = number * pages_each
            self.pages.windows = WindowPages(window_len, quota.page_len, pages_each, first_page, chunked=chunked)
        self.scheduler = Scheduler(quota, self.pages)
        self.free_slots = list(range(number * quota.max_requests, (number + 1) * quota.max_requests))[::-1]

    def order(self, request: TokenRequest, adapter: int) -> tuple[bool, int, int]:
        """Returns what is least of the owner that a request should have: one with a free slot, which knows most of its
        prompt, or its source, and has the fewest requests."""
        num_requests = self.scheduler.load
        num_known = self.pages.num_known(request.prompt, adapter) + (request.source in self.pages.sources)
        return num_requests >= self.limits.max_requests, -num_known, num_requests


class Live:
    """A request in the engine: its known tokens, those that are in the cache, and its place.

    ``produced`` counts tokens drawn, of which the last one or two may not have been read.
    """

    def __init__(
        self, number: int, request: TokenRequest, owner: SequenceOwner, active: ActiveRequest, adapter: int
    ) -> None:
        self.number, self.request, self.owner, self.active, self.adapter = number, request, owner, active, adapter
        self.tokens = list(request.prompt)
        self.computed = self.produced = 0
        self.slot, self.admitted_s = -1, 0.0
        self.reads_source = False  # in the step of its admission, before its rows
        self.num_hit = 0  # tokens that the prefix tree had
        self.pages: list[int] = []
        self.window = HeldWindow()
        self.answer = request.grammar.deep_copy() if request.grammar else None
        self.drafts: list[int] = []  # of the step that is dispatched
        self.prompt_logprobs: list[TokenLogprob] = []
        self.is_closed = self.is_done = False  # its output is complete; the scheduler has let it go

    def share_pages(self) -> None:
        """Lets the tree share the pages of the tokens that are known now."""
        self.owner.pages.enter(self.number, self.tokens, self.pages, self.window, adapter=self.adapter)

    def begin(self, tables: Tables) -> None:
        """Takes the pages that the tree has of the prompt, and those of its source."""
        nodes, slot = self.owner.pages.held(self.number), self.slot
        self.pages += [node.page for node in nodes]
        tables.pages[slot, : len(nodes)] = self.pages
        if windows := self.owner.pages.windows:
            windows.begin(self.window, [node.window for node in nodes], tables.windows[slot])
        if source := self.owner.pages.sources.get(self.request.source):
            self.reads_source = not source.pages
            while len(source.pages) < source.num_pages:
                source.pages.append(self.owner.pages.free.pop())
            tables.sources[slot, : source.num_pages] = source.pages

    def take_pages(self, tables: Tables, end: int, page_len: int) -> None:
        """Takes the pages of the first ``end`` positions. The scheduler has counted them."""
        while len(self.pages) * page_len < end:
            page_number = self.owner.pages.free.pop()
            tables.pages[self.slot, len(self.pages)] = page_number
            self.pages.append(page_number)

    def vacate(self) -> None:
        """Frees the slot and the pages, of which full ones stay in the tree. Steps that are dispatched already write
        there before others do."""
        if self.slot >= 0:  # one that waits has none
            self.owner.free_slots.append(self.slot)
            self.owner.pages.release(self.number, self.pages, self.tokens[: self.computed])
            if windows := self.owner.pages.windows:
                windows.clear(self.window)
        self.pages.clear()  # the same list stays: the tree reads numbers of pages from it
        self.slot, self.computed = -1, 0

    @property
    def output(self) -> list[int]:
        """Tokens after the prompt that have been read."""
        return self.tokens[len(self.request.prompt) :]
