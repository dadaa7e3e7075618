"""Predicts published serving times by simulating queues: mean time to the first token and per output token, of a
client with fixed concurrency."""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from meshwright.accuracy.cases import Unpredicted, cases_of
from meshwright.accuracy.errors import Accuracy, accuracy_of
from meshwright.accuracy.records import Parallelism, Record
from meshwright.accuracy.served import ENGINES, ServedCase, configuration, engine_case, served_calibrations
from meshwright.batching.clock import TabledClock
from meshwright.batching.limits import Policy, SchedulerLimits
from meshwright.batching.simulation import ReplicaPool, simulate
from meshwright.batching.traffic import RequestTraffic, traffic_of, uniform
from meshwright.core.errors import InputError
from meshwright.core.progress import tracked
from meshwright.plan.serving.fleet import transfer_bytes_per_s
from meshwright.simulate.service import PAGE_LEN, PricedClock
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import make_cluster
from meshwright.spec.efficiency import family
from meshwright.spec.job import Job

REQUESTS = 10
"""Total requests per request in flight (InferenceX, benchmarks/*.sh: --num-prompts CONC * 10)."""

INFERENCEX = ((1024, 1024), (1024, 8192), (8192, 1024))
"""Lengths (prompt, output) in InferenceX's scripts (SemiAnalysisAI/InferenceX, benchmarks/*.sh)."""

RANGE = 0.8
"""Least length as a share of the nominal one; lengths are drawn uniformly (InferenceX: RANDOM_RANGE_RATIO 0.8)."""

POLICIES: dict[str, Policy] = {"vllm": "chunked", "trtllm": "chunked", "sglang": "interleaved"}
"""Backend -> scheduling policy: SGLang prefills all waiting prompts before it decodes again."""

TOKEN_BUDGET = 8192
"""Most tokens of a step: --max-num-batched-tokens of InferenceX's vLLM, TensorRT-LLM's and SGLang's default."""


MOST_OF_POOL = 64
"""Most devices of an engine of a disaggregated service; records with larger ones are not predicted."""


def queued_accuracy(
    cases: Sequence[ServedCase],
    calibrations: Sequence[Mapping[str, Calibration]],
    unpredicted: Sequence[Unpredicted],
) -> dict[str, Accuracy]:
    """Returns errors of simulated mean TTFT and TPOT, as "served-ttft" and "served-tpot", without intervals."""
    return _by_time("served", cases, calibrations, unpredicted, queued_times(cases, calibrations))


def _by_time(
    service: str,
    cases: Sequence[ServedCase],
    calibrations: Sequence[Mapping[str, Calibration]],
    unpredicted: Sequence[Unpredicted],
    predicted_times: Sequence[np.ndarray],
) -> dict[str, Accuracy]:
    accuracy_by_name = {}
    for kind, predicted_s in zip(("ttft", "tpot"), predicted_times, strict=True):
        decodes = [replace(case.decode, measured_s=getattr(case.record.measured, f"{kind}_ms") / 1e3) for case in cases]
        kind_accuracy = accuracy_of(decodes, predicted_s, calibrations[0], unpredicted, what="decode")
        predictions = tuple(replace(prediction, low_s=None, high_s=None) for prediction in kind_accuracy.predictions)
        accuracy_by_name[f"{service}-{kind}"] = replace(kind_accuracy, predictions=predictions)
    return accuracy_by_name


def queued_times(
    cases: Sequence[ServedCase], calibrations: Sequence[Mapping[str, Calibration]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns simulated mean TTFT and mean TPOT in seconds [cases].

    ``calibrations`` has for each case the calibrations by chip name. Cases of one configuration use the first case's
    and share one table of step times.
    """
    indices_by_engine: dict[tuple[object, ...], list[int]] = {}
    for case_index, case in enumerate(cases):
        indices_by_engine.setdefault(configuration(case), []).append(case_index)
    ttft_s, tpot_s = np.empty(len(cases)), np.empty(len(cases))
    for indices in tracked(indices_by_engine.values(), "simulating queues of engines"):
        first_case = cases[indices[0]]
        clock = _clock([cases[case_index] for case_index in indices], calibrations[indices[0]][first_case.chip.name])
        for case_index in indices:
            case = cases[case_index]
            traffic = client_traffic(case, case.clients)
            outcome = simulate(traffic, ReplicaPool(limits=engine_limits(case), clock=clock), concurrency=case.clients)
            ttft_s[case_index], tpot_s[case_index] = outcome.ttft_s.mean(), np.nanmean(outcome.tpot_s)
    return ttft_s, tpot_s


def client_traffic(case: ServedCase, clients: int) -> RequestTraffic:
    """Returns `REQUESTS` requests per client, all arriving at time 0, with random lengths for InferenceX's scripts."""
    rng, num_requests = np.random.default_rng(0), REQUESTS * clients
    share = RANGE if (case.prompt_len, case.output_len) in INFERENCEX else 1.0
    draw_prompt, draw_output = (uniform(max(int(share * most), 1), most) for most in (case.prompt_len, case.output_len))
    return traffic_of(np.zeros(num_requests), draw_prompt(rng, num_requests), draw_output(rng, num_requests))


class PooledCase(msgspec.Struct, frozen=True, kw_only=True):
    """A record of a disaggregated service: an engine of each pool, and the part of the service that is simulated.

    ``replicas`` are the prefill and decode pools' replicas of attention, divided by their greatest common divisor;
    ``clients`` is the concurrency divided by it. ``transfer_s`` is the seconds to send one token's cache, each device
    over its link between nodes."""

    prefill: ServedCase
    decode: ServedCase
    replicas: tuple[int, int]
    clients: int
    transfer_s: float


def pooled_accuracy(records: Sequence[Record], numbers: Mapping[str, float]) -> dict[str, Accuracy]:
    """Returns errors of simulated mean TTFT and TPOT of disaggregated services, with ``numbers`` fitted to single
    engines. The first token is counted once its prompt's cache has been sent to the decode pool."""
    cases, refusals = cases_of((record for record in records if record.kind == "disagg"), _pooled)
    if not cases:
        return {}
    calibrations = served_calibrations([case.decode for case in cases], numbers)
    ttft_and_tpot_s = [_simulated(case, calibrations) for case in tracked(cases, "simulating pools")]
    decode_cases = [case.decode for case in cases]
    return _by_time("pools", decode_cases, [calibrations] * len(cases), refusals, [*np.array(ttft_and_tpot_s).T])


def _pooled(record: Record) -> PooledCase:
    if not (record.prefill and record.decode and record.concurrency):
        raise InputError("no pools or no concurrency of a disaggregated service")
    engines, attention_replicas = list[ServedCase](), list[int]()
    for pool in (record.prefill, record.decode):
        degrees = Parallelism(tp=pool.tp, dp=pool.attention_dp, ep=pool.ep, moe_tp=pool.moe_tp)
        engine = engine_case(
            replace(record, kind="decode", parallelism=degrees, concurrency=record.concurrency / pool.workers),
            most_devices=MOST_OF_POOL,
        )
        engines.append(engine)
        attention_replicas.append(pool.workers * engine.replicas)
    divisor = math.gcd(*attention_replicas)
    setting = engines[1].decode.setting
    kv_setting = replace(setting, job=Job(kind="decode", batch_seqs=engines[1].replicas, seq_len=engines[1].prompt_len))
    link_bytes_per_s = transfer_bytes_per_s(make_cluster(engines[1].chip, (setting.cluster.num_chips, 2)))
    bytes_per_token = kv_setting.memory(engines[1].decode.strategy)["kv_cache"] / engines[1].prompt_len
    group_name = f"{ENGINES[record.backend]}, disaggregated"
    prefill_case, decode_case = (replace(engine, record=replace(engine.record, group=group_name)) for engine in engines)
    return PooledCase(
        prefill=prefill_case,
        decode=replace(decode_case, decode=replace(decode_case.decode, record=decode_case.record)),
        replicas=(attention_replicas[0] // divisor, attention_replicas[1] // divisor),
        clients=max(round(record.concurrency / divisor), 1),
        transfer_s=bytes_per_token / link_bytes_per_s,
    )


def _simulated(case: PooledCase, calibrations: Mapping[str, Calibration]) -> tuple[float, float]:
    """Returns the mean TTFT, transfer of the prompt's cache included, and the mean TPOT, in seconds."""

    def pool(engine: ServedCase, policy: Policy, num_replicas: int) -> ReplicaPool:
        limits, clock = replace(engine_limits(engine), policy=policy), _clock([engine], calibrations[engine.chip.name])
        return ReplicaPool(limits=limits, clock=clock, num_replicas=num_replicas, routing="least_loaded")

    traffic = client_traffic(case.decode, case.clients)
    outcome = simulate(
        traffic,
        pool(case.prefill, "interleaved", case.replicas[0]),
        pool(case.decode, "chunked", case.replicas[1]),
        transfer_s=lambda num_tokens: num_tokens * case.transfer_s,
        concurrency=case.clients,
    )
    return float((outcome.ttft_s + traffic.prompt * case.transfer_s).mean()), float(np.nanmean(outcome.tpot_s))


def engine_limits(case: ServedCase) -> SchedulerLimits:
    """Returns the scheduler limits of one replica of attention; its cache has room for whole sequences."""
    pages_per_request = -(-(case.prompt_len + case.output_len) // PAGE_LEN)
    return SchedulerLimits(
        policy=POLICIES[case.record.backend],
        max_requests=case.clients,
        token_budget=max(TOKEN_BUDGET, case.clients + 1),
        page_len=PAGE_LEN,
        num_pages=min(case.room, case.clients) * pages_per_request,
        watermark=0.0,
        look_every=_look_every(case),
    )


def _look_every(case: ServedCase) -> int:
    """Returns the decode steps between checks for new requests, as InferenceX's scripts set them; else 1.

    SGLang on Blackwell: --scheduler-recv-interval, 30 from 16 clients on, else 10. TensorRT-LLM with several replicas
    of attention: timeout_iters 60 of attention_dp_config.
    """
    if (case.prompt_len, case.output_len) not in INFERENCEX:
        return 1
    is_blackwell, backend = family(case.chip) == "blackwell", case.record.backend
    if backend == "sglang" and is_blackwell:
        return 30 if case.clients >= 16 else 10
    return 60 if backend == "trtllm" and case.replicas > 1 else 1


def _clock(cases: Sequence[ServedCase], calibration: Calibration) -> TabledClock:
    """Returns a table of a configuration's step times that is large enough for all its cases."""
    prefill_case, case_limits = cases[0].prefill, [engine_limits(case) for case in cases]
    max_len = max(case.prompt_len + case.output_len for case in cases)
    max_load = (
        max(limit.max_requests for limit in case_limits),
        max(limit.num_pages for limit in case_limits) * PAGE_LEN,
        max(max(limit.token_budget for limit in case_limits), max_len),
        max_len,
    )
    setting = replace(prefill_case.setting, calibration=calibration)
    return TabledClock(PricedClock(setting, prefill_case.strategy, num_shards=cases[0].replicas), max_load)
