"""An engine whose steps take the seconds of a clock and compute nothing."""

import time
from types import SimpleNamespace

import numpy as np

from meshwright.batching.limits import SchedulerLimits
from meshwright.bench.serving.clock import EngineClock
from meshwright.serve.drawing.drawer import Drawn
from meshwright.serve.engine import Engine

VOCAB = 64


class _Later:
    """Tokens that are there at a time."""

    def __init__(self, count: int, end_s: float) -> None:
        self.count, self.end_s = count, end_s

    def __array__(self, *_, **__) -> np.ndarray:
        time.sleep(max(self.end_s - time.perf_counter(), 0))
        return np.full(self.count, 40, np.int32)


class PacedStep:
    """Stands in for a packed step and what draws: a device that runs steps one after the other."""

    latest = programs = logits_sharding = None
    batch_invariant, has_windows, num_owners, mask_fields = False, False, 1, ()

    def __init__(self, limits: SchedulerLimits, clock: EngineClock, max_len: int) -> None:
        self.clock, self.max_len, self.max_seqs = clock, max_len, limits.max_requests
        self.storage = SimpleNamespace(page_len=limits.page_len, adapters=0, window_pages=0)
        self.cache_sizes = {"Pg": limits.num_pages, "Bp": -(-max_len // limits.page_len), "Bx": 0}
        self.model = SimpleNamespace(vocab_size=VOCAB, sliding_window=None, encoder=None, chunked_windows=False)
        self.free_s = 0.0

    def row_parts(self, longest):
        return 1

    def init_cache(self):
        return None

    def step(self, params, cache, latest, rows, longest):
        counts, lengths = rows.counts, rows.lengths
        decodes, fills = counts == 1, counts > 1
        tokens = int(counts[fills].sum())
        past = (lengths - counts + (counts - 1) / 2)[fills] @ counts[fills] / max(tokens, 1)
        load = int(decodes.sum()), int((lengths - 1)[decodes].sum()), tokens, float(past)
        self.free_s = max(self.free_s, time.perf_counter()) + float(self.clock.step_s(*load))
        return None, None

    def enter(self, *_):
        pass

    def draw(self, logits, outputs, *, adjusted, allowed):
        return Drawn(_Later(len(outputs), self.free_s))


def paced_engine(limits: SchedulerLimits, clock: EngineClock, max_len: int = 512, monkeypatch=None) -> Engine:
    step = PacedStep(limits, clock, max_len)
    monkeypatch.setattr("meshwright.serve.engine.TokenDrawer", lambda *_: step)
    return Engine(step, {}, limits)
