"""Figures of the server for Prometheus, under vLLM's names.

They are plain numbers that the event loop's thread alone changes; Prometheus's own types would cost microseconds a
token.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from meshwright.serve.frontend import Frontend
from meshwright.serve.token_times import TokenTimes

_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
_TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_BUCKETS_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)

_HISTOGRAMS = {
    "time_to_first_token_seconds": (_TTFT_BUCKETS_S, "From the request to its first token."),
    "inter_token_latency_seconds": ((*_TOKEN_BUCKETS_S, 1, 2.5, 5), "From a token to the next."),
    "request_time_per_output_token_seconds": ((*_TOKEN_BUCKETS_S, 1, 2.5, 5), "Mean over a request's later tokens."),
    "e2e_request_latency_seconds": (_REQUEST_BUCKETS_S, "From the request to its last token."),
}


class _Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        done, rows = 0, list[tuple[str, float]]()
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            done += count
            rows.append(("+Inf" if bound == float("inf") else str(float(bound)), done))
        return rows


class ServerMetrics(Collector):
    """Counts of one model's server, and the state of its engine; in a registry of its own."""

    def __init__(self, model: str, frontend: Frontend) -> None:
        self.frontend = frontend
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self._label = [model]
        self._histograms = {name: _Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self.inter_token = self._histograms["inter_token_latency_seconds"]
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def started(self, times: TokenTimes) -> None:
        """Notes the first token of a request."""
        if times.ttft_s is not None:
            self._histograms["time_to_first_token_seconds"].add(times.ttft_s)

    def ended(self, times: TokenTimes, reason: str, end_s: float) -> None:
        """Notes the end of a sequence at ``end_s``, for the ``reason`` that its client is told."""
        self.finished[reason] += 1
        self._histograms["e2e_request_latency_seconds"].add(end_s - times.start_s)
        if times.tpot_s is not None:
            self._histograms["request_time_per_output_token_seconds"].add(times.tpot_s)

    def text(self) -> bytes:
        """Returns all figures in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """Yields the figures, as Prometheus asks for them."""
        state = self.frontend.state
        share = state.pages_used / state.num_pages if state.num_pages else 0.0
        gauges = {
            "num_requests_running": (state.running, "Sequences in the running batch."),
            "num_requests_waiting": (max(0, self.frontend.in_system - state.running), "Sequences that wait."),
            "kv_cache_usage_perc": (share, "Share of the cache's pages in use; 1 is all of them."),
        }
        counters = {
            "num_preemptions": (state.preemptions, "Sequences that lost their pages and ran again."),
            "prefix_cache_queries": (state.prefix_queries, "Tokens of prompts looked up in the prefix cache."),
            "prefix_cache_hits": (state.prefix_hits, "Tokens of prompts found in the prefix cache."),
            "external_prefix_cache_hits": (state.host_hits, "Tokens of prompts found in the host's memory."),
            "prompt_tokens": (self.prompt_tokens, "Tokens of prompts of requests with a first output."),
            "generation_tokens": (self.generation_tokens, "Tokens generated."),
        }
        for name, (value, words) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", words, labels=["model_name"])
            gauge.add_metric(self._label, value)
            yield gauge
        for name, (value, words) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", words, labels=["model_name"])
            counter.add_metric(self._label, value)
            yield counter
        ends = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended.", labels=["model_name", "finished_reason"]
        )
        for reason in ("stop", "length", "abort"):
            ends.add_metric([*self._label, reason], self.finished[reason])
        yield ends
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", _HISTOGRAMS[name][1], labels=["model_name"])
            family.add_metric(self._label, histogram.cumulative(), histogram.total)
            yield family
