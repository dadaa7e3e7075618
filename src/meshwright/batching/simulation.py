"""Simulates traffic through one or two pools of replicas behind routers."""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Literal, get_args

import msgspec
from msgspec.structs import replace

from meshwright.batching.clock import Clock
from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.record import RequestTimes, ServingRecord, StepsLog
from meshwright.batching.replica import Replica
from meshwright.batching.request import GenerationRequest
from meshwright.batching.spans import SlotRecorder, SlotSpan
from meshwright.batching.traffic import RequestTraffic
from meshwright.core.errors import InputError, require_known
from meshwright.core.progress import RunningWork, working

RoutingPolicy = Literal["round_robin", "least_loaded", "prefix_aware"]
"""``least_loaded``: the replica with the fewest waiting and running requests. ``prefix_aware``: the replica that got
the prefix last, unless loads are out of balance; a request without a prefix, or with a new one: the least loaded."""

IMBALANCE, IMBALANCE_RATIO = 32, 1.5
"""Loads are out of balance if the largest exceeds the least by both: the rule and the difference of SGLang's router."""

MOST_JUMP = 256
"""Maximum steps per call of a clock; longer calls cost more than they save."""


class ReplicaPool(msgspec.Struct, frozen=True, kw_only=True):
    """Equal replicas behind a router."""

    limits: SchedulerLimits
    clock: Clock
    num_replicas: int = 1
    routing: RoutingPolicy = "round_robin"

    def check(self) -> None:
        """Raises InputError for limits, a number of replicas or a routing that is not valid."""
        self.limits.check()
        if self.num_replicas < 1:
            raise InputError(f"num_replicas is {self.num_replicas:,}. Give a positive number.")
        require_known("routing", self.routing, get_args(RoutingPolicy))


class _Line:
    """The replicas of a pool behind its router."""

    def __init__(self, pool: ReplicaPool, times: RequestTimes, *, most_jump: int, spans: bool) -> None:
        pool.check()
        self.log = StepsLog(pool.num_replicas)
        self.replicas = [Replica(pool.limits, pool.clock, times, self.log, most_jump) for _ in range(pool.num_replicas)]
        for replica_index, replica in enumerate(self.replicas if spans else ()):
            replica.recorder = SlotRecorder(replica_index, pool.limits.max_requests)
        self._routing, self._homes, self._count = pool.routing, dict[int, int](), 0

    @property
    def spans(self) -> tuple[SlotSpan, ...]:
        """The requests in each slot over time; empty unless recorded."""
        return tuple(span for replica in self.replicas if replica.recorder for span in replica.recorder.spans)

    def route(self, request: GenerationRequest) -> int:
        """Returns the index of the replica for a request; ``prefix_aware`` remembers it for the prefix."""
        self._count += 1
        if self._routing == "round_robin":
            return (self._count - 1) % len(self.replicas)
        loads = [replica.scheduler.load for replica in self.replicas]
        min_load, max_load = min(loads), max(loads)
        replica_index = loads.index(min_load)
        if self._routing == "prefix_aware" and request.prefix is not None:
            if max_load - min_load <= IMBALANCE or max_load <= IMBALANCE_RATIO * min_load:
                replica_index = self._homes.get(request.prefix, replica_index)
            self._homes[request.prefix] = replica_index
        return replica_index


def simulate(
    traffic: RequestTraffic,
    *pools: ReplicaPool,
    transfer_s: Callable[[int], float] = float,
    concurrency: float = inf,
    most_jump: int = MOST_JUMP,
    spans: bool = False,
) -> ServingRecord:
    """Simulates traffic in one pool of replicas, or in two pools, for prefill and decode.

    Of two pools the first makes the first token; ``transfer_s(prompt tokens)`` seconds later the request is queued in
    the second pool, which has separate pages; transfers do not delay each other. A request preempted there is prefilled
    again there. Of simultaneous events, steps end first, then requests arrive, then steps begin. At most
    ``concurrency`` requests are in flight: when one ends the client sends the next, if it has arrived, and the record
    has the sending time as its arrival. ``most_jump=1`` simulates single steps, with the same result. ``spans`` records
    the request in each slot, for small simulations. Raises InputError for arguments that cannot run.
    """
    if not concurrency >= 1:
        raise InputError(f"concurrency is {concurrency:g}. Give a client of one request at a time, or of more.")
    times = RequestTimes(len(traffic))
    pool_lines = [_Line(pool, times, most_jump=most_jump, spans=spans) for pool in pools]
    events = _Events(traffic, pool_lines, transfer_s, concurrency)
    with working("simulating requests", len(traffic)) as work:
        events.run(work)
    return ServingRecord(
        traffic=replace(traffic, arrival_s=events.sent_s),
        times=times,
        page_len=pools[-1].limits.page_len,
        logs=tuple(pool_line.log for pool_line in pool_lines),
        spans=tuple(pool_line.spans for pool_line in pool_lines),
    )


class _Events:
    """The event queue of (time, kind, id): kind 0, a replica's step ends; 1, a request arrives; 2, a step begins."""

    def __init__(
        self, traffic: RequestTraffic, lines: list[_Line], transfer_s: Callable[[int], float], concurrency: float
    ) -> None:
        self.sent_s = traffic.arrival_s.copy()
        self._lines, self._transfer_s, self._most = lines, transfer_s, concurrency
        self._replicas = [replica for line in lines for replica in line.replicas]
        self._source, self._in_flight = traffic.requests(), 0
        self._coming: dict[int, GenerationRequest] = {}
        self._events: list[tuple[float, int, int]] = []

    def run(self, work: RunningWork) -> None:
        """Processes events until none is left; counts the requests that have ended as done by ``work``."""
        self._work = work
        self._send(0.0)
        while self._events:
            now_s, event_kind, owner_id = heappop(self._events)
            if event_kind == 1:
                self._arrive(now_s, owner_id)
            elif event_kind == 2:
                if self._replicas[owner_id].end_s == inf and self._replicas[owner_id].begin(now_s):
                    heappush(self._events, (self._replicas[owner_id].end_s, 0, owner_id))
            elif self._replicas[owner_id].end_s == now_s:
                self._end(now_s, owner_id)
                heappush(self._events, (now_s, 2, owner_id))

    def _send(self, now_s: float) -> None:
        """Sends the client's next request, unless ``concurrency`` are in flight."""
        if self._in_flight < self._most and (next_arrival := next(self._source, None)):
            self._in_flight += 1
            sent_s, request = max(next_arrival[0], now_s), next_arrival[1]
            self.sent_s[request.number] = sent_s
            self._coming[request.number] = request
            heappush(self._events, (sent_s, 1, request.number))

    def _arrive(self, now_s: float, request_id: int) -> None:
        request = self._coming.pop(request_id)
        pool_line = self._lines[request.prefilled]
        replica_index = pool_line.route(request) + len(self._lines[0].replicas) * request.prefilled
        if len(self._lines) > 1 and not request.prefilled:
            self._coming[request_id] = request
            request = replace(request, output=1)
        if not request.prefilled:
            self._send(now_s)
        replica = self._replicas[replica_index]
        planned_end_s = replica.end_s
        replica.submit(request, now_s)
        if planned_end_s == inf:
            heappush(self._events, (now_s, 2, replica_index))
        elif replica.end_s < planned_end_s:
            heappush(self._events, (replica.end_s, 0, replica_index))

    def _end(self, now_s: float, replica_index: int) -> None:
        """Ends a replica's step: sends its finished requests to the decode pool, or lets the client send the next."""
        for ended_request in self._replicas[replica_index].end():
            full_request = self._coming.pop(ended_request.number, ended_request)
            if full_request.output > ended_request.output:
                self._coming[ended_request.number] = replace(full_request, prefilled=True)
                heappush(self._events, (now_s + self._transfer_s(ended_request.prompt), 1, ended_request.number))
                continue
            self._in_flight -= 1
            self._work.done += 1
            if self._in_flight == self._most - 1:
                self._send(now_s)
