"""Times the steps of an engine on this machine, fits a clock to them, and simulates the engine with it: as in
`serve.engine`, a step is dispatched before the previous step's tokens are read."""

import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from meshwright.algebra.sizes import Number
from meshwright.batching.clock import Clock
from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.record import RequestTimes, ServingRecord, StepsLog
from meshwright.batching.request import GenerationRequest
from meshwright.batching.scheduler import Scheduler
from meshwright.batching.traffic import RequestTraffic, traffic_of
from meshwright.bench.serving.load import token_record
from meshwright.serve.engine import Engine
from meshwright.serve.request import TokenRequest

STEPS = 8
"""Number of consecutive steps of a kind that are timed."""
ROUNDS = 2
"""Number of times that all steps are measured, after a first time that is discarded."""


class TimedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step: the arguments of `Clock.step_s`, and its seconds; ``kind`` is equal for similar steps."""

    num_decode: int
    cached_tokens: int
    prefill_tokens: int
    prefill_past: float
    seconds: float
    kind: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EngineClock(Clock):
    """Fitted seconds of an engine's steps: a constant of the compiled shape, and a time for each token that is read.

    A step that only decodes runs in the smallest of ``decode_rows`` that fits its rows, other steps in the smallest of
    ``chunk_rows``; ``decode_s`` and ``chunk_s`` are the seconds of these shapes without context. ``cached_s`` is the
    seconds for each cached token that decoding rows read, ``pair_s`` for each (query, key) pair of a prefilled token.
    Behind HTTP a step that decodes takes ``served_s`` more, and ``token_s`` for each token.

    While a step runs on the devices, the host prepares the next one in ``host_s``. ``request_s`` is the delay of HTTP:
    half until the engine has a request, half until the client has a token. ``error`` is the fit's median relative error
    over kinds of steps, ``worst`` the largest.
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

    def step_s(self, num_decode: Number, cached_tokens: Number, prefill_tokens: Number, prefill_past: Number) -> Number:
        """Returns the seconds of steps, see `Clock`; arguments may be arrays that broadcast."""
        num_decoding, num_cached, num_prefilled, num_past = (
            np.asarray(counts, float) for counts in (num_decode, cached_tokens, prefill_tokens, prefill_past)
        )
        shape_s = np.where(
            num_prefilled > 0,
            _at_shape(self.chunk_rows, self.chunk_s, num_decoding + num_prefilled),
            _at_shape(self.decode_rows, self.decode_s, num_decoding),
        )
        read_s = num_cached * self.cached_s + num_prefilled * (num_past + 1) * self.pair_s
        return shape_s + read_s + np.minimum(num_decoding, 1) * self.served_s + num_decoding * self.token_s


def _at_shape(rows: Sequence[int], seconds: Sequence[float], needed_rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the seconds of the smallest shape that fits the rows; if none does, of several runs of the largest."""
    shape_index = np.minimum(np.searchsorted(rows, needed_rows), len(rows) - 1)
    return np.asarray(seconds)[shape_index] * np.maximum(np.ceil(needed_rows / rows[-1]), 1)


def fit_clock(decode_rows: Sequence[int], chunk_rows: Sequence[int], steps: Sequence[TimedStep]) -> EngineClock:
    """Returns the clock with the least squares of relative errors against the median seconds of each kind of step.

    No number is negative, and no shape takes less than a smaller one; a shape that no step had gets a time between its
    neighbours'."""
    steps_of = defaultdict[tuple[int, ...], list[TimedStep]](list)
    for step in steps:
        steps_of[step.kind].append(step)
    names = ("num_decode", "cached_tokens", "prefill_tokens", "prefill_past")
    loads = [[statistics.fmean(getattr(step, name) for step in group) for name in names] for group in steps_of.values()]
    median_s = np.array([statistics.median(step.seconds for step in group) for group in steps_of.values()])
    chunk_column = 1 + len(decode_rows)
    matrix = np.zeros((len(loads), chunk_column + len(chunk_rows) + 2))  # start, what a shape adds to the last, ...
    matrix[:, 0] = 1
    for matrix_row, (num_decoding, num_cached, num_prefilled, num_past) in zip(matrix, loads, strict=True):
        shape_rows, first_column = (chunk_rows, chunk_column) if num_prefilled else (decode_rows, 1)
        matrix_row[first_column : first_column + bisect_left(shape_rows, round(num_decoding + num_prefilled)) + 1] = 1
        matrix_row[-2:] = num_cached, num_prefilled * (num_past + 1)
    column_scale = np.maximum(matrix.max(axis=0), 1)
    solution, _ = nnls(matrix / column_scale / median_s[:, None], np.ones(len(median_s)), maxiter=10_000)
    relative_errors = np.abs(matrix / column_scale @ solution / median_s - 1)
    start_s, *extra_s, cached_s, pair_s = (solution / column_scale).tolist()
    return EngineClock(
        decode_rows=tuple(decode_rows),
        chunk_rows=tuple(chunk_rows),
        decode_s=tuple((start_s + np.cumsum(extra_s[: chunk_column - 1])).tolist()),
        chunk_s=tuple((start_s + np.cumsum(extra_s[chunk_column - 1 :])).tolist()),
        cached_s=cached_s,
        pair_s=pair_s,
        error=float(np.median(relative_errors)),
        worst=float(relative_errors.max()),
    )


class StepTimer:
    """Runs requests on an engine and times its steps. A second scheduler of equal limits tells each step's contents."""

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
        """Runs requests of (prompt, output) tokens to completion. Before each of ``more`` steps it also submits prompts
        of ``each`` tokens in total, with one output token each.

        The seconds of a step run from the return of the call that dispatched it to the return of the next call, which
        dispatches another step and waits for this one: what a client sees of a busy engine.
        """
        for prompt, output in prompts:
            self.submit(prompt, output)
        previous_load: tuple[int, int, int, float] | None = None
        num_steps, last_return_s = 0, time.perf_counter()
        while self.engine.has_work or more:
            if more and (num_steps > 1 or not prompts):
                max_prompt_len = self.engine.max_len - 1
                for submitted_tokens in range(0, each, max_prompt_len):
                    self.submit(min(max_prompt_len, each - submitted_tokens), 1)
                more -= 1
            step = self._mirror.plan()
            self.engine.step()
            now_s = time.perf_counter()
            if step.repeats:
                self._mirror.commit(step)
            if previous_load is not None and step.repeats and num_steps > 1:
                decode, cached, prefill, past = previous_load
                kind = (decode, prefill and decode + prefill, *(round(np.log2(1 + count)) for count in (cached, past)))
                self.steps.append(
                    TimedStep(
                        num_decode=decode, cached_tokens=cached, prefill_tokens=prefill, prefill_past=past,
                        seconds=now_s - last_return_s, kind=kind,
                    )
                )  # fmt: skip
            if num_steps == 0:
                self.host_s.append(now_s - last_return_s)
            step_load = len(step.decode), step.cached_tokens, step.prefill_tokens, step.prefill_past
            previous_load, last_return_s, num_steps = step_load if step.repeats else None, now_s, num_steps + 1


def measure_clock(engine: Engine, *, rounds: int = ROUNDS) -> EngineClock:
    """Returns the clock of an idle engine, from steps timed at each of its shapes, with short and long contexts."""
    timer = StepTimer(engine)
    shapes = engine.shapes()
    decode_rows = sorted({shape.rows for shape in shapes if shape.longest == 1})
    chunk_rows = sorted({shape.rows for shape in shapes if shape.longest > 1})
    token_budget, max_requests = engine.limits.token_budget, engine.limits.max_requests
    cache_positions = engine.limits.num_pages * engine.limits.page_len
    far_prompt_len = min(engine.max_len - STEPS - 2, 2 * token_budget)
    for round_index in range(rounds + 1):
        for rows in decode_rows:
            timer.run([(8, STEPS + 2)] * min(rows, max_requests))
        max_far_prompts = max(min(max_requests // 4, cache_positions // (2 * far_prompt_len)), 1)
        for num_prompts in sorted({1, max_far_prompts}):
            timer.run([(far_prompt_len, STEPS + 2)] * num_prompts)
        for rows in chunk_rows:
            if rows <= token_budget:
                timer.run([], more=STEPS, each=rows)
            num_decoding = min(rows // 2, max_requests // 2)
            if rows - num_decoding <= token_budget:
                timer.run([(8, STEPS + 4)] * num_decoding, more=STEPS, each=rows - num_decoding)
        if not round_index:  # the first round warms caches and the allocator up
            timer.steps.clear()
            timer.host_s.clear()
    clock = fit_clock(decode_rows, chunk_rows, timer.steps)
    return replace(clock, host_s=statistics.median(timer.host_s))


def simulate_engine(traffic: RequestTraffic, limits: SchedulerLimits, clock: EngineClock) -> ServingRecord:
    """Simulates one engine under traffic; returns the times that its clients see. Raises InputError for a request that
    can never run.

    `batching.simulation` plans a step when the previous step has ended. Here the host plans and dispatches it while the
    previous one runs, so that a request that arrives meanwhile waits one step longer, unless the engine was idle."""
    scheduler, request_times, steps_log = Scheduler(limits), RequestTimes(len(traffic)), StepsLog(1)
    token_at_s = list[list[float]]([] for _ in range(len(traffic)))
    arrivals = traffic.requests()
    next_arrival = next(arrivals, None)
    host_free_s = devices_free_s = 0.0  # when the host and the devices are free
    running_step: tuple[float, list[int]] | None = None  # when it ends, and the requests that get a token
    while next_arrival or scheduler.load or running_step:
        if not scheduler.load and not running_step and next_arrival:
            host_free_s = max(host_free_s, next_arrival[0] + clock.request_s / 2)
        while next_arrival and next_arrival[0] + clock.request_s / 2 <= host_free_s:
            scheduler.submit(next_arrival[1])
            next_arrival = next(arrivals, None)
        step, dispatched_step = scheduler.plan(), None
        if step.repeats:
            for active in step.admitted:
                if np.isnan(request_times.admitted_s[active.request.number]):
                    request_times.admitted_s[active.request.number] = host_free_s
            for active in step.preempted:
                request_times.num_preempted[active.request.number] += 1
            prefilled_requests, _ = scheduler.commit(step)
            host_free_s += clock.host_s
            start_s, decode_load = max(host_free_s, devices_free_s), (len(step.decode), step.cached_tokens)
            devices_free_s = start_s + float(clock.step_s(*decode_load, step.prefill_tokens, step.prefill_past))
            steps_log.add_run(start_s, devices_free_s, len(scheduler.running), len(step.decode))
            dispatched_step = devices_free_s, [active.request.number for active in (*step.decode, *prefilled_requests)]
        if running_step:
            host_free_s = max(host_free_s, running_step[0])
            for index in running_step[1]:
                if len(token_at_s[index]) < traffic.output[index]:  # a static batch also computes what has ended
                    token_at_s[index].append(host_free_s + clock.request_s / 2)
        running_step = dispatched_step
    return token_record(traffic, token_at_s, times=request_times, log=steps_log, page_len=limits.page_len)


def capacity_per_s(traffic: RequestTraffic, limits: SchedulerLimits, clock: EngineClock) -> float:
    """Returns the requests per second that an engine completes while requests like these always wait: simulated, with
    all arrivals at time 0, over the middle half of the completions."""
    num_repeats = -(-4 * limits.max_requests // len(traffic))
    prompt, output = (np.tile(lengths, num_repeats) for lengths in (traffic.prompt, traffic.output))
    ended_s = np.sort(simulate_engine(traffic_of(np.zeros(len(prompt)), prompt, output), limits, clock).times.ended_s)
    first_index, last_index = len(ended_s) // 4, len(ended_s) * 3 // 4
    return float((last_index - first_index) / (ended_s[last_index] - ended_s[first_index]))
