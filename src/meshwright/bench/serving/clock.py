"""A clock for simulations whose seconds are those of an engine on this machine: its steps are timed and fitted."""

import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from meshwright.batching.clock import Clock
from meshwright.batching.request import GenerationRequest
from meshwright.batching.scheduler import Scheduler
from meshwright.serve.engine import Engine
from meshwright.serve.request import TokenRequest

STEPS = 8
"""Steps of a kind that are timed in one go."""
ROUNDS = 2
"""Times that everything is measured, after once that does not count."""


class TimedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step's contents, as `Clock.step_s` has them, and its seconds; ``kind`` is equal for steps that are alike."""

    num_decode: int
    cached_tokens: int
    prefill_tokens: int
    prefill_past: float
    seconds: float
    kind: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EngineClock(Clock):
    """Seconds of steps: those of the compiled shape that a step has, and more for each token that it reads.

    A step that only decodes has the first of ``decode_rows`` that holds its rows, others the first of ``chunk_rows``;
    ``decode_s`` and ``chunk_s`` are the seconds of these shapes without context. ``cached_s`` are seconds for each
    cached token that decoding rows read, ``pair_s`` for each pair of a prefilled token and one up to it. A step whose
    tokens a server sends to clients takes ``served_s`` more, and ``token_s`` for each token.

    While a step runs on the devices the host prepares the next one, for ``host_s``. ``request_s`` passes from a request
    until the engine has it, and from a step's end until clients have its tokens. ``error`` is the median distance of
    the kinds of steps from the fit, as a share, ``worst`` the largest.
    """

    decode_rows: tuple[int, ...]
    chunk_rows: tuple[int, ...]
    decode_s: tuple[float, ...]
    chunk_s: tuple[float, ...]
    cached_s: float
    pair_s: float
    host_s: float = 0.0
    served_s: float = 0.0
    token_s: float = 0.0
    request_s: float = 0.0
    error: float = 0.0
    worst: float = 0.0

    def step_s(self, num_decode: Any, cached_tokens: Any, prefill_tokens: Any, prefill_past: Any) -> Any:
        """Returns the seconds of steps, see `Clock`; arguments may be arrays that broadcast."""
        decode, cached, tokens, past = (
            np.asarray(count, float) for count in (num_decode, cached_tokens, prefill_tokens, prefill_past)
        )
        shapes = np.where(
            tokens > 0,
            _at_shape(self.chunk_rows, self.chunk_s, decode + tokens),
            _at_shape(self.decode_rows, self.decode_s, decode),
        )
        read_s = cached * self.cached_s + tokens * (past + 1) * self.pair_s
        return shapes + read_s + np.minimum(decode, 1) * self.served_s + decode * self.token_s


def _at_shape(rows: Sequence[int], seconds: Sequence[float], needed: NDArray[np.float64]) -> Any:
    """Returns the seconds of the first shape with the rows; beyond all shapes, of several of the largest."""
    index = np.minimum(np.searchsorted(rows, needed), len(rows) - 1)
    return np.asarray(seconds)[index] * np.maximum(np.ceil(needed / rows[-1]), 1)


def fit_clock(decode_rows: Sequence[int], chunk_rows: Sequence[int], steps: Sequence[TimedStep]) -> EngineClock:
    """Returns the clock of least squared relative distances from the medians of the kinds of steps.

    No number is negative, and no shape takes less than a smaller one; one that no step has lies between its neighbours.
    """
    kinds = defaultdict[tuple[int, ...], list[TimedStep]](list)
    for step in steps:
        kinds[step.kind].append(step)
    names = ("num_decode", "cached_tokens", "prefill_tokens", "prefill_past")
    means = [[statistics.fmean(getattr(step, name) for step in alike) for name in names] for alike in kinds.values()]
    seconds = np.array([statistics.median(step.seconds for step in alike) for alike in kinds.values()])
    count = 1 + len(decode_rows)
    matrix = np.zeros((len(means), count + len(chunk_rows) + 2))  # start, what each shape takes more than the last, ...
    matrix[:, 0] = 1
    for row, (decode, cached, tokens, past) in zip(matrix, means, strict=True):
        rows, first = (chunk_rows, count) if tokens else (decode_rows, 1)
        row[first : first + bisect_left(rows, round(decode + tokens)) + 1] = 1
        row[-2:] = cached, tokens * (past + 1)
    scale = np.maximum(matrix.max(axis=0), 1)
    solution, _ = nnls(matrix / scale / seconds[:, None], np.ones(len(seconds)), maxiter=10_000)
    distances = np.abs(matrix / scale @ solution / seconds - 1)
    start_s, *more_s, cached_s, pair_s = (solution / scale).tolist()
    return EngineClock(
        decode_rows=tuple(decode_rows),
        chunk_rows=tuple(chunk_rows),
        decode_s=tuple((start_s + np.cumsum(more_s[: count - 1])).tolist()),
        chunk_s=tuple((start_s + np.cumsum(more_s[count - 1 :])).tolist()),
        cached_s=cached_s,
        pair_s=pair_s,
        error=float(np.median(distances)),
        worst=float(distances.max()),
    )


class StepTimer:
    """Runs requests on an engine and times its steps. A scheduler of the same limits says what each of them held."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.steps, self.host_s = engine, list[TimedStep](), list[float]()
        self._mirror = Scheduler(engine.limits)
        self._generator = np.random.default_rng(0)
        self._number = 0

    def submit(self, prompt: int, output: int) -> None:
        """Queues a request of random tokens."""
        tokens = tuple(self._generator.integers(0, self.engine.vocab_size, prompt).tolist())
        self.engine.submit(TokenRequest(prompt=tokens, max_tokens=output))
        self._mirror.submit(GenerationRequest(number=self._number, prompt=prompt, output=output))
        self._number += 1

    def run(self, prompts: Sequence[tuple[int, int]], more: int = 0, each: int = 0) -> None:
        """Runs requests of (prompt, output) tokens to their ends, and before each of ``more`` steps submits prompts of
        ``each`` tokens in all, which end with their first token.

        The seconds of a step are those from the return of the call that dispatched it to that of the next, which
        dispatches another one and waits for it: what a client sees of an engine with work.
        """
        for prompt, output in prompts:
            self.submit(prompt, output)
        before: tuple[int, int, int, float] | None = None
        count, last_s = 0, time.perf_counter()
        while self.engine.has_work or more:
            if more and (count > 1 or not prompts):
                longest = self.engine.max_len - 1
                for start in range(0, each, longest):
                    self.submit(min(longest, each - start), 1)
                more -= 1
            planned = self._mirror.plan()
            self.engine.step()
            now_s = time.perf_counter()
            if planned.repeats:
                self._mirror.commit(planned)
            if before is not None and planned.repeats and count > 1:
                decode, cached, tokens, past = before
                kind = (decode, tokens and decode + tokens, *(round(np.log2(1 + length)) for length in (cached, past)))
                self.steps.append(
                    TimedStep(
                        num_decode=decode, cached_tokens=cached, prefill_tokens=tokens, prefill_past=past,
                        seconds=now_s - last_s, kind=kind,
                    )
                )  # fmt: skip
            if count == 0:
                self.host_s.append(now_s - last_s)
            holds = len(planned.decode), planned.cached_tokens, planned.prefill_tokens, planned.prefill_past
            before, last_s, count = holds if planned.repeats else None, now_s, count + 1


def measure_clock(engine: Engine, *, rounds: int = ROUNDS) -> EngineClock:
    """Times the steps of an engine that holds nothing, at each of its shapes, with short and long contexts."""
    timer = StepTimer(engine)
    shapes = engine.shapes()
    decode_rows = sorted({shape.rows for shape in shapes if shape.longest == 1})
    chunk_rows = sorted({shape.rows for shape in shapes if shape.longest > 1})
    budget, slots = engine.limits.token_budget, engine.limits.max_requests
    room = engine.limits.num_pages * engine.limits.page_len
    far = min(engine.max_len - STEPS - 2, 2 * budget)
    for number in range(rounds + 1):
        for rows in decode_rows:
            timer.run([(8, STEPS + 2)] * min(rows, slots))
        many = max(min(slots // 4, room // (2 * far)), 1)
        for count in sorted({1, many}):
            timer.run([(far, STEPS + 2)] * count)
        for rows in chunk_rows:
            if rows <= budget:
                timer.run([], more=STEPS, each=rows)
            beside = min(rows // 2, slots // 2)
            if rows - beside <= budget:
                timer.run([(8, STEPS + 4)] * beside, more=STEPS, each=rows - beside)
        if not number:  # the first round warms caches and the allocator up
            timer.steps.clear()
            timer.host_s.clear()
    clock = fit_clock(decode_rows, chunk_rows, timer.steps)
    return replace(clock, host_s=statistics.median(timer.host_s))
