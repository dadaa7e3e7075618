"""Metrics of the server for Prometheus, under vLLM's names, and for a line of its log.

Counts are plain numbers that only the event loop's thread changes; Prometheus's types would cost microseconds a token.
The cost model predicts steps only when metrics are read, which takes tens of milliseconds, in another thread.
"""

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from meshwright.core.units import format_params, format_seconds
from meshwright.serve.frontend import Frontend
from meshwright.serve.step_sums import StepKey, StepSums
from meshwright.serve.token_times import TokenTimes

if TYPE_CHECKING:
    from meshwright.simulate.step_prices import StepPrices

_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_BUCKETS_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)

_HISTOGRAMS = {
    "request_queue_time_seconds": (_REQUEST_BUCKETS_S, "From the request until it is first scheduled."),
    "time_to_first_token_seconds": (_TTFT_BUCKETS_S, "From the request to its first token."),
    "inter_token_latency_seconds": ((*_TOKEN_BUCKETS_S, 1, 2.5, 5), "From a token to the next."),
    "request_time_per_output_token_seconds": ((*_TOKEN_BUCKETS_S, 1, 2.5, 5), "Mean over a request's later tokens."),
    "e2e_request_latency_seconds": (_REQUEST_BUCKETS_S, "From the request to its last token."),
}


_STEPS = {
    "steps": "Steps of the engine.",
    "step_seconds": "Seconds of steps, as clients see them.",
    "step_predicted_seconds": "Seconds of these steps by the cost model.",
    "weight_bytes": "Bytes of weights that these steps read on each device.",
    "kv_bytes": "Bytes of the cache that these steps read on each device.",
    "flops": "FLOPs of the model in these steps on each device.",
}
"""Counters of each kind of step, name -> help, in the order of the columns of `ServerMetrics._priced`."""


_LOGGER = logging.getLogger(__name__)


class _Histogram:
    """Counts values per bucket between ``bounds``, and adds them up."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        num_below, buckets = 0, list[tuple[str, float]]()
        for bound, bucket_count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            num_below += bucket_count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), num_below))
        return buckets


class ServerMetrics(Collector):
    """Counts of one model's server and the state of its engine, in a separate Prometheus registry.

    ``load_prices`` returns the cost model of steps, or None; it is called when steps are first read.
    """

    load_prices: "Callable[[], StepPrices | None]"

    def __init__(self, model: str, frontend: Frontend, now: Callable[[], float] = time.perf_counter) -> None:
        self.frontend, self.load_prices, self._now = frontend, lambda: None, now
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self._label = [model]
        self._histograms = {name: _Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self.inter_token = self._histograms["inter_token_latency_seconds"]
        self._registry = CollectorRegistry()
        self._utilisation: tuple[float, ...] = ()  # shares of peak FLOP/s and of peak memory bandwidth
        self._seen = self._present()
        self._registry.register(self)

    def admitted(self, times: TokenTimes, admitted_s: float) -> None:
        """Adds the queue time of a request that was first scheduled at ``admitted_s`` (0: not known)."""
        if admitted_s:
            self._histograms["request_queue_time_seconds"].add(max(admitted_s - times.start_s, 0.0))

    def started(self, times: TokenTimes) -> None:
        """Adds the time to first token of a request."""
        if times.ttft_s is not None:
            self._histograms["time_to_first_token_seconds"].add(times.ttft_s)

    def ended(self, times: TokenTimes, reason: str, end_s: float) -> None:
        """Adds a sequence that ended at ``end_s`` with the finish ``reason`` that its client receives."""
        self.finished[reason] += 1
        self._histograms["e2e_request_latency_seconds"].add(end_s - times.start_s)
        if times.tpot_s is not None:
            self._histograms["request_time_per_output_token_seconds"].add(times.tpot_s)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus's text format. May run in another thread."""
        return generate_latest(self._registry)

    def line(self) -> str:
        """Returns a log line on the time since the last call, "" if no step ran; also updates the utilisation metrics.
        May run in another thread."""
        (start_s, old_counts, old_sums), (end_s, now_counts, now_sums) = self._seen, self._present()
        self._seen, took_s = (end_s, now_counts, now_sums), end_s - start_s
        added_sums: dict[StepKey, np.ndarray] = {
            key: np.subtract(now_row, old_sums.get(key, 0)) for key, now_row in now_sums.items()
        }
        row_by_key, state = self._priced({key: row for key, row in added_sums.items() if row[0]}), self.frontend.state
        rates, prices = sum(row_by_key.values(), np.zeros(len(_STEPS))) / took_s, self._prices if now_sums else None
        if prices and prices.peak_flops_per_s:
            self._utilisation = rates[5] / prices.peak_flops_per_s, (rates[3] + rates[4]) / prices.peak_bytes_per_s
        if not row_by_key:
            return ""
        tokens_in, tokens_out, num_looked_up, num_hit = now_counts - old_counts
        phrases = [
            f"{state.running} run, {self._num_waiting:,} wait; tokens/s {format_params(round(tokens_in / took_s))} in, "
            f"{format_params(round(tokens_out / took_s))} out; cache {self._cache_share:.0%}"
            + (f", hits {num_hit / num_looked_up:.0%}" if num_looked_up else "")
        ]
        decode_rows = [row for (kind, _), row in row_by_key.items() if kind == "decode"]
        if decode_rows:
            num_steps, measured_s, planned_s = np.sum(decode_rows, axis=0)[:3]
            planned_text = "" if np.isnan(planned_s) else f", planned {format_seconds(planned_s / num_steps)}"
            phrases.append(f"decode {format_seconds(measured_s / num_steps)}{planned_text}")
        if self._utilisation:
            mfu, mbu = (f"{share:.{int(share < 0.0995)}%}" for share in self._utilisation)
            phrases.append(f"MFU {mfu}, MBU {mbu}")
        return "; ".join(phrases)

    def _present(self) -> tuple[float, np.ndarray, dict[StepKey, StepSums]]:
        state = self.frontend.state
        token_counts = self.prompt_tokens, self.generation_tokens, state.prefix_queries, state.prefix_hits
        return self._now(), np.array(token_counts), dict(state.sums)  # a copy, as the engine keeps adding

    def _priced(self, sums: Mapping[StepKey, ArrayLike]) -> dict[StepKey, np.ndarray]:
        """Returns the values of `_STEPS` for each kind of step; NaN for predictions without a cost model."""
        figures = np.full((len(sums), len(_STEPS)), np.nan)
        if sums:
            sum_rows = np.array([*sums.values()], float)
            figures[:, :2], num_steps = sum_rows[:, :2], sum_rows[:, :1]
            try:
                # the mean step of each kind is predicted
                figures[:, 2:] = num_steps * self._prices.of(sum_rows[:, 2:] / num_steps) if self._prices else np.nan
            except Exception:  # a metric must not end the server
                _LOGGER.exception("the cost model failed; steps are no longer predicted")
                self._prices = None
        return dict(zip(sums, figures, strict=True))

    @cached_property
    def _prices(self) -> "StepPrices | None":
        return self.load_prices()

    @property
    def _num_waiting(self) -> int:
        # `running` is from the last step; some may have ended since
        return max(0, self.frontend.in_system - self.frontend.state.running)

    @property
    def _cache_share(self) -> float:
        state = self.frontend.state
        return state.pages_used / state.num_pages if state.num_pages else 0.0

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """Yields all metrics; Prometheus's registry calls this."""
        state = self.frontend.state
        gauge_specs = {
            "vllm:num_requests_running": (state.running, "Sequences in the running batch."),
            "vllm:num_requests_waiting": (self._num_waiting, "Sequences waiting."),
            "vllm:kv_cache_usage_perc": (self._cache_share, "Share of the cache's pages in use; 1 is all of them."),
        }
        counter_specs = {
            "num_preemptions": (state.preemptions, "Sequences preempted, which lost their pages."),
            "prefix_cache_queries": (state.prefix_queries, "Tokens of prompts looked up in the prefix cache."),
            "prefix_cache_hits": (state.prefix_hits, "Tokens of prompts found in the prefix cache."),
            "external_prefix_cache_hits": (state.host_hits, "Tokens of prompts found in the host's memory."),
            "spec_decode_num_draft_tokens": (state.drafted, "Tokens drafted."),
            "spec_decode_num_accepted_tokens": (state.accepted, "Drafted tokens accepted."),
            "prompt_tokens": (self.prompt_tokens, "Tokens of prompts of requests with a first output."),
            "generation_tokens": (self.generation_tokens, "Tokens generated."),
        }
        for name, peak_share in zip(("mfu", "bandwidth_utilization"), self._utilisation, strict=False):
            gauge_specs[f"meshwright:{name}"] = (peak_share, "Share of the devices' peak over the last 10 s.")
        for name, (value, help_text) in gauge_specs.items():
            gauge = GaugeMetricFamily(name, help_text, labels=["model_name"])
            gauge.add_metric(self._label, value)
            yield gauge
        figures_by_key = self._priced(dict(state.sums))
        for column, (name, help_text) in enumerate(_STEPS.items()):
            counter = CounterMetricFamily(f"meshwright:{name}", help_text, labels=["model_name", "kind", "rows"])
            for (kind, num_rows), figures in figures_by_key.items():
                if not np.isnan(figures[column]):
                    counter.add_metric([*self._label, kind, f"{num_rows}"], figures[column])
            yield counter
        for name, (value, help_text) in counter_specs.items():
            counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=["model_name"])
            counter.add_metric(self._label, value)
            yield counter
        ends_counter = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended.", labels=["model_name", "finished_reason"]
        )
        for reason in ("stop", "length", "abort"):
            ends_counter.add_metric([*self._label, reason], self.finished[reason])
        yield ends_counter
        for name, histogram in self._histograms.items():
            histogram_family = HistogramMetricFamily(f"vllm:{name}", _HISTOGRAMS[name][1], labels=["model_name"])
            histogram_family.add_metric(self._label, histogram.cumulative(), histogram.total)
            yield histogram_family
