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
from meshwright.batching.spans import SlotRecorder, SlotSpan
from meshwright.batching.steps_log import StepsLog
from meshwright.batching.traffic import RequestTraffic
from meshwright.core.errors import InputError, nearest

RoutingPolicy = Literal["round_robin", "least_loaded", "prefix_aware"]
"""``least_loaded``: fewest requests that wait or run. ``prefix_aware``: where the prefix was sent before, unless the
load is out of balance; requests without a prefix, and the first with one, go to the least loaded."""

IMBALANCE, IMBALANCE_RATIO = 32, 1.5
"""Loads are out of balance if the largest exceeds the least by both: the rule and the difference of SGLang's router."""

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


class _Served(msgspec.Struct, frozen=True):
    log: StepsLog
    spans: tuple[SlotSpan, ...]


def _serve(
    pool: ReplicaPool,
    requests: Iterable[tuple[float, GenerationRequest]],
    times: RequestTimes,
    *,
    most_jump: int,
    spans: bool,
) -> _Served:
    """Runs requests, in order of their arrival, through a pool until all have ended."""
    pool.check()
    log = StepsLog(pool.num_replicas)
    replicas = [Replica(pool.limits, pool.clock, times, log, most_jump) for _ in range(pool.num_replicas)]
    for number, one in enumerate(replicas if spans else ()):
        one.recorder = SlotRecorder(number, pool.limits.max_requests)
    homes: dict[int, int] = {}
    for count, (at_s, request) in enumerate(requests):
        if pool.routing == "round_robin":
            chosen = replicas[count % pool.num_replicas]
            chosen.advance(at_s)
        else:
            for one in replicas:
                if one.end_s < at_s:
                    one.advance(at_s)
            chosen = replicas[_route([one.scheduler.load for one in replicas], pool.routing, request.prefix, homes)]
        chosen.submit(request, at_s)
    for one in replicas:
        one.advance(np.inf)
    return _Served(log, tuple(span for one in replicas if one.recorder for span in one.recorder.spans))


def _route(loads: list[int], routing: RoutingPolicy, prefix: int | None, homes: dict[int, int]) -> int:
    """Returns the replica that a request goes to, and keeps it as the home of its prefix."""
    least, most = min(loads), max(loads)
    index = loads.index(least)
    if routing == "prefix_aware" and prefix is not None:
        if most - least <= IMBALANCE or most <= IMBALANCE_RATIO * least:
            index = homes.get(prefix, index)
        homes[prefix] = index
    return index


def simulate(
    traffic: RequestTraffic, pool: ReplicaPool, *, most_jump: int = MOST_JUMP, spans: bool = False
) -> ServingRecord:
    """Returns what happens to traffic in a pool of replicas that prefill and decode.

    ``most_jump=1`` takes every step by itself, with the same result. ``spans`` keeps who held which slot, for small
    simulations. Raises InputError for bounds or requests that cannot run.
    """
    times = RequestTimes(len(traffic))
    served = _serve(pool, traffic.requests(), times, most_jump=most_jump, spans=spans)
    return ServingRecord(
        traffic=traffic, times=times, page_len=pool.limits.page_len, logs=(served.log,), spans=(served.spans,)
    )


def simulate_disaggregated(
    traffic: RequestTraffic,
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
    times = RequestTimes(len(traffic))
    asked = list(traffic.requests())
    first = ((at_s, msgspec.structs.replace(one, output=1)) for at_s, one in asked)
    before = _serve(prefill, first, times, most_jump=most_jump, spans=spans)
    handed = [
        (float(times.first_token_s[one.number]) + transfer_s(one.prompt), msgspec.structs.replace(one, prefilled=True))
        for _, one in asked
        if one.output > 1
    ]
    handed.sort(key=lambda each: each[0])
    after = _serve(decode, handed, times, most_jump=most_jump, spans=spans)
    return ServingRecord(
        traffic=traffic,
        times=times,
        page_len=decode.limits.page_len,
        logs=(before.log, after.log),
        spans=(before.spans, after.spans),
    )
