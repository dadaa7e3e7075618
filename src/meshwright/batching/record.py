"""The result of a simulation: times of requests and tokens, the steps, and summary figures."""

from array import array
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.batching.spans import SlotSpan
from meshwright.batching.traffic import Ints, RequestTraffic
from meshwright.core.errors import InputError

Floats = NDArray[np.float64]

WARM_UP = 0.1
"""Share of the time from first to last arrival that is left out at the start, while queues fill."""


class RequestTimes:
    """When requests were first admitted, got their first token and ended (s), and how often they were preempted.

    Arrays with one entry per request of a simulation; times are NaN until they occur.
    """

    def __init__(self, num_requests: int) -> None:
        self.admitted_s = np.full(num_requests, np.nan)
        self.first_token_s = np.full(num_requests, np.nan)
        self.ended_s = np.full(num_requests, np.nan)
        self.num_preempted = np.zeros(num_requests, dtype=np.int64)


class TokenGaps(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps between consecutive tokens of a request (s), the time of the later token, and how many requests had it."""

    gap_s: Floats
    end_s: Floats
    num: NDArray[np.int32]


class StepsLog:
    """The steps of all replicas of a pool, recorded as runs of equal steps."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._runs = array("d")
        self._ends = array("d")  # ends of all steps of runs that decode
        self._lengths = array("q")  # number of those ends in each run
        self._live = array("i")  # and requests that got a token at each of them
        self._single = array("d")

    def add_run(self, start_s: float, end_s: float, running: int, decoding: int) -> None:
        """Adds a run of steps with ``running`` requests, of which ``decoding`` got a token in each step."""
        self._runs.extend((start_s, end_s, running, decoding))

    def add_ends(self, ends_s: Floats, num_live: int) -> None:
        """Adds the gaps between the ends of consecutive steps, in each of which ``num_live`` requests got a token."""
        self._ends.frombytes(ends_s.tobytes())
        self._lengths.append(len(ends_s))
        self._live.append(num_live)

    def add_gap(self, gap_s: float, end_s: float, num: int) -> None:
        """Adds one gap that ``num`` requests had, ending at ``end_s``."""
        self._single.extend((gap_s, end_s, num))

    def gaps(self) -> TokenGaps:
        """Returns all gaps, in no particular order."""
        ends_s, steps_per_run = np.array(self._ends), np.array(self._lengths)
        has_gap = np.ones(len(ends_s), dtype=bool)
        has_gap[np.cumsum(steps_per_run) - steps_per_run] = False
        gap_s, end_s, num_requests = np.array(self._single).reshape(-1, 3).T
        return TokenGaps(
            gap_s=np.concatenate([gap_s, np.diff(ends_s, prepend=0.0)[has_gap]]),
            end_s=np.concatenate([end_s, ends_s[has_gap]]),
            num=np.concatenate([num_requests.astype(np.int32), np.repeat(np.array(self._live), steps_per_run - 1)]),
        )

    def runs(self) -> Floats:
        """Returns a row (start_s, end_s, running, decoding) for each run of steps."""
        return np.array(self._runs).reshape(-1, 4)


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and percentiles in seconds; NaN without observations."""

    mean: float
    p50: float
    p90: float
    p99: float


class LatencyTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a request that counts as goodput: seconds to first token, and mean seconds per later token."""

    ttft_s: float = np.inf
    tpot_s: float = np.inf

    def check(self) -> None:
        """Raises InputError for targets that are not positive."""
        if not (self.ttft_s > 0 and self.tpot_s > 0):
            raise InputError(f"targets of {self.ttft_s:g} s and {self.tpot_s:g} s. Give positive times.")


class PoolUse(msgspec.Struct, frozen=True, kw_only=True):
    """Means over replicas and time: the share of time in which a step runs, the running requests, and the requests that
    get a token in a step that decodes."""

    utilisation: float
    mean_running: float
    mean_batch: float


class ServingSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the steady state, from ``start_s`` to ``end_s``.

    Latencies cover the ``num_requests`` that arrive in it, ITL (gaps between tokens) the tokens that are made in it.
    TTFT counts from arrival; TPOT is the mean gap of a request (requests of one token have none); ``queue`` is the time
    to the first admission. Rates count requests that end in it; ``offered_per_s`` counts arrivals, and exceeds
    ``requests_per_s`` if the pool is saturated. ``goodput_per_s`` counts requests that meet both targets, ``met`` is
    their share. ``page_waste`` is the empty share of the slots of taken pages, as last pages are not full: mean over
    the decoding steps of all requests. ``pools``: prefill, then decode, if there are two.
    """

    start_s: float
    end_s: float
    num_requests: int
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    latency: Percentiles
    queue: Percentiles
    offered_per_s: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    met: float
    num_preempted: int
    page_waste: float
    pools: tuple[PoolUse, ...]


class ServingRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """The times of every request, and for each pool its steps (`logs`) and slots (`spans`)."""

    traffic: RequestTraffic
    times: RequestTimes
    page_len: int
    logs: tuple[StepsLog, ...]
    spans: tuple[tuple[SlotSpan, ...], ...]

    @property
    def ttft_s(self) -> Floats:
        """Seconds from the arrival of each request to its first token."""
        return self.times.first_token_s - self.traffic.arrival_s

    @property
    def latency_s(self) -> Floats:
        """Seconds from the arrival of each request to its last token."""
        return self.times.ended_s - self.traffic.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Mean seconds between tokens of each request; NaN for requests of one token."""
        num_gaps = self.traffic.output - 1
        spent_s = self.times.ended_s - self.times.first_token_s
        return np.where(num_gaps > 0, spent_s / np.maximum(num_gaps, 1), np.nan)

    @cached_property
    def gaps(self) -> TokenGaps:
        """The gaps between tokens of all requests in all pools."""
        gaps_by_log = [log.gaps() for log in self.logs]
        return TokenGaps(
            gap_s=np.concatenate([log_gaps.gap_s for log_gaps in gaps_by_log]),
            end_s=np.concatenate([log_gaps.end_s for log_gaps in gaps_by_log]),
            num=np.concatenate([log_gaps.num for log_gaps in gaps_by_log]),
        )

    def summary(self, targets: LatencyTargets | None = None, *, warm_up: float = WARM_UP) -> ServingSummary:
        """Returns the figures of the steady state. Raises InputError for ``targets`` or a ``warm_up`` out of range.

        The steady state is from ``warm_up``, a share of the time between first and last arrival, to the last arrival,
        without filling and draining. With 0, or if all requests arrive at once, it is the whole run.
        """
        goal = targets or LatencyTargets()
        goal.check()
        if not 0 <= warm_up < 1:
            raise InputError(f"warm_up is {warm_up:g}. Give a share of the time from 0 to below 1.")
        arrival_s, ended_s, traffic = self.traffic.arrival_s, self.times.ended_s, self.traffic
        first_arrival_s, last_arrival_s = float(arrival_s[0]), float(arrival_s[-1])
        is_whole_run = not warm_up or first_arrival_s == last_arrival_s
        start_s = first_arrival_s if is_whole_run else first_arrival_s + warm_up * (last_arrival_s - first_arrival_s)
        end_s = float(ended_s.max()) if is_whole_run else last_arrival_s
        duration_s = end_s - start_s
        has_arrived = arrival_s >= start_s
        has_ended = (ended_s > start_s) & (ended_s <= end_s)
        meets_targets = (self.ttft_s <= goal.ttft_s) & ~(self.tpot_s > goal.tpot_s)
        tpot_s, gaps = self.tpot_s, self.gaps
        is_counted = (gaps.end_s > start_s) & (gaps.end_s <= end_s)
        return ServingSummary(
            start_s=start_s,
            end_s=end_s,
            num_requests=int(has_arrived.sum()),
            ttft=percentiles(self.ttft_s[has_arrived]),
            tpot=percentiles(tpot_s[has_arrived & ~np.isnan(tpot_s)]),
            itl=percentiles(gaps.gap_s[is_counted], gaps.num[is_counted]),
            latency=percentiles(self.latency_s[has_arrived]),
            queue=percentiles((self.times.admitted_s - arrival_s)[has_arrived]),
            offered_per_s=float(has_arrived.sum() / duration_s),
            requests_per_s=float(has_ended.sum() / duration_s),
            input_tokens_per_s=float(traffic.prompt[has_ended].sum() / duration_s),
            output_tokens_per_s=float(traffic.output[has_ended].sum() / duration_s),
            goodput_per_s=float((meets_targets & has_ended).sum() / duration_s),
            met=float(meets_targets[has_arrived].mean()),
            num_preempted=int(self.times.num_preempted[has_arrived].sum()),
            page_waste=self._page_waste(),
            pools=tuple(_use(log, start_s, end_s) for log in self.logs),
        )

    def _page_waste(self) -> float:
        """Empty share of page slots; a request has prompt + 1, ..., prompt + output - 1 tokens in its decode steps."""
        min_cached, max_cached = self.traffic.prompt, self.traffic.prompt + self.traffic.output - 1
        used_slots = (_sum_to(max_cached) - _sum_to(min_cached)).sum()
        taken_slots = (self._slots_to(max_cached) - self._slots_to(min_cached)).sum()
        return float(1 - used_slots / taken_slots) if taken_slots else 0.0

    def _slots_to(self, n: Ints) -> Ints:
        """Returns the slots of the pages of k tokens, summed over k = 1, ..., n."""
        full_pages, rest_tokens = n // self.page_len, n % self.page_len
        return self.page_len * (self.page_len * _sum_to(full_pages) + rest_tokens * (full_pages + 1))


def _sum_to(n: Ints) -> Ints:
    return n * (n + 1) // 2


def _use(log: StepsLog, start_s: float, end_s: float) -> PoolUse:
    starts_s, ends_s, num_running, num_decoding = log.runs().T
    inside_s = np.maximum(np.minimum(ends_s, end_s) - np.maximum(starts_s, start_s), 0)
    total_s, decoding_s = log.num_replicas * (end_s - start_s), inside_s[num_decoding > 0].sum()
    return PoolUse(
        utilisation=min(float(inside_s.sum() / total_s), 1.0),
        mean_running=float((inside_s * num_running).sum() / total_s),
        mean_batch=float((inside_s * num_decoding).sum() / decoding_s) if decoding_s else 0.0,
    )


def percentiles(values: Floats, num: NDArray[np.int32] | None = None) -> Percentiles:
    """Returns mean and percentiles of values, each of which was observed ``num`` times, by default once.

    Percentiles are interpolated linearly between observations, as `numpy.percentile` does.
    """
    if not len(values):
        return Percentiles(mean=np.nan, p50=np.nan, p90=np.nan, p99=np.nan)
    sort_order = np.argsort(values)
    sorted_values = values[sort_order]
    num_up_to = np.arange(1, len(values) + 1) if num is None else np.cumsum(num[sort_order], dtype=np.int64)
    ranks = np.array([0.5, 0.9, 0.99]) * (num_up_to[-1] - 1)
    low_values = sorted_values[np.searchsorted(num_up_to, np.floor(ranks), side="right")]
    high_values = sorted_values[np.searchsorted(num_up_to, np.ceil(ranks), side="right")]
    p50, p90, p99 = (low_values + (high_values - low_values) * (ranks - np.floor(ranks))).tolist()
    return Percentiles(mean=float(np.average(values, weights=num)), p50=p50, p90=p90, p99=p99)
