"""Answers `service --why-not`: what keeps a wanted engine from being the first plan of a service.

The engine does not divide the model, does not fit in memory, misses a target or the load, or makes fewer tokens.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.core.units import format_bytes
from meshwright.cost.arrays import select
from meshwright.cost.memory.chip import total_bytes
from meshwright.plan.plan_file import ServicePlan
from meshwright.plan.serving.engines import BOUNDS, PricedFleet, phase_setting, price_fleet
from meshwright.plan.serving.fleet import ENGINE_AXES, fleet_of
from meshwright.plan.serving.planner import does_not_fit
from meshwright.plan.serving.result import ServiceResult, service_plan
from meshwright.plan.serving.search import Services, all_services, ranked
from meshwright.plan.serving.service import TARGETS
from meshwright.plan.serving.storing import stored_dtypes

NAMES = (*ENGINE_AXES, "batch", "weights", "kv", "pools")
"""Names in a question: mesh axes of the decode engines, their batch, dtypes, and whether a pool prefills."""


class ServiceWhyNot(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one question: the reason of a refusal, or the best service with the engine that was asked for.

    ``misses`` maps each missed target, or "chips" for a missed load, to the factor by which it is exceeded. ``chip_s``
    maps each part of a decode step, and "prefill, idle" for all other time, to its chip-seconds per output token in the
    first plan and in ``plan``."""

    asked: dict[str, Any]
    refusal: str = ""
    plan: ServicePlan | None = None
    misses: dict[str, float] = {}
    chip_s: dict[str, tuple[float, float]] = {}


def why_not_service(result: ServiceResult, asked: Mapping[str, Any]) -> ServiceWhyNot:
    """Returns the reason why a service with the asked engine is not the first plan; the rest is searched.

    Raises InputError for names that are not in `NAMES`, and for values of another type.
    """
    for name, value in asked.items():
        if name not in NAMES:
            raise InputError(f"{name} is not a choice of a service.{nearest(name, NAMES)}")
        value_type = bool if name == "pools" else str if name in ("weights", "kv") else int
        if type(value) is not value_type:
            raise InputError(f"--why-not {name}={value}: give {_EXAMPLES.get(name, 'a size, such as tensor=4')}.")
    setting, service = result.setting, result.service
    size_by_axis = {name: size for name, size in asked.items() if name in ENGINE_AXES}
    planned_sizes = {name: size for name, size in result.axes.items() if name not in size_by_axis}
    weight_dtypes, cache_dtypes = ((asked[name],) if name in asked else () for name in ("weights", "kv"))
    dtype_pairs = stored_dtypes(
        weight_dtypes or [pair.weights for pair in result.stored],
        cache_dtypes or [pair.cache for pair in result.stored],
        chip=setting.cluster.chip,
    )
    answer = ServiceWhyNot(asked=dict(asked))
    try:
        fleet_of(setting.model, setting.cluster, planned_sizes | size_by_axis)  # says which sizes do not divide
        priced = price_fleet(setting, service, fleet_of(setting.model, setting.cluster, planned_sizes), dtype_pairs)
    except CannotRunError as error:
        return msgspec.structs.replace(answer, refusal=str(error))
    is_asked_engine = np.ones(len(priced.fleet), dtype=bool)
    for axis, size in size_by_axis.items():
        is_asked_engine &= priced.fleet.mesh[axis] == size
    is_asked_step = is_asked_engine[priced.decode.engine]
    if "batch" in asked:
        is_asked_step = is_asked_step & (priced.decode.batch == asked["batch"])
    if not is_asked_step.any():
        return msgspec.structs.replace(answer, refusal=_does_not_fit(result, priced, is_asked_engine, asked))
    services = all_services(priced)
    is_chosen = is_asked_step[services.decode] & (services.pools == asked.get("pools", services.pools))
    if not is_chosen.any():
        refusal_text = "no engine that fits can prefill for it."
        if service.chunk_len:
            chunks_text = f"chunks of {service.chunk_len:,} tokens, one a step, may be too many to keep its batch full"
            refusal_text = f"{refusal_text[:-1]}; {chunks_text}."
        return msgspec.structs.replace(answer, refusal=refusal_text)
    chosen_services: Services = select(services, is_chosen)
    ranked_indices = ranked(chosen_services, service)
    # factors by which each service exceeds the cluster's chips, and each target
    excess_of = {"chips": chosen_services.num_chips / result.setting.cluster.num_chips}
    excess_of |= {n: getattr(chosen_services, TARGETS[n]) / target_s for n, target_s in service.targets.items()}
    index = int(ranked_indices[0]) if len(ranked_indices) else int(np.argmin(np.max(list(excess_of.values()), axis=0)))
    plan = service_plan(priced, chosen_services, index)
    return msgspec.structs.replace(
        answer,
        plan=plan,
        misses={name: float(factors[index]) for name, factors in excess_of.items() if factors[index] > 1},
        chip_s=_chip_seconds(result.plans[0], plan),
    )


_EXAMPLES = {"pools": "true or false", "weights": "a dtype, such as weights=bf16", "kv": "a dtype, such as kv=int8"}


def _does_not_fit(result: ServiceResult, priced: PricedFleet, is_asked: np.ndarray, asked: Mapping[str, Any]) -> str:
    """Returns a message: the memory that the leanest asked engine needs at the asked or else its smallest batch."""
    fleet, service = priced.fleet, result.service
    engine_indices = [int(index) for index in np.flatnonzero(is_asked & fleet.decodes)]
    engine_needs: list[tuple[float, int]] = []
    for index in engine_indices:
        batch = int(asked.get("batch", fleet.batch_shards[index]))
        for dtypes in priced.stored:
            part_setting = result.setting.on(fleet.parts[index])
            source = service.prompt_len if part_setting.model.encoder else 0
            setting = phase_setting(part_setting, "decode", dtypes, service.max_len, batch, known=source)
            if batch % fleet.batch_shards[index] == 0:
                memory = setting.memory(fleet.strategy(index, dtypes.precision))
                engine_needs.append((float(total_bytes(memory)), index))
    if not engine_needs:
        return does_not_fit(priced)
    need_bytes, index = min(engine_needs)
    num_chips = fleet.parts[index].num_chips
    if need_bytes <= priced.room:
        tried_batches = set(priced.decode.batch[np.isin(priced.decode.engine, engine_indices)].tolist())
        below, above = ([n for n in tried_batches if (n < asked["batch"]) == is_below] for is_below in (True, False))
        batches_text = " or ".join(f"batch={end}" for end in (*sorted(below)[-1:], *sorted(above)[:1]))
        return f"it fits, but batches are powers of two and the largest that fits. Ask for {batches_text}."
    batch_text = f"batch {asked['batch']:,}" if "batch" in asked else "one sequence for each device with its own"
    return (
        f"with {batch_text} the leanest such engine ({num_chips} chips) needs {format_bytes(need_bytes)} per chip, "
        f"{format_bytes(need_bytes - priced.room)} more than the {format_bytes(priced.room)} that a chip has."
    )


def _chip_seconds(first_plan: ServicePlan, other_plan: ServicePlan) -> dict[str, tuple[float, float]]:
    """Maps each part of a decode step, and "prefill, idle", to its chip-seconds per output token in both plans."""
    s_by_part: dict[str, list[float]] = {}
    for plan in (first_plan, other_plan):
        engine = plan.generate
        chip_share = engine.part.num_chips / (engine.batch_seqs * plan.step_tokens)
        chip_s = 1 / plan.predicted.tokens_per_s_per_chip
        for name in (*BOUNDS, "drafts"):
            s_by_part.setdefault(name, []).append(chip_share * engine.bounds_s.get(name, 0.0))
        s_by_part.setdefault("prefill, idle", []).append(chip_s - chip_share * engine.step_s)
    return {name: (first_s, other_s) for name, (first_s, other_s) in s_by_part.items() if max(first_s, other_s) > 0}
