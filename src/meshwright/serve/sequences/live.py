"""The state of a request in an engine, and the owners of sequences: parts of the mesh with separate slots and pages."""

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
    """Page tables. ``pages`` [slots, Bp] are for all layers, or for layers without a window where layers with a window
    have the table ``windows`` [slots, Bp]; ``sources`` [slots, Bx] are for encoder sources."""

    pages: np.ndarray
    windows: np.ndarray
    sources: np.ndarray


class SequenceOwner:
    """Schedules the sequences of owner ``number`` of ``num_owners``, within 1 / num_owners of an engine's ``limits``.

    ``windows`` = (positions of a window, window pages of all owners, whether windows are chunks). Slots and pages are
    numbered over all owners.
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
        """Returns a key; a request belongs to the owner with the least: with a free slot, then most known pages of the
        prompt (its source counts as one), then fewest requests."""
        num_requests = self.scheduler.load
        num_known = self.pages.num_known(request.prompt, adapter) + (request.source in self.pages.sources)
        return num_requests >= self.limits.max_requests, -num_known, num_requests


class Live:
    """A request in the engine: its ``tokens`` known on the host, how many are ``computed`` (cached), slot and pages.

    ``produced`` counts drawn tokens, of which the host may not have read the last one or two yet.
    """

    def __init__(
        self, number: int, request: TokenRequest, owner: SequenceOwner, active: ActiveRequest, adapter: int
    ) -> None:
        self.number, self.request, self.owner, self.active, self.adapter = number, request, owner, active, adapter
        self.tokens = list(request.prompt)
        self.computed = self.produced = 0
        self.slot, self.admitted_s = -1, 0.0
        self.reads_source = False  # the step that admits it first runs the encoder on its source
        self.num_hit = 0  # prompt tokens found in the prefix tree
        self.pages: list[int] = []
        self.window = HeldWindow()
        self.answer = request.grammar.deep_copy() if request.grammar else None
        self.drafts: list[int] = []  # of the step that is dispatched
        self.prompt_logprobs: list[TokenLogprob] = []
        self.is_closed = self.is_done = False  # closed: its output is complete; done: it has left the scheduler

    def share_pages(self) -> None:
        """Registers the tokens known now as the prompt whose full pages the prefix tree may share."""
        self.owner.pages.enter(self.number, self.tokens, self.pages, self.window, adapter=self.adapter)

    def begin(self, tables: Tables) -> None:
        """Adds the prompt pages pinned in the prefix tree, and the pages of its source, to the slot's tables."""
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
        """Takes free pages until the slot has ``end`` positions. The scheduler has reserved them."""
        while len(self.pages) * page_len < end:
            page_number = self.owner.pages.free.pop()
            tables.pages[self.slot, len(self.pages)] = page_number
            self.pages.append(page_number)

    def vacate(self) -> None:
        """Frees the slot and the pages; full pages stay in the prefix tree. Steps in flight may still write to them,
        but always before the steps of their next request."""
        if self.slot >= 0:  # a waiting request has no slot
            self.owner.free_slots.append(self.slot)
            self.owner.pages.release(self.number, self.pages, self.tokens[: self.computed])
            if windows := self.owner.pages.windows:
                windows.clear(self.window)
        self.pages.clear()  # cleared in place: the tree reads page numbers from this list
        self.slot, self.computed = -1, 0

    @property
    def output(self) -> list[int]:
        """The drawn tokens that the host has read."""
        return self.tokens[len(self.request.prompt) :]
