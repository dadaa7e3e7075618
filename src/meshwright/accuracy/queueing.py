"""Published serving through the simulation: mean times to the first token, with the queues that a client makes that
keeps a number of requests on their way."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from meshwright.accuracy.cases import Unpredicted
from meshwright.accuracy.errors import Accuracy, accuracy_of
from meshwright.accuracy.served import ServedCase, configuration
from meshwright.batching.clock import TabledClock
from meshwright.batching.limits import Policy, SchedulerLimits
from meshwright.batching.simulation import ReplicaPool, simulate
from meshwright.batching.traffic import RequestTraffic, traffic_of, uniform
from meshwright.simulate.service import PAGE_LEN, PricedClock
from meshwright.spec.calibration import Calibration
from meshwright.spec.efficiency import family

REQUESTS = 10
"""Requests in all for each one that is on its way at a time (InferenceX, benchmarks/*.sh: --num-prompts CONC * 10)."""

INFERENCEX = ((1024, 1024), (1024, 8192), (8192, 1024))
"""Prompts and outputs of InferenceX (SemiAnalysisAI/InferenceX, benchmarks/*.sh), whose settings are in its scripts."""

RANGE = 0.8
"""Least length as a share of the nominal one; lengths are drawn uniformly (InferenceX: RANDOM_RANGE_RATIO 0.8)."""

POLICIES: dict[str, Policy] = {"vllm": "chunked", "trtllm": "chunked", "sglang": "interleaved"}
"""Backend -> how it puts prompts into steps: SGLang prefills all that wait before it decodes again."""

TOKEN_BUDGET = 8192
"""Most tokens of a step: --max-num-batched-tokens of InferenceX's vLLM, TensorRT-LLM's and SGLang's default."""


class QueuedTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated mean seconds to the first token, and from one token to the next, an entry for each case."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray


def queued_accuracy(
    cases: Sequence[ServedCase],
    calibrations: Sequence[Mapping[str, Calibration]],
    unpredicted: Sequence[Unpredicted],
) -> dict[str, Accuracy]:
    """Returns errors of simulated mean times to the first token, and from token to token; without intervals."""
    found = queued_times(cases, calibrations)
    seconds = {"ttft": (found.ttft_s, "ttft_ms"), "simulated": (found.tpot_s, "tpot_ms")}
    return {
        f"served-{name}": _without_intervals(cases, calibrations, unpredicted, predicted=predicted, measured=measured)
        for name, (predicted, measured) in seconds.items()
    }


def _without_intervals(
    cases: Sequence[ServedCase],
    calibrations: Sequence[Mapping[str, Calibration]],
    unpredicted: Sequence[Unpredicted],
    *,
    predicted: np.ndarray,
    measured: str,
) -> Accuracy:
    decode = [
        msgspec.structs.replace(case.decode, measured_s=getattr(case.record.measured, measured) / 1e3) for case in cases
    ]
    found = accuracy_of(decode, predicted, calibrations[0], unpredicted, what="decode")
    return msgspec.structs.replace(
        found,
        predictions=tuple(msgspec.structs.replace(one, low_s=None, high_s=None) for one in found.predictions),
    )


def queued_times(cases: Sequence[ServedCase], calibrations: Sequence[Mapping[str, Calibration]]) -> QueuedTimes:
    """Returns simulated times; ``calibrations`` has, for each case, that of each chip by name.

    Cases of one configuration share the calibration and one table of step times.
    """
    engines: dict[tuple[object, ...], list[int]] = {}
    for number, case in enumerate(cases):
        engines.setdefault(configuration(case), []).append(number)
    ttft_s, tpot_s = np.empty(len(cases)), np.empty(len(cases))
    for numbers in engines.values():
        first = cases[numbers[0]]
        clock = _clock([cases[number] for number in numbers], calibrations[numbers[0]][first.chip.name])
        for number in numbers:
            case = cases[number]
            made = client_traffic(case)
            record = simulate(made, ReplicaPool(limits=engine_limits(case), clock=clock), concurrency=case.clients)
            ttft_s[number], tpot_s[number] = record.ttft_s.mean(), np.nanmean(record.tpot_s)
    return QueuedTimes(ttft_s=ttft_s, tpot_s=tpot_s)


def client_traffic(case: ServedCase) -> RequestTraffic:
    """Returns the requests that one replica of attention gets, all there from the start."""
    generator, count = np.random.default_rng(0), REQUESTS * case.clients
    ratio = RANGE if (case.prompt_len, case.output_len) in INFERENCEX else 1.0
    prompt, output = (uniform(max(int(ratio * most), 1), most) for most in (case.prompt_len, case.output_len))
    return traffic_of(np.zeros(count), prompt(generator, count), output(generator, count))


def engine_limits(case: ServedCase) -> SchedulerLimits:
    """Returns the bounds of one replica of attention, whose caches have room for whole sequences."""
    pages = -(-(case.prompt_len + case.output_len) // PAGE_LEN)
    return SchedulerLimits(
        policy=POLICIES[case.record.backend],
        max_requests=case.clients,
        token_budget=max(TOKEN_BUDGET, case.clients + 1),
        page_len=PAGE_LEN,
        num_pages=min(case.room, case.clients) * pages,
        watermark=0.0,
        look_every=_look_every(case),
    )


def _look_every(case: ServedCase) -> int:
    """Returns the decode steps between two looks for new requests, where the scripts of `INFERENCEX` set them.

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
    """Returns the clock of a configuration up to what its cases ask for."""
    first, limits = cases[0].prefill, [engine_limits(case) for case in cases]
    length = max(case.prompt_len + case.output_len for case in cases)
    most = (
        max(one.max_requests for one in limits),
        max(one.num_pages for one in limits) * PAGE_LEN,
        max(max(one.token_budget for one in limits), length),
        length,
    )
    setting = msgspec.structs.replace(first.setting, calibration=calibration)
    return TabledClock(PricedClock(setting, first.strategy, num_shards=cases[0].replicas), most)
