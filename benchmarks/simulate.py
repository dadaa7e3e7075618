"""An hour of traffic at 10,000 requests a minute through replicas of a server: seconds of CPU, and what comes out.

python benchmarks/simulate.py          every policy, with a table of step times in front of the clock
python benchmarks/simulate.py --exact  the clock asked for every step

Prompts have 500 tokens in the mean, outputs 250, both lognormal. A replica is llama3-70b in bfloat16 on four H100s. Its
step lasts 1 ms more than the longer of two times: weights and cache at 3.35 TB/s, products at 60% of 989 TFLOP/s.
Run with OMP_NUM_THREADS=1 for one core.
"""

import argparse
import resource
import time
from typing import Any

import numpy as np

from meshwright.batching.clock import Clock, TabledClock
from meshwright.batching.limits import Policy, SchedulerLimits
from meshwright.batching.record import LatencyTargets, ServingRecord
from meshwright.batching.simulation import ReplicaPool, simulate
from meshwright.batching.traffic import RequestTraffic, lognormal, poisson
from meshwright.core.units import format_seconds

RATE_PER_S, HOUR_S = 10_000 / 60, 3600.0
PARAMETERS, CACHE_BYTES, PAGES = 70.6e9, 327_680, 25_000
CHIPS, BYTES_PER_S, FLOPS_PER_S = 4, 3.35e12, 0.6 * 989e12


class Roofline(Clock):
    """Seconds of a step from bytes and FLOPs, to be fast and plausible: not the cost model."""

    def step_s(self, num_decode: Any, cached_tokens: Any, prefill_tokens: Any, prefill_past: Any) -> Any:
        tokens = num_decode + prefill_tokens
        moved = (2 * PARAMETERS + CACHE_BYTES * (cached_tokens + prefill_past)) / (CHIPS * BYTES_PER_S)
        pairs = cached_tokens + prefill_tokens * (prefill_past + 1)
        flops = (2 * PARAMETERS * tokens + 4 * 80 * 8192 * pairs) / (CHIPS * FLOPS_PER_S)
        return 1e-3 + np.maximum(moved, flops)


def pool(clock: Clock, policy: Policy, num_replicas: int, **bounds: Any) -> ReplicaPool:
    limits = SchedulerLimits(policy=policy, num_pages=PAGES, **bounds)
    return ReplicaPool(limits=limits, clock=clock, num_replicas=num_replicas)


def disaggregated(traffic: RequestTraffic, clock: Clock) -> ServingRecord:
    """16 replicas prefill one prompt after the other and send the cache at 50 GB/s, 48 decode."""
    return simulate(
        traffic,
        pool(clock, "interleaved", 16, token_budget=1),
        pool(clock, "chunked", 48),
        transfer_s=lambda tokens: tokens * CACHE_BYTES / 50e9,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exact", action="store_true", help="no table of step times")
    parser.add_argument("--minutes", type=float, default=60.0, help="of traffic (60)")
    given = parser.parse_args()
    traffic = poisson(
        RATE_PER_S, duration_s=60 * given.minutes, prompt=lognormal(500), output=lognormal(250, most=4096), seed=1
    )
    most_prompt = int(traffic.prompt.max()) + 4096
    started = time.process_time()
    clock = Roofline() if given.exact else TabledClock(Roofline(), (256, 16 * PAGES, 256 * most_prompt, most_prompt))
    print(f"{len(traffic):,} requests; step times in {time.process_time() - started:.2f} s of CPU")
    cases = {
        "chunked, 64": lambda: simulate(traffic, pool(clock, "chunked", 64)),
        "chunked, 16": lambda: simulate(traffic, pool(clock, "chunked", 16)),
        "interleaved, 64": lambda: simulate(traffic, pool(clock, "interleaved", 64)),
        "static of 16, 64": lambda: simulate(traffic, pool(clock, "static", 64, max_requests=16)),
        "disaggregated, 16 + 48": lambda: disaggregated(traffic, clock),
    }
    print("replicas                   CPU  requests/s  batch  TTFT p50       p99  TPOT p50       p99   ITL p99  good")
    for name, run in cases.items():
        started = time.process_time()
        found = run().summary(LatencyTargets(ttft_s=1.0, tpot_s=0.05))
        spent = time.process_time() - started
        latencies = (found.ttft.p50, found.ttft.p99, found.tpot.p50, found.tpot.p99, found.itl.p99)
        print(
            f"{name:22}  {spent:4.1f} s  {found.requests_per_s:10.1f}  {found.pools[-1].mean_batch:5.1f}"
            + "".join(f"  {format_seconds(one):>8}" for one in latencies)
            + f"  {100 * found.met:3.0f}%",
            flush=True,
        )
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f} MB at most")


if __name__ == "__main__":
    main()
