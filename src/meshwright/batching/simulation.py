"""Traffic through one or two pools of replicas: who serves which request, and what comes out."""

from collections.abc import Callable, Iterable
from typing import Literal, get_args

import msgspec
import numpy as np

from meshwright.batching.clock import Clock
from meshwright.batching.limits import SchedulerLimits
from meshwright.batching.record import ServingRecord
from meshwright.batching.replica import Replica, RequestTimes
from meshwright.batching.request import GenerationRequest
from meshwright.batching.spans import SlotRecorder
from meshwright.batching.traffic import Traffic
from meshwright.core.errors import InputError, nearest

RoutingPolicy = Literal["round_robin", "least_loaded", "prefix_aware"]
"""``least_loaded``: fewest requests that wait or run. ``prefix_aware``: where the prefix was sent before, unless the
load is out of balance; requests without a prefix, and the first with one, go to the least loaded."""

IMBALANCE, IMBALANCE_RATIO = 32, 1.5
"""Loads are out of balance if the largest exceeds the least by both. Source: SGLang's cache-aware router."""

MOST_JUMP = 256
"""Steps that are priced in one call; beyond it the call costs more than it saves."""


class ReplicaPool(msgspec.Struct, frozen=True, kw_only=True):
    """Equal replicas behind a router."""

    limits: SchedulerLimits
    clock: Clock
    num_replicas: int = 1
    routing: RoutingPolicy = "round_robin"

    def check(self) -> None:
        """Raises InputError for what could not run."""
        self.limits.check()
        if self.num_replicas < 1:
            raise InputError(f"num_replicas is {self.num_replicas:,}. Give a positive number.")
        if self.routing not in get_args(RoutingPolicy):
            raise InputError(f"routing {self.routing!r} is not known.{nearest(self.routing, get_args(RoutingPolicy))}")


class _Router:
    def __init__(self, routing: RoutingPolicy, replicas: list[Replica]) -> None:
        self._routing = routing
        self._replicas = replicas
        self._num_routed = 0
        self._homes: dict[int, int] = {}

    def replica(self, request: GenerationRequest, at_s: float) -> Replica:
        """Returns the replica of a request that arrives now, run up to this time."""
        if self._routing == "round_robin":
            chosen = self._replicas[self._num_routed % len(self._replicas)]
            self._num_routed += 1
            chosen.advance(at_s)
            return chosen
        for one in self._replicas:
            if one.end_s < at_s:
                one.advance(at_s)
        loads = [one.scheduler.load for one in self._replicas]
        least = min(loads)
        index = loads.index(least)
        if self._routing == "prefix_aware" and request.prefix is not None:
            highest = max(loads)
            if not (highest - least > IMBALANCE and highest > IMBALANCE_RATIO * least):
                index = self._homes.get(request.prefix, index)
            self._homes[request.prefix] = index
        return self._replicas[index]


def _serve(
    pool: ReplicaPool,
    requests: Iterable[tuple[float, GenerationRequest]],
    times: RequestTimes,
    *,
    most_jump: int,
    spans: bool = False,
) -> list[Replica]:
    """Runs requests, in order of their arrival, through a pool until all have ended."""
    replicas = [Replica(pool.limits, pool.clock, times, most_jump) for _ in range(pool.num_replicas)]
    if spans:
        for number, one in enumerate(replicas):
            one.recorder = SlotRecorder(number, pool.limits.max_requests)
    router = _Router(pool.routing, replicas)
    for at_s, request in requests:
        router.replica(request, at_s).submit(request, at_s)
    for one in replicas:
        one.advance(np.inf)
    return replicas


def _record(traffic: Traffic, times: RequestTimes, page_len: int, pools: list[list[Replica]]) -> ServingRecord:
    return ServingRecord(
        traffic=traffic,
        times=times,
        page_len=page_len,
        logs=tuple(tuple(one.log for one in replicas) for replicas in pools),
        spans=tuple(
            tuple(span for one in replicas if one.recorder for span in one.recorder.spans) for replicas in pools
        ),
    )


def simulate(
    traffic: Traffic, pool: ReplicaPool, *, most_jump: int = MOST_JUMP, spans: bool = False
) -> ServingRecord:
    """Returns what happens to traffic in a pool of replicas that prefill and decode.

    ``most_jump=1`` takes every step by itself, with the same result. ``spans`` keeps who held which slot, for small
    simulations. Raises InputError for bounds or requests that cannot run.
    """
    pool.check()
    times = RequestTimes(len(traffic))
    replicas = _serve(pool, traffic.requests(), times, most_jump=most_jump, spans=spans)
    return _record(traffic, times, pool.limits.page_len, [replicas])


def simulate_disaggregated(
    traffic: Traffic,
    *,
    prefill: ReplicaPool,
    decode: ReplicaPool,
    transfer_s: Callable[[int], float],
    most_jump: int = MOST_JUMP,
    spans: bool = False,
) -> ServingRecord:
    """Returns what happens to traffic whose prompts one pool prefills and whose outputs another one decodes.

    The first pool makes the first token. ``transfer_s`` seconds, of the number of tokens in the prompt, after it the
    request is queued in the second pool, which keeps its own pages; transfers do not wait for each other. A request
    that is preempted there is prefilled again there. Raises InputError as `simulate`.
    """
    prefill.check()
    decode.check()
    times = RequestTimes(len(traffic))
    asked = list(traffic.requests())
    first = [(at_s, msgspec.structs.replace(one, output=1)) for at_s, one in asked]
    prefillers = _serve(prefill, first, times, most_jump=most_jump, spans=spans)
    handed = [
        (float(times.first_token_s[one.number]) + transfer_s(one.prompt), msgspec.structs.replace(one, prefilled=True))
        for _, one in asked
        if one.output > 1
    ]
    handed.sort(key=lambda each: each[0])
    decoders = _serve(decode, handed, times, most_jump=most_jump, spans=spans)
    return _record(traffic, times, decode.limits.page_len, [prefillers, decoders])
