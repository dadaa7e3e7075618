"""Compares a server under load with a simulation of the same requests."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
from scipy.optimize import nnls

from meshwright.batching.record import LatencyTargets, ServingSummary
from meshwright.batching.traffic import LengthSampler, RequestTraffic, traffic_of
from meshwright.bench.serving.clock import ROUNDS, EngineClock, simulate_engine
from meshwright.bench.serving.load import LoadClient, ServerFacts
from meshwright.bench.serving.server import BenchedServer
from meshwright.core.errors import InputError

PROMPT, OUTPUT = 16, 48
"""Prompt and output tokens of the requests that measure the seconds that HTTP adds."""


class RateResult(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted (None without a clock) and measured summaries of one load of ``rate_per_s`` offered requests a second.

    ``drift`` is a step's measured seconds just before the load over the clock's, minus 1: above 0 if other load slows
    the machine."""

    rate_per_s: float
    num_requests: int
    predicted: ServingSummary | None
    measured: ServingSummary
    failures: tuple[str, ...] = ()
    drift: float | None = None


class LoadShape(msgspec.Struct, frozen=True, kw_only=True):
    """Distributions of the requests to send: lengths of prompts and outputs, and gaps between arrivals.

    Gaps have a gamma distribution of shape ``burstiness``: 1 gives Poisson arrivals, less gives bursts.
    """

    prompt: LengthSampler
    output: LengthSampler
    burstiness: float = 1.0
    seed: int = 0

    def traffic(self, rate_per_s: float, count: int) -> RequestTraffic:
        """Returns ``count`` requests, on average ``rate_per_s``. Raises InputError if ``burstiness`` is not above 0."""
        if not 0 < self.burstiness < np.inf:
            raise InputError(f"burstiness is {self.burstiness:g}. Give 1 for Poisson's arrivals, less for bursts.")
        rng = np.random.default_rng(self.seed)
        unit_gaps = rng.gamma(self.burstiness, 1 / self.burstiness, count)
        arrival_s = np.cumsum(unit_gaps) - unit_gaps[0]
        traffic = traffic_of(arrival_s, self.prompt(rng, count), self.output(rng, count))
        return traffic.at_rate(rate_per_s)


def check_lengths(traffic: RequestTraffic, facts: ServerFacts) -> None:
    """Raises InputError for a request that is too long for the server."""
    max_tokens = int((traffic.prompt + traffic.output).max())
    if facts.max_len is not None and max_tokens > facts.max_len:
        raise InputError(
            f"a request of {max_tokens:,} tokens is too long for the server, which has {facts.max_len:,} positions. "
            f"Give shorter --prompt and --output, or a longer --max-len."
        )


async def over_http(client: LoadClient, facts: ServerFacts, clock: EngineClock, most: int) -> EngineClock:
    """Returns the clock with the seconds that HTTP adds per step, per token and per request, measured on a server.

    Bursts of 1 to ``most`` requests decode together; their steps are longer than the engine's without HTTP, because
    host and devices share processors, and threads share the interpreter.
    """
    burst_sizes = sorted({1, max(most // 4, 1), max(most // 2, 1), most})
    gaps_by_size: dict[int, list[float]] = {burst_size: [] for burst_size in burst_sizes}
    for burst_size in burst_sizes * ROUNDS:
        gaps_by_size[burst_size] += await _burst(client, facts, burst_size)
    served_step_s = np.array([np.median(gaps) for gaps in gaps_by_size.values()])
    engine_step_s = np.array([_burst_s(clock, burst_size) for burst_size in burst_sizes])
    matrix = np.stack([np.ones(len(burst_sizes)), burst_sizes], axis=1) / served_step_s[:, None]
    served_s, token_s = nnls(matrix, np.maximum(served_step_s - engine_step_s, 0) / served_step_s)[0].tolist()
    single_traffic = traffic_of(np.zeros(9), np.full(9, PROMPT), np.full(9, 1))
    ttft_s = np.median((await client.send(single_traffic, facts, concurrency=1)).record.ttft_s)
    request_s = float(ttft_s) - clock.host_s - float(clock.step_s(0, 0, PROMPT, (PROMPT - 1) / 2))
    return replace(clock, served_s=served_s, token_s=token_s, request_s=max(request_s, 0.0))


async def _burst(client: LoadClient, facts: ServerFacts, burst_size: int) -> list[float]:
    """Returns the seconds between tokens of requests that decode together, the first quarter left out."""
    burst_traffic = traffic_of(np.zeros(burst_size), np.full(burst_size, PROMPT), np.full(burst_size, OUTPUT))
    gaps = (await client.send(burst_traffic, facts)).record.gaps
    gaps_s: list[float] = gaps.gap_s[gaps.end_s > np.quantile(gaps.end_s, 0.25)].tolist()
    return gaps_s


def _burst_s(clock: EngineClock, burst_size: int) -> float:
    """Returns the clock's seconds of a mean step of a burst."""
    return float(clock.step_s(burst_size, burst_size * (PROMPT + OUTPUT / 2), 0, 0.0))


async def compare(
    client: LoadClient,
    traffic: RequestTraffic,
    targets: LatencyTargets,
    server: BenchedServer | None = None,
    on_sent: Callable[[str], None] = lambda line: None,
) -> RateResult:
    """Sends the requests, and simulates the answered ones with the limits and clock of ``server``, if given."""
    facts, drift = await client.facts(), None
    if server is not None:
        burst_size = max(server.limits.max_requests // 4, 1)
        drift = float(np.median(await _burst(client, facts, burst_size))) / _burst_s(server.clock, burst_size) - 1
    on_sent(f"{len(traffic):,} requests, {traffic.rate_per_s:.3g} a second, for {traffic.arrival_s[-1]:.0f} s")
    measured_load = await client.send(traffic, facts)
    predicted_summary = None
    if server is not None:
        simulated_record = simulate_engine(measured_load.record.traffic, server.limits, server.clock)
        predicted_summary = simulated_record.summary(targets)
    return RateResult(
        rate_per_s=traffic.rate_per_s,
        num_requests=len(traffic),
        predicted=predicted_summary,
        measured=measured_load.record.summary(targets),
        failures=measured_load.failures,
        drift=drift,
    )
