"""Thousands of random schedules on an engine whose step computes nothing: no page is lost, none is given twice."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.algebra.generation.cache import pages_of_windows
from meshwright.batching.limits import SchedulerLimits
from meshwright.parallel.generation.program_store import ProgramStore
from meshwright.serve.drawing.drawer import Drawn
from meshwright.serve.engine import Engine
from meshwright.serve.request import TokenRequest

PAGE_LEN, MAX_LEN, SLOTS, WINDOW = 4, 40, 5, 6


class CheckedStep:
    """Stands in for a packed step and what draws; a slot of the pool that is written has one owner, who reads it."""

    latest, logits_sharding, unrolled, max_len, mask_fields = None, None, True, MAX_LEN, ()

    def __init__(self, num_pages: int, batch_invariant: bool, num_owners: int = 1, window_pages: int = 0) -> None:
        self.storage = SimpleNamespace(page_len=PAGE_LEN, adapters=0, window_pages=window_pages)
        self.model = SimpleNamespace(vocab_size=50, sliding_window=WINDOW, encoder=None, chunked_windows=num_pages % 2)
        self.has_windows, self.in_windows = window_pages > 0, np.full((window_pages * PAGE_LEN, 2), -1)
        self.cache_sizes = {"Pg": num_pages, "Bp": MAX_LEN // PAGE_LEN, "Bx": 0}
        self.num_owners, self.max_seqs, self.num_pages = num_owners, SLOTS * num_owners, num_pages
        self.batch_invariant, self.programs = batch_invariant, ProgramStore(None, None)
        self.written = np.full(num_pages * PAGE_LEN, -1)
        self.tokens = np.full(num_pages * PAGE_LEN, -1)
        self.drawn = np.zeros(self.max_seqs + 1, int)

    def row_parts(self, longest: int) -> int:
        return 1 if self.batch_invariant else 3 * self.num_owners

    def init_cache(self):
        return None

    def step(self, params, cache, latest, rows, longest):
        num_rows, num_seqs, num_last = len(rows.tokens), len(rows.first), len(rows.last)
        assert not any(size % self.row_parts(longest) for size in (num_rows, num_seqs if longest == 1 else 0))
        real = rows.slots < len(self.written)
        slots = rows.slots[real]
        assert len(set(slots.tolist())) == len(slots)  # no two rows write one slot
        self.written[slots] = rows.positions[real]
        self.tokens[slots] = np.where(rows.sources >= 0, self.drawn[rows.sources], rows.tokens)[real]
        if self.has_windows:
            here = rows.window_slots[real]
            assert len(set(here.tolist())) == len(here)
            self.in_windows[here] = np.stack([rows.positions[real], self.tokens[slots]], axis=1)
        owner_of_row = np.arange(num_rows) * self.num_owners // num_rows
        np.testing.assert_array_equal(slots // PAGE_LEN * self.num_owners // self.num_pages, owner_of_row[real])
        assert (owner_of_row[rows.last] == np.arange(num_last) * self.num_owners // num_last).all()
        for number, (first, count, length, pages) in enumerate(
            zip(rows.first, rows.counts, rows.lengths, rows.pages, strict=True)
        ):
            if count:
                assert count <= longest
                assert set(owner_of_row[first : first + count]) == {number * self.num_owners // num_seqs}
                at = np.arange(length)
                held = self.written[pages[at // PAGE_LEN] * PAGE_LEN + at % PAGE_LEN]
                np.testing.assert_array_equal(held, at)  # every position that is read was written there
                assert rows.positions[first + count - 1] == length - 1
                if self.has_windows:
                    first_query, chunked = length - count, self.model.chunked_windows
                    at = np.arange(
                        first_query // WINDOW * WINDOW if chunked else max(0, first_query - WINDOW + 1), length
                    )
                    slots = rows.window_pages[number][at // PAGE_LEN] * PAGE_LEN + at % PAGE_LEN
                    tokens = self.tokens[pages[at // PAGE_LEN] * PAGE_LEN + at % PAGE_LEN]
                    np.testing.assert_array_equal(self.in_windows[slots], np.stack([at, tokens], axis=1))
        return None, None

    def enter(self, *_):
        pass

    def draw(self, logits, outputs, *, adjusted, allowed):
        tokens = np.array([one.num_before % 7 for one in outputs], np.int32)
        self.drawn[[one.slot for one in outputs]] = tokens
        return Drawn(tokens)


class CheckedHost:
    """Stands in for the host's memory; pages of the tree hold their tokens when they leave, and are lost then."""

    page_bytes = 1

    def __init__(self, step: CheckedStep) -> None:
        self.step = step

    def move(self, cache, out, back):
        written, tokens = (array.reshape(-1, PAGE_LEN) for array in (self.step.written, self.step.tokens))
        for node, page in out.items():
            assert tuple(tokens[page]) == node.tokens
            node.copy = written[page].copy(), tokens[page].copy()
        for page in out.values():
            written[page] = tokens[page] = -1
        for node, page in back.items():
            (written[page], tokens[page]), node.copy = node.copy, None
            assert tuple(tokens[page]) == node.tokens
        return cache


class SomeDrafts:
    """Proposes tokens of which each is right seven times of ten."""

    def __init__(self, num_drafts: int, rng: random.Random) -> None:
        self.num_drafts, self.rng = num_drafts, rng

    def propose(self, asked, table):
        def drafts(one):
            return [
                (one.num_before + at + (self.rng.random() > 0.7)) % 7 for at in range(self.rng.randint(0, one.most))
            ]

        return list(map(drafts, asked))

    def enter(self, *_):
        pass

    follow = leave = enter


def assert_all_there(engine: Engine) -> None:
    """Each page is free, idle in the tree, or a request's; counts agree."""
    pools = [owner.pages for owner in engine._owners]
    idle = [node.page for pool in pools for node in pool._idle_nodes]
    shared = {node.page for pool in pools for sharer in pool._sharers.values() for node in sharer.nodes}
    own = [page for live in engine._live.values() for page in live.pages[live.owner.pages.num_shared(live.number) :]]
    assert len(own) == len(set(own))
    free = [page for pool in pools for page in pool.free]
    assert sorted([*free, *idle, *shared, *own]) == list(range(engine.limits.num_pages))
    assert all(len(pool.free) >= pool.num_free for pool in pools)
    for live in engine._live.values():
        known = np.arange(min(live.computed, len(live.tokens)))
        slots = np.array(live.pages, int)[known // PAGE_LEN] * PAGE_LEN + known % PAGE_LEN
        assert engine.packed.tokens[slots].tolist() == live.tokens[: len(known)]
    seen = engine.snapshot()
    assert sorted(one.page for one in seen.tree if one.page >= 0) == sorted({*idle, *shared})
    assert sum(one.page < 0 for one in seen.tree) == sum(len(pool._on_host) for pool in pools)
    for pool in pools:
        assert len(pool._on_host) <= pool.num_on_host
        assert all(node.copy is not None and not node.users for node in pool._on_host)
        assert not pool._leaving
        assert not pool._coming
    if engine.packed.has_windows:
        windows = [pool.windows for pool in pools]
        held = {id(page): page for live in engine._live.values() for page in live.window.pages if page}
        kept = {id(node.window): node.window for pool in pools for node in nodes_of(pool) if node.window}
        assert all(page.node.window is page for page in kept.values())
        in_idle = {id(page) for window in windows for page in window.idle}
        assert in_idle == {key for key, page in kept.items() if not page.users}
        for key, page in held.items():
            assert page.users == sum(id(one) == key for live in engine._live.values() for one in live.window.pages)
        numbers = [page.number for page in (held | kept).values()] + [n for window in windows for n in window.free]
        assert sorted(numbers) == list(range(engine.packed.storage.window_pages))
    assert sorted({page for pages in seen.requests.values() for page in pages} - {*idle, *shared}) == sorted(own)
    assert all(len(one.tokens) == PAGE_LEN for one in seen.tree)
    assert all(one.parent is None or one.parent < number for number, one in enumerate(seen.tree))
    assert all(length <= len(seen.requests[number]) * PAGE_LEN for number, length in seen.lengths.items())


def nodes_of(pool):
    """All nodes of the tree."""
    below = [child for root in pool.roots.values() for child in root.children.values()]
    for node in below:
        below += node.children.values()
    return below


@pytest.mark.parametrize("seed", [*range(30), 184, 337, 353, 418, 1065, 1118])
def test_no_page_is_lost_or_given_twice(seed, monkeypatch):
    run(seed, monkeypatch)


@pytest.mark.parametrize("num_owners", [2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_owners_have_rows_pages_and_logits_in_shares_of_their_own(seed, num_owners, monkeypatch):
    run(seed, monkeypatch, num_owners)


@pytest.mark.parametrize("num_owners", [1, 2])
@pytest.mark.parametrize("seed", range(40))
def test_windows_keep_pages_of_their_own(seed, num_owners, monkeypatch):
    """Every position that a query of a window sees has been written, with its token, by a request or one before it."""
    run(seed, monkeypatch, num_owners, windows=True)


def run(seed: int, monkeypatch, num_owners: int = 1, *, windows: bool = False) -> int:
    """Runs a random schedule and returns the tokens that came back from the host."""
    rng = random.Random(seed)
    num_drafts = (0, 0, 1, 3)[seed % 4]
    num_pages = rng.choice([10, 11, 13, 20]) + (num_drafts > 0)  # for the drafts of the longest request
    invariant = rng.random() < 0.4 and num_owners == 1
    num_pages *= num_owners
    budget = min(rng.choice([5, 7, 16]) * (1 + num_drafts), 32)
    chunked = invariant or num_drafts or windows
    most = pages_of_windows(WINDOW, PAGE_LEN, num_seqs=SLOTS, num_rows=budget) + rng.choice([0, 2, 9])
    step = CheckedStep(num_pages, invariant, num_owners, most * num_owners * windows)
    monkeypatch.setattr("meshwright.serve.engine.TokenDrawer", lambda *_: step)
    monkeypatch.setattr("meshwright.serve.engine.HostPages", lambda *_: CheckedHost(step))
    limits = SchedulerLimits(
        max_requests=SLOTS * num_owners,
        token_budget=budget * num_owners,
        page_len=PAGE_LEN,
        num_pages=num_pages,
        watermark=rng.choice([0.0, 0.1]),
        prefix_cache=True,
        num_drafts=num_drafts,
        policy="chunked" if chunked else rng.choice(["chunked", "interleaved"]),
    )
    host_bytes = (0, 0, 1, 3, 30)[seed % 5] * num_owners
    drafter = SomeDrafts(num_drafts, rng) if num_drafts else None
    engine = Engine(step, {}, limits, drafter=drafter, host_cache_bytes=0 if windows else host_bytes)
    beginnings = [[rng.randrange(50) for _ in range(30)] for _ in range(3)]
    numbers = []
    for _ in range(150):
        action = rng.random()
        if action < 0.3:
            beginning, length = rng.choice(beginnings), rng.randint(1, 30)
            prompt = beginning[:length] + [rng.randrange(50) for _ in range(rng.randint(0, 2))]
            most = rng.randint(1, MAX_LEN - len(prompt))
            stop = frozenset([rng.randrange(7)]) if rng.random() < 0.4 else frozenset()
            numbers.append(engine.submit(TokenRequest(prompt=tuple(prompt), max_tokens=most, stop_tokens=stop)))
        elif action < 0.35 and numbers:
            engine.cancel(rng.choice(numbers))
        else:
            engine.step()
        assert_all_there(engine)
    while engine.has_work:
        engine.step()
        assert_all_there(engine)
    assert engine.state().pages_used == 0
    return engine.state().host_hits


def test_pages_come_back_from_the_host(monkeypatch):
    assert run(4, monkeypatch) > 0
