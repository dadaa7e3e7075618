"""Simulates a planned service under Poisson arrivals: the scheduler of `batching` with the cost model as its clock."""

from functools import partial

import numpy as np
from msgspec.structs import replace

from meshwright.algebra.sizes import Number
from meshwright.batching.clock import Clock, TabledClock
from meshwright.batching.limits import Policy, SchedulerLimits
from meshwright.batching.record import LatencyTargets, ServingRecord
from meshwright.batching.simulation import ReplicaPool, simulate
from meshwright.batching.traffic import MOST_REQUESTS, RequestTraffic, parse_lengths, poisson, traffic_of
from meshwright.core.errors import InputError
from meshwright.cost.setting import Setting
from meshwright.cost.step_rates import strategy_placements
from meshwright.cost.train_step import PricedStep
from meshwright.cost.work.sequences import LikeSequences
from meshwright.plan.plan_file import EnginePool, ServicePlan
from meshwright.plan.serving.result import ServiceResult
from meshwright.plan.serving.service import Service
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, sequence_shards

PAGE_LEN = 16
"""Positions of a page, as in vLLM."""

TOKEN_BUDGET = 8192
"""Most tokens of a step (prefilled ones, and one per decoding sequence) for each shard of the sequences, as in vLLM's
server on chips of 70 GB and more (vllm/engine/arg_utils.py)."""


class PricedClock(Clock):
    """Prices the steps of one engine by the cost model.

    Decoding requests have one row each, and caches of their mean length; prefilled tokens are prompts of at most
    ``prompt_len`` tokens after their cached part. With an encoder prefill encodes sources of ``prompt_len``, which
    caches include. Without ``decodes`` decoding costs 0 s. Where sequences are split over devices, each device has as
    many prompt rows as the busiest. Requests are counted for one of ``num_shards`` equal replicas of attention.
    """

    def __init__(
        self,
        setting: Setting,
        strategy: Strategy,
        *,
        decodes: bool = True,
        num_shards: int = 1,
        prompt_len: float = np.inf,
    ) -> None:
        self._setting, self._strategy, self._decodes, self._num_shards = setting, strategy, decodes, num_shards
        self._prompt_len = prompt_len

    def step_s(self, num_decode: Number, cached_tokens: Number, prefill_tokens: Number, prefill_past: Number) -> Number:
        """Returns the seconds of steps, see `Clock`; arguments may be arrays that broadcast."""
        arguments = (num_decode, cached_tokens, prefill_tokens, prefill_past)
        num_decoding, num_cached, num_prefilled, past = (np.asarray(argument, float) for argument in arguments)
        seq_shards, num_seqs = sequence_shards(self._strategy), np.maximum(num_decoding, 1)
        decode_seqs = LikeSequences(np.maximum(num_seqs * self._num_shards, seq_shards), 1.0, num_cached / num_seqs)
        prompt_len, num_rows = np.clip(num_prefilled, 1, self._prompt_len), np.maximum(num_prefilled, 1)
        # every device has as many rows as the busiest one
        padded_rows = np.maximum(seq_shards * np.minimum(num_rows, self._prompt_len), num_rows)
        prompt_seqs = LikeSequences(padded_rows / prompt_len, prompt_len, np.maximum(past - (prompt_len - 1) / 2, 0.0))
        if self._setting.model.encoder:  # its sources run in programs of their own
            source = self._prompt_len
            source_s = self._seconds("prefill", LikeSequences(padded_rows / source, 1.0, 0.0, source))
            num_before = np.maximum(decode_seqs.before - source, 0.0)
            decode_s = self._seconds("decode", replace(decode_seqs, before=num_before, source=source))
            decode_s = np.where(num_decoding > 0, decode_s, 0.0) * self._decodes
            return decode_s + np.where(num_prefilled > 0, source_s, 0.0)
        decode_only_s: Number = 0.0
        sequences: tuple[LikeSequences, ...] = (prompt_seqs,)
        if self._decodes:
            decode_only_s = np.where(num_decoding > 0, self._seconds("decode", decode_seqs), 0.0)
            sequences = replace(decode_seqs, count=decode_seqs.count * (num_decoding > 0)), prompt_seqs
        return np.where(num_prefilled > 0, self._seconds("prefill", *sequences), decode_only_s)

    def _seconds(self, phase: str, *sequences: LikeSequences) -> Number:
        """Returns the seconds of a step of ``phase`` with the given sequences, whose fields may be arrays."""
        setting, strategy = replace(self._setting, job=Job(kind=phase, batch_seqs=1, seq_len=1)), self._strategy
        derived = setting.derived(strategy)
        rates = setting.step_rates(strategy, strategy_placements(setting.cluster, strategy)[:1], derived)
        sizes = setting.step_sizes(strategy, *sequences)
        priced_step = PricedStep(derived=derived, sizes=sizes, rates=rates, pipeline=setting.pipeline(strategy))
        return priced_step.seconds.step_s


def service_traffic(
    service: Service,
    *,
    duration_s: float,
    requests_per_s: float,
    lengths: tuple[str | None, str | None] = (None, None),
    at_once: bool = False,
    seed: int = 0,
) -> RequestTraffic:
    """Returns requests with Poisson arrivals at ``requests_per_s`` for ``duration_s``; with ``at_once`` as many on
    average, all at time 0, for a client of fixed concurrency.

    ``lengths`` are texts of prompt and output lengths for `parse_lengths`; None takes the service's mean length. Raises
    InputError for a rate or a duration that is not positive.
    """
    if not (duration_s > 0 and requests_per_s > 0):
        raise InputError(f"simulating {duration_s} s at {requests_per_s} requests/s: both must be above 0.")
    mean_lens = (service.prompt_len, service.output_len)
    prompt_sampler, output_sampler = (
        parse_lengths(f"{mean}" if text is None else text) for text, mean in zip(lengths, mean_lens, strict=True)
    )
    if at_once:
        n, generator = round(min(max(requests_per_s * duration_s, 1), MOST_REQUESTS)), np.random.default_rng(seed)
        return traffic_of(np.zeros(n), prompt_sampler(generator, n), output_sampler(generator, n))
    return poisson(requests_per_s, duration_s=duration_s, seed=seed, prompt=prompt_sampler, output=output_sampler)


def simulate_service(
    result: ServiceResult,
    plan: ServicePlan,
    traffic: RequestTraffic,
    *,
    policy: Policy = "chunked",
    concurrency: float = np.inf,
    spans: bool = False,
) -> ServingRecord:
    """Simulates ``traffic`` on a planned service and returns the times of its requests and steps.

    The client has at most ``concurrency`` requests in flight, and sends the next when one ends. Engines that prefill
    and decode follow ``policy``; engines of separate pools prefill in chunks. A step has at most `TOKEN_BUDGET` tokens
    per shard of the sequences, or a whole prompt if several shards; a planned chunk length replaces that. Engines have
    at most the planned number of sequences; engines that decode use all free memory for cache pages. With pools a
    finished prompt waits for the transfer of its cache. ``spans`` records which request had which slot. Raises
    InputError for a policy other than "chunked" with pools, for a request longer than an engine's cache, and for
    services with prefix hits or drafts."""
    service = result.service
    if service.prefix_share:
        raise InputError(
            "services with cached prefixes of prompts are not simulated in this version. Leave out --prefix-hits."
        )
    if service.speculation:
        raise InputError("services with drafts are not simulated in this version. Leave out --accept.")
    if plan.has_pools and policy != "chunked":
        raise InputError(f"policy {policy!r} needs engines that prefill and decode, not pools. Give 'chunked'.")

    pool_of = partial(_replicas, result, plan, traffic, policy)
    if not plan.has_pools:
        return simulate(traffic, pool_of(plan.generate), concurrency=concurrency, spans=spans)
    token_transfer_s = plan.predicted.transfer_s / service.prompt_len
    pools = pool_of(plan.prefill, decodes=False), pool_of(plan.generate)
    return simulate(traffic, *pools, transfer_s=lambda n: n * token_transfer_s, concurrency=concurrency, spans=spans)


def _replicas(
    result: ServiceResult,
    plan: ServicePlan,
    traffic: RequestTraffic,
    policy: Policy,
    pool: EnginePool,
    *,
    decodes: bool = True,
) -> ReplicaPool:
    """Returns a pool's engines with their scheduler limits and clock. Raises InputError if a request of ``traffic`` is
    longer than an engine's cache."""
    service = result.service
    max_seqs, pages_per_request = max(pool.batch_seqs, plan.generate.batch_seqs), -(-service.max_len // PAGE_LEN)
    prompt_tokens = pool.batch_seqs * service.prompt_len * (not decodes)
    num_shards = sequence_shards(pool.strategy)
    # each shard of the sequences prefills whole prompts
    max_tokens = num_shards * (TOKEN_BUDGET if num_shards == 1 else max(TOKEN_BUDGET, service.prompt_len))
    token_budget = plan.chunk_len + max_seqs if plan.chunk_len else max(max_tokens, prompt_tokens, max_seqs + 1)
    fills_memory = decodes and np.isfinite(plan.predicted.free_bytes)
    page_factor = 1 + plan.predicted.free_bytes / pool.memory["kv_cache"] if fills_memory else 1
    limits = SchedulerLimits(
        policy=policy, max_requests=max_seqs, token_budget=token_budget, page_len=PAGE_LEN,
        num_pages=int(max_seqs * pages_per_request * page_factor),
    )  # fmt: skip
    longest_len = int((traffic.prompt + traffic.output).max())
    if limits.pages(longest_len) > limits.num_pages:
        raise InputError(
            f"the longest request has {longest_len:,} tokens, but the caches of an engine have room for "
            f"{limits.num_pages * PAGE_LEN:,}. Simulate shorter requests, or plan for longer ones."
        )
    # most prefill tokens of a step: all prompts of a static batch, a whole prompt if interleaved
    max_prompt_len = int(traffic.prompt.max())
    max_prefill_tokens = {"static": max_seqs * max_prompt_len, "interleaved": max_prompt_len, "chunked": 0}[policy]
    clock_limits = (max_seqs, limits.num_pages * PAGE_LEN, max(limits.token_budget, max_prefill_tokens), longest_len)
    setting = replace(result.setting.on(pool.part), storage=plan.stored.storage)
    priced_clock = PricedClock(setting, pool.strategy, decodes=decodes, prompt_len=service.prompt_len)
    clock = TabledClock(priced_clock, clock_limits)
    return ReplicaPool(limits=limits, clock=clock, num_replicas=pool.num_engines, routing="least_loaded")


def service_targets(service: Service) -> LatencyTargets:
    """Returns the TTFT and TPOT targets of a service for `ServingRecord.summary`; a missing target is infinite."""
    return LatencyTargets(ttft_s=service.ttft_s or np.inf, tpot_s=service.tpot_s or np.inf)
