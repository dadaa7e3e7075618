"""Plans a service of a model on a cluster, as the `service` verb does: the best plans, or why there is none."""

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import counted, format_bytes, format_seconds
from meshwright.cost.setting import Setting
from meshwright.plan.plan_file import GENERATION_JOB
from meshwright.plan.serving.engines import PricedFleet, price_fleet
from meshwright.plan.serving.fleet import fleet_of
from meshwright.plan.serving.result import ServiceResult, service_plan
from meshwright.plan.serving.search import Services, all_services, frontier, ranked
from meshwright.plan.serving.service import TARGETS, Service
from meshwright.plan.serving.storing import StoredDtypes, stored_dtypes
from meshwright.spec.assumptions import AS_RUN, Assumptions
from meshwright.spec.calibration import Calibration
from meshwright.spec.cluster import Cluster
from meshwright.spec.efficiency import SERVED_FAMILIES, family, generation_calibration
from meshwright.spec.model import Model

AS_SERVED = Assumptions(software="served", engine="vLLM", empty_slots=False)
"""Assumptions for an inference engine: kernels in CUDA graphs, no overlap, vLLM's seconds between steps."""

AS_PUBLISHED = StoredDtypes("bf16", "bf16")

MAX_PLANS = 100
"""Most plans in a result that is not a frontier."""


def service_setting(model: Model, cluster: Cluster, calibration: Calibration | None = None) -> Setting:
    """Returns the setting in which services are planned; its job is a decode step of one sequence.

    On GPUs, steps are priced as an inference engine runs them, and rates fitted on training steps are replaced by rates
    fitted on generation or, without any, the data sheet's. Measured rates stay, with this package's own steps.
    """
    assumptions = AS_RUN
    if cluster.kind == "switched" and (calibration is None or calibration.name == "fitted"):
        calibration = calibration and generation_calibration(cluster.chip)
        assumptions = AS_SERVED if calibration else msgspec.structs.replace(AS_SERVED, engine="")
    return Setting(model, cluster, GENERATION_JOB, calibration, assumptions=assumptions)


def plan_service(
    setting: Setting,
    service: Service,
    *,
    stored: Sequence[StoredDtypes] = (),
    axes: Mapping[str, int] | None = None,
    pareto: bool = False,
) -> ServiceResult:
    """Returns the plans of a service of a model on a cluster, best first; ignores the setting's job and storage.

    The best plan makes the most output tokens per second and chip, and so costs the least, among the plans that meet
    the service's targets and its load. Without targets, or with ``pareto``, the result is the frontier of tokens per
    second and chip against time per output token. ``stored`` are the dtypes to try, by default `TRIED`; ``axes`` fixes
    sizes of engines. `service_setting` replaces rates that were fitted on training steps. Raises CannotRunError if
    nothing fits in memory, or if nothing that fits meets the targets or the load, and InputError if a prompt, or for
    some models the output, is longer than the model's positions."""
    _require_served(setting.model, service)
    if setting.rates.name == "fitted" and setting.assumptions == AS_RUN:
        setting = service_setting(setting.model, setting.cluster, setting.calibration)
    dtype_pairs = tuple(stored) or stored_dtypes(chip=setting.cluster.chip)
    priced_fleet = price_fleet(setting, service, fleet_of(setting.model, setting.cluster, axes), dtype_pairs)
    if not len(priced_fleet.decode) or not len(services := all_services(priced_fleet)):
        raise CannotRunError(does_not_fit(priced_fleet))
    order = ranked(services, service)
    if not len(order):
        raise CannotRunError(_misses(setting, service, services))
    is_frontier = pareto or not service.targets
    plan_indices = frontier(services, order) if is_frontier else _distinct(priced_fleet, services, order)[:MAX_PLANS]
    dtype_indices = priced_fleet.decode.dtypes[services.decode[order]]
    groups = {pair: order[dtype_indices == index] for index, pair in enumerate(dtype_pairs)}
    bf16_indices = groups.get(AS_PUBLISHED, order[:0])
    return ServiceResult(
        setting=setting,
        service=service,
        stored=dtype_pairs,
        axes=dict(axes or {}),
        plans=tuple(service_plan(priced_fleet, services, index) for index in plan_indices),
        is_frontier=is_frontier,
        as_written=service_plan(priced_fleet, services, bf16_indices[0]) if len(bf16_indices) else None,
        num_services=len(services),
        num_meeting=int(services.meets(service).sum()),
        frontiers={pair.words: _points(services, frontier(services, ids)) for pair, ids in groups.items() if len(ids)},
        split=_split(priced_fleet, services, frontier(services, order)),
        notes=tuple(service_notes(setting, service, dtype_pairs)),
    )


def _require_served(model: Model, service: Service) -> None:
    if model.encoder:
        if service.prefix_share or service.chunk_len:
            raise InputError(f"the encoder of {model.name} reads whole prompts. Leave out prefix hits and chunks.")
        limits = [
            ("an output", service.output_len, model.max_positions, "max_positions", service.output_len),
            ("a prompt", service.prompt_len, model.encoder.length, "encoder.length", service.prompt_len),
        ]
    elif model.learned_positions and service.prompt_len <= model.max_positions:
        limits = [("a prompt with its output", service.max_len, model.max_positions, "max_positions", service.max_len)]
    else:
        limits = [("a prompt", service.prompt_len, model.max_positions, "max_positions", service.max_len)]
    for text_kind, num_positions, limit, field, needed in limits:
        if num_positions > limit:
            output_text = " with its output" if needed > num_positions else ""
            raise InputError(
                f"{text_kind} of {num_positions:,} tokens is longer than the {limit:,} positions of {model.name}. "
                f"Use at most {limit:,}{output_text}, or --set model.{field}={needed}."
            )


def _distinct(priced: PricedFleet, services: Services, order: np.ndarray) -> np.ndarray:
    """Selects the best service for each kind (pools or not), dtypes, and expert and tensor sizes of decode engines."""
    decode, fleet = priced.decode, priced.fleet
    engine_indices = decode.engine[services.decode[order]]
    kind_columns = (
        services.pools[order],
        decode.dtypes[services.decode[order]],
        *(fleet.mesh[axis][engine_indices] for axis in ("expert", "tensor")),
    )
    _, first_indices = np.unique(np.stack(kind_columns), axis=1, return_index=True)
    return order[np.sort(first_indices)]


def _points(services: Services, indices: np.ndarray) -> tuple[tuple[float, float], ...]:
    return tuple(zip(services.tpot_s[indices].tolist(), services.tokens_per_s_per_chip[indices].tolist(), strict=True))


def _split(priced: PricedFleet, services: Services, indices: np.ndarray) -> dict[str, tuple[tuple[float, float], ...]]:
    """Maps each part of a decode step, and prefills of other prompts, to its points (TPOT, seconds per token)."""
    rows, tpot_s = services.decode[indices], services.tpot_s[indices]
    seconds_by_part = {name: s[rows] / priced.decode.tokens[rows] for name, s in priced.decode.bounds_s.items()}
    seconds_by_part["prefills of others"] = tpot_s - priced.decode.token_s[rows]
    return {name: tuple(zip(tpot_s.tolist(), s.tolist(), strict=True)) for name, s in seconds_by_part.items()}


# -- what is said ---------------------------------------------------------------------------------------


def does_not_fit(priced: PricedFleet) -> str:
    """Returns a message: the memory that the leanest engine needs with one sequence, and the memory that a chip has."""
    setting, service = priced.setting, priced.service
    cluster, margin = setting.cluster, setting.memory_margin
    job_text = f"{setting.model.name} with {service.prompt_len:,} tokens of prompt and {service.output_len:,} of output"
    suffix = f" besides the {margin:.0%} that stays free" * bool(margin)
    chips_text = counted(priced.least_chips, "chip")
    weights_text = ", ".join(dict.fromkeys(pair.weights for pair in priced.stored))
    return (
        f"{job_text} does not fit {cluster.short_name}: with one sequence the leanest engine ({chips_text}, "
        f"weights {weights_text}) needs {format_bytes(priced.least_bytes)} per chip, but a chip has "
        f"{format_bytes(priced.room)}{suffix}. Use more chips, or store weights and caches in fewer bytes (--weights, "
        f"--kv)."
    )


def _misses(setting: Setting, service: Service, services: Services) -> str:
    """Returns a message: by how much the services that fit in memory miss the targets or the load."""
    is_met = services.meets(service)
    if is_met.any():
        chips, limit = int(services.num_chips[is_met].min()), setting.cluster.num_chips
        return (
            f"{service.load_words} need at least {chips:,} chips in engines of up to {limit:,} within the targets, but "
            f"{setting.cluster.short_name} has {limit:,}. Use a larger cluster or a lower --rate."
        )
    miss_texts = []
    for name, target_s in service.targets.items():
        shortest_text = format_seconds(float(getattr(services, TARGETS[name]).min()))
        miss_texts.append(f"{name} {format_seconds(target_s)} (the shortest is {shortest_text})")
    suffix = ""
    if service.ttft_s is not None and service.tpot_s is not None:
        is_within = services.ttft_s <= service.ttft_s
        if is_within.any():
            shortest_text = format_seconds(float(services.tpot_s[is_within].min()))
            suffix = f" Within TTFT {format_seconds(service.ttft_s)} the shortest TPOT is {shortest_text}."
    return (
        f"{len(services):,} ways to serve {setting.model.name} fit the memory of {setting.cluster.short_name}, but "
        f"none meets {' and '.join(miss_texts)}.{suffix} Relax the target or use other chips."
    )


def service_notes(setting: Setting, service: Service, chosen: Sequence[StoredDtypes]) -> Iterator[str]:
    """Yields notes on the conventions behind a service's numbers."""
    model, cluster, usd_per_hour = setting.model, setting.cluster, setting.cluster.chip.price_usd_per_hour
    yield f"times rest on {setting.rates.describe()}"
    if usd_per_hour is not None:
        yield f"a chip-hour costs ${usd_per_hour:,.2f}; input tokens pay for prefill, output tokens for generation"
    else:
        yield f"{cluster.chip.name} has no price (--price), so no cost is given"
    yield (
        "tok/s: output tokens per second and chip with full batches; TPOT: a step at the mean length of the cache and, "
        "where engines prefill too, (batch - 1) / output prefills of other prompts; TTFT: without a queue, one prefill "
        "of all its prompts, and with pools the transfer"
    )
    if service.chunks:
        yield (
            "ITL is the longest time between two tokens: a step and the prefill of whole prompts, or a step and a "
            "prompt's last chunk; with chunks the first token comes after as many steps as it has, and "
            "a batch is so small that a chunk a step keeps it full; TPOT counts the time of all chunks"
        )
    if draft := service.speculation:
        yield (
            f"a draft is right with probability {draft.acceptance:.10g} and takes {draft.draft_cost:.10g} of a step "
            "without drafts; a step computes a row for every draft and one more, and reads the cache once for all"
        )
    if engine := setting.assumptions.engine:
        yield f"steps are priced as {engine} runs them; docs/accuracy.md has the errors of such predictions" + (
            f"; no steps of {cluster.chip.name} were fitted" * (family(cluster.chip) not in SERVED_FAMILIES)
        )
    elif model.num_experts and setting.assumptions.holds_empty_slots:
        yield "a step reads the weights of all experts, chosen or not, as this package's compiled step does"
    if math.isinf(setting.memory_limit):
        yield f"the memory of {cluster.short_name} is not known, so no plan was refused for it"
    elif setting.memory_margin:
        yield f"caches have room for whole sequences, and {setting.memory_margin:.0%} of a chip's memory stays free"
    if any(pair != AS_PUBLISHED for pair in chosen):
        dtype_names = sorted({name for pair in chosen for name in (pair.weights, pair.cache)} - {"bf16"})
        yield (
            f"the effect of {' or '.join(dtype_names)} on the quality of answers is not predicted"
            + "; products of int8 weights are computed in bf16" * ("int8" in dtype_names)
        )
    if service.max_len > model.max_positions and not model.encoder:
        yield f"prompts with their output are longer than the {model.max_positions:,} positions of the model's config"
