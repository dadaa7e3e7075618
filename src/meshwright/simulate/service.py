"""Simulates a planned service under Poisson arrivals: the scheduler of `batching` with the cost model as its clock."""

from functools import cached_property
from typing import Any

import numpy as np
from msgspec.structs import replace

from meshwright.batching.clock import Clock, TabledClock
from meshwright.batching.limits import Policy, SchedulerLimits
from meshwright.batching.record import LatencyTargets, ServingRecord
from meshwright.batching.simulation import ReplicaPool, simulate
from meshwright.batching.traffic import MOST_REQUESTS, RequestTraffic, parse_lengths, poisson, traffic_of
from meshwright.core.errors import InputError
from meshwright.cost.setting import Setting
from meshwright.cost.step_rates import strategy_placements
from meshwright.cost.train_step import PricedStep
from meshwright.cost.work.ops import is_attention
from meshwright.plan.serving.result import EnginePool, ServicePlan, ServiceResult
from meshwright.plan.serving.service import Service
from meshwright.plan.serving.storing import StoredDtypes
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, sequence_shards

PAGE_LEN = 16
"""Positions of a page, as in vLLM."""

TOKEN_BUDGET = 8192
"""Most tokens of one step on a device with sequences of its own, those that are prefilled and one of each sequence that
decodes: as vLLM's server has on chips of 70 GB and more (vllm/engine/arg_utils.py)."""


class PricedClock(Clock):
    """Seconds of the steps of one engine, by the cost model.

    A step that decodes takes the derived decode step at its mean cache; tokens that are prefilled take a prefill of so
    many, as of prompts of at most ``prompt_len``, and attention to the tokens before them. Where devices have sequences
    of their own, prompts are spread over them. With ``num_shards`` above 1 the requests are those of one of so many
    replicas of attention, all of which do the same.
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

    def step_s(self, num_decode: Any, cached_tokens: Any, prefill_tokens: Any, prefill_past: Any) -> Any:
        """Returns the seconds of steps, see `Clock`; arguments may be arrays that broadcast."""
        asked = (num_decode, cached_tokens, prefill_tokens, prefill_past)
        decode, cached, tokens, past = (np.asarray(one, float) for one in asked)
        decode_s: Any = 0.0
        if self._decodes:
            batch, length = np.maximum(decode, 1), np.maximum(cached / np.maximum(decode, 1), 1)
            decode_s = np.where(decode > 0, self._seconds("decode", batch * self._num_shards, length), 0.0)
        # the tokens of the device that has most
        shards = sequence_shards(self._strategy)
        tokens = np.maximum(np.minimum(tokens, self._prompt_len), tokens / shards)
        each = np.clip(tokens, 1, self._prompt_len)
        prefill_s = np.where(tokens > 0, self._seconds("prefill", shards * np.maximum(tokens, 1) / each, each), 0.0)
        pairs = np.maximum(tokens * (past + 1) - np.minimum(tokens, self._prompt_len) * tokens / 2, 0.0)
        prefill_s = prefill_s + pairs * self._pair_s
        return decode_s + prefill_s

    @cached_property
    def _pair_s(self) -> float:
        """Seconds of attention for each pair of a query and an earlier key."""
        length = 4096.0
        step = self._step("prefill", 1.0, length)
        seconds = sum(
            float(c.local_s * c.count) for c in step.costs.all if not c.step.is_collective and is_attention(c.step)
        )
        return seconds / (length**2 / 2)

    def _seconds(self, phase: str, batch: Any, length: Any) -> Any:
        return self._step(phase, batch, length).seconds.step_s

    def _step(self, phase: str, batch: Any, length: Any) -> PricedStep:
        """Returns the priced step of a phase, with arrays as the sequences and as the positions."""
        setting, strategy = replace(self._setting, job=Job(kind=phase, batch_seqs=1, seq_len=1)), self._strategy
        derived = setting.derived(strategy)
        shards = max(sequence_shards(strategy), self._num_shards)
        sizes = setting.sizes(strategy, microbatch_seqs=np.maximum(batch, shards))
        dims = {**sizes.dims, "S": length} if phase == "decode" else {**sizes.dims, "T": length}
        if phase == "prefill" and "C" in dims:
            dims["C"] = dims["C"] * length  # slots of experts are those of one position so far
        sizes = replace(sizes, dims=dims, cache={})
        rates = setting.step_rates(strategy, strategy_placements(setting.cluster, strategy)[:1], derived)
        return PricedStep(derived=derived, sizes=sizes, rates=rates, pipeline=setting.pipeline(strategy))


def service_traffic(
    service: Service,
    *,
    duration_s: float,
    requests_per_s: float,
    lengths: tuple[str | None, str | None] = (None, None),
    at_once: bool = False,
    seed: int = 0,
) -> RequestTraffic:
    """Returns requests that arrive at random (Poisson) for ``duration_s``, or as many ``at_once``, for a client that
    keeps a number of them on their way.

    ``lengths`` of prompts and outputs are as `parse_lengths` reads them, None for the service's own. Raises InputError
    for a rate or a duration that is not positive.
    """
    if not (duration_s > 0 and requests_per_s > 0):
        raise InputError(f"simulating {duration_s} s at {requests_per_s} requests/s: both must be above 0.")
    own = (service.prompt_len, service.output_len)
    prompt, output = (
        parse_lengths(f"{mean}" if text is None else text) for text, mean in zip(lengths, own, strict=True)
    )
    if at_once:
        count, generator = round(min(max(requests_per_s * duration_s, 1), MOST_REQUESTS)), np.random.default_rng(seed)
        return traffic_of(np.zeros(count), prompt(generator, count), output(generator, count))
    return poisson(requests_per_s, duration_s=duration_s, seed=seed, prompt=prompt, output=output)


def simulate_service(
    result: ServiceResult,
    plan: ServicePlan,
    traffic: RequestTraffic,
    *,
    policy: Policy = "chunked",
    concurrency: float = np.inf,
    spans: bool = False,
) -> ServingRecord:
    """Returns what happens to traffic; see `service_targets` for its summary.

    The client has at most ``concurrency`` requests on their way, and sends the next when one ends.

    Engines that do both phases follow the ``policy``, those of pools always prefill in chunks, at most `TOKEN_BUDGET`
    tokens a step, or a whole prompt on each device that has sequences of its own. They hold at most as many sequences
    as the plan; those that decode have pages in all of the memory. With pools a finished prompt waits for its transfer.
    ``spans`` keeps who held which slot. Raises InputError for another policy than chunks with pools, for a request that
    is too long for an engine, and for a service with known parts of prompts or with drafts.
    """
    service, dtypes = result.service, StoredDtypes(plan.weights, plan.cache)
    if service.prefix_share:
        raise InputError(
            "services with known parts of prompts are not simulated in this version. Leave out --prefix-hits."
        )
    if service.speculation:
        raise InputError("services with drafts are not simulated in this version. Leave out --accept.")
    if plan.has_pools and policy != "chunked":
        raise InputError(f"engines of pools do one phase each, so the policy {policy!r} is not for them.")

    def replicas(pool: EnginePool, *, decodes: bool = True) -> ReplicaPool:
        batch, pages = max(pool.batch_seqs, plan.generate.batch_seqs), -(-service.max_len // PAGE_LEN)
        prompts = pool.batch_seqs * service.prompt_len * (not decodes)
        shards = sequence_shards(pool.strategy)
        # devices with sequences of their own prefill whole prompts, each its own
        most_tokens = shards * (TOKEN_BUDGET if shards == 1 else max(TOKEN_BUDGET, service.prompt_len))
        budget = plan.chunk_len + batch if plan.chunk_len else max(most_tokens, prompts, batch + 1)
        fills = decodes and np.isfinite(plan.free_bytes)
        room = 1 + plan.free_bytes / pool.memory["kv_cache"] if fills else 1
        limits = SchedulerLimits(
            policy=policy, max_requests=batch, token_budget=budget, page_len=PAGE_LEN,
            num_pages=int(batch * pages * room),
        )  # fmt: skip
        longest = int((traffic.prompt + traffic.output).max())
        if limits.pages(longest) > limits.num_pages:
            raise InputError(
                f"the longest request has {longest:,} tokens, but the caches of an engine have room for "
                f"{limits.num_pages * PAGE_LEN:,}. Simulate shorter requests, or plan for longer ones."
            )
        # a static batch prefills all its prompts in one step, interleaved at least one whole
        prompt = int(traffic.prompt.max())
        most_new = {"static": batch * prompt, "interleaved": prompt, "chunked": 0}[policy]
        most = (batch, limits.num_pages * PAGE_LEN, max(limits.token_budget, most_new), longest)
        setting = replace(result.setting.on(pool.part), storage=dtypes.storage)
        priced = PricedClock(setting, pool.strategy, decodes=decodes, prompt_len=service.prompt_len)
        clock = TabledClock(priced, most)
        return ReplicaPool(limits=limits, clock=clock, num_replicas=pool.num_engines, routing="least_loaded")

    if not plan.has_pools:
        return simulate(traffic, replicas(plan.generate), concurrency=concurrency, spans=spans)
    per_token_s = plan.transfer_s / service.prompt_len
    pools = replicas(plan.prefill, decodes=False), replicas(plan.generate)
    return simulate(traffic, *pools, transfer_s=lambda n: n * per_token_s, concurrency=concurrency, spans=spans)


def service_targets(service: Service) -> LatencyTargets:
    """Returns the targets that `ServingRecord.summary` counts by; one that is open is always met."""
    return LatencyTargets(ttft_s=service.ttft_s or np.inf, tpot_s=service.tpot_s or np.inf)
