"""Simulates an engine that dispatches a step before it reads the one before it, as `serve.engine` does.

`batching.simulation` plans a step when the one before it has ended. Here the host plans and dispatches it while that
one runs, so that a request which arrives meanwhile waits for one step more, unless the engine was idle.
"""

from math import inf

import numpy as np
from msgspec.structs import replace

from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.record import ServingRecord
from meshwright.batching.replica import RequestTimes
from meshwright.batching.scheduler import EngineStep, Scheduler
from meshwright.batching.steps_log import StepsLog
from meshwright.batching.traffic import RequestTraffic, traffic_of
from meshwright.bench.serving.clock import EngineClock


class _Dispatched:
    """A step on the devices: when it ends, and the requests that it has tokens for."""

    def __init__(self, end_s: float, numbers: list[int]) -> None:
        self.end_s, self.numbers = end_s, numbers


class _Client:
    """What clients have seen: tokens of each request, and when."""

    def __init__(self, traffic: RequestTraffic) -> None:
        self.times, self.log = RequestTimes(len(traffic)), StepsLog(1)
        self._made, self._output = np.zeros(len(traffic), int), traffic.output
        self._last_s = np.zeros(len(traffic))

    def tokens(self, numbers: list[int], at_s: float) -> None:
        """Notes a token of each request."""
        for number in numbers:
            self._made[number] += 1
            if self._made[number] == 1:
                self.times.first_token_s[number] = at_s
            else:
                self.log.add_gap(at_s - self._last_s[number], at_s, 1)
            self._last_s[number] = at_s
            if self._made[number] == self._output[number]:
                self.times.ended_s[number] = at_s


def simulate_engine(traffic: RequestTraffic, limits: SchedulerLimits, clock: EngineClock) -> ServingRecord:
    """Returns what clients of one engine see. Raises InputError for a request that can never run."""
    scheduler, client = Scheduler(limits), _Client(traffic)
    arrivals = traffic.requests()
    next_arrival = next(arrivals, None)
    host_s = free_s = 0.0  # when the host and the devices are free
    running_step: _Dispatched | None = None
    num_left = traffic.output.copy()
    while next_arrival or scheduler.load or running_step:
        if not scheduler.load and not running_step and next_arrival:
            host_s = max(host_s, next_arrival[0] + clock.request_s / 2)
        while next_arrival and next_arrival[0] + clock.request_s / 2 <= host_s:
            scheduler.submit(next_arrival[1])
            next_arrival = next(arrivals, None)
        step, dispatched_step = scheduler.plan(), None
        if step.repeats:
            for active in step.admitted:
                if np.isnan(client.times.admitted_s[active.request.number]):
                    client.times.admitted_s[active.request.number] = host_s
            for active in step.preempted:
                client.times.num_preempted[active.request.number] += 1
            dispatched_step = _dispatch(scheduler, step, num_left)
            host_s += clock.host_s
            start_s, decode_load = max(host_s, free_s), (len(step.decode), step.cached_tokens)
            free_s = start_s + float(clock.step_s(*decode_load, step.prefill_tokens, step.prefill_past))
            client.log.add_run(start_s, free_s, len(scheduler.running), len(step.decode))
            dispatched_step.end_s = free_s
        if running_step:
            host_s = max(host_s, running_step.end_s)
            client.tokens(running_step.numbers, host_s + clock.request_s / 2)
        running_step = dispatched_step
    return ServingRecord(traffic=traffic, times=client.times, page_len=limits.page_len, logs=(client.log,), spans=())


def _dispatch(scheduler: Scheduler, step: EngineStep, left: np.ndarray) -> _Dispatched:
    """Commits a step; ``left`` are the tokens that requests have still to get."""
    decoded = [active.request.number for active in step.decode]
    prefilled, _ = scheduler.commit(step)
    numbers = [number for number in [*decoded, *(active.request.number for active in prefilled)] if left[number]]
    left[numbers] -= 1
    return _Dispatched(inf, numbers)


def capacity_per_s(traffic: RequestTraffic, limits: SchedulerLimits, clock: EngineClock) -> float:
    """Returns the requests per second of an engine that always has requests like these waiting: those that end in the
    middle half of a run in which all arrive at once."""
    num_repeats = -(-4 * limits.max_requests // len(traffic))
    repeated_traffic = traffic_of(
        np.zeros(num_repeats * len(traffic)), np.tile(traffic.prompt, num_repeats), np.tile(traffic.output, num_repeats)
    )
    ended_s = np.sort(simulate_engine(repeated_traffic, limits, clock).times.ended_s)
    first_index, last_index = len(ended_s) // 4, len(ended_s) * 3 // 4
    return float((last_index - first_index) / (ended_s[last_index] - ended_s[first_index]))


def as_arrived(traffic: RequestTraffic, rate_per_s: float) -> RequestTraffic:
    """Returns the same requests in the same order, so many a second in the mean; those that come at once still do."""
    return replace(traffic, arrival_s=traffic.arrival_s * (arrival_rate(traffic) or rate_per_s) / rate_per_s)


def arrival_rate(traffic: RequestTraffic) -> float:
    """Returns the requests a second from the first arrival to the last; 0 if all arrive at once."""
    span_s = float(traffic.arrival_s[-1] - traffic.arrival_s[0])
    return (len(traffic) - 1) / span_s if span_s else 0.0
