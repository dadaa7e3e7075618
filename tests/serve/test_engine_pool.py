"""Thousands of random schedules on an engine whose step computes nothing: no page is lost, none is given twice."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.batching.limits import SchedulerLimits
from meshwright.parallel.generation.program_store import ProgramStore
from meshwright.serve.drawing import Drawn
from meshwright.serve.engine import Engine
from meshwright.serve.request import TokenRequest

PAGE_LEN, MAX_LEN, SLOTS = 4, 40, 5


class CheckedStep:
    """Stands in for a packed step and what draws; a slot of the pool that is written has one owner, who reads it."""

    latest, logits_sharding, unrolled, max_len, max_seqs = None, None, True, MAX_LEN, SLOTS

    def __init__(self, num_pages: int, batch_invariant: bool) -> None:
        self.storage, self.model = SimpleNamespace(page_len=PAGE_LEN), SimpleNamespace(vocab_size=50)
        self.cache_sizes = {"Pg": num_pages, "Bp": MAX_LEN // PAGE_LEN}
        self.row_parts = 1 if batch_invariant else 3
        self.batch_invariant, self.programs = batch_invariant, ProgramStore(None, None)
        self.written = np.full(num_pages * PAGE_LEN, -1)

    def init_cache(self):
        return None

    def step(self, params, cache, latest, rows, longest):
        assert len(rows.tokens) % self.row_parts == 0
        real = rows.slots < len(self.written)
        slots = rows.slots[real]
        assert len(set(slots.tolist())) == len(slots)  # no two rows write one slot
        self.written[slots] = rows.positions[real]
        for first, count, length, pages in zip(rows.first, rows.counts, rows.lengths, rows.pages, strict=True):
            if count:
                at = np.arange(length)
                held = self.written[pages[at // PAGE_LEN] * PAGE_LEN + at % PAGE_LEN]
                np.testing.assert_array_equal(held, at)  # every position that is read was written there
                assert rows.positions[first + count - 1] == length - 1
        return None, None

    def enter(self, *_):
        pass

    def draw(self, logits, outputs, *, adjusted):
        return Drawn(np.array([one.num_before % 7 for one in outputs], np.int32))


def assert_all_there(engine: Engine) -> None:
    """Each page is free, idle in the tree, or a request's; counts agree."""
    pool = engine._pages
    idle = [node.page for node in pool._idle_nodes]
    shared = {node.page for nodes in pool._held.values() for node in nodes}
    own = [page for live in engine._live.values() for page in live.pages[live.num_shared :]]
    assert len(own) == len(set(own))
    assert sorted([*pool.free, *idle, *shared, *own]) == list(range(engine.limits.num_pages))
    assert len(pool.free) >= pool.num_free


@pytest.mark.parametrize("seed", [*range(30), 184, 337, 353, 418, 1065, 1118])
def test_no_page_is_lost_or_given_twice(seed, monkeypatch):
    rng = random.Random(seed)
    num_pages, invariant = rng.choice([10, 11, 13, 20]), rng.random() < 0.4
    step = CheckedStep(num_pages, invariant)
    monkeypatch.setattr("meshwright.serve.engine.TokenDrawer", lambda *_: step)
    limits = SchedulerLimits(
        max_requests=SLOTS,
        token_budget=rng.choice([5, 7, 16]),
        page_len=PAGE_LEN,
        num_pages=num_pages,
        watermark=rng.choice([0.0, 0.1]),
        prefix_cache=True,
        policy="chunked" if invariant else rng.choice(["chunked", "interleaved"]),
    )
    engine = Engine(step, {}, limits)
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
