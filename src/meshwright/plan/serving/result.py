"""The result of planning a service: its plans, as data and as JSON."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright.cost.setting import Setting
from meshwright.plan.plan_file import EnginePool, ServiceFigures, ServicePlan
from meshwright.plan.serving.engines import PricedFleet, Steps
from meshwright.plan.serving.search import Services
from meshwright.plan.serving.service import Service
from meshwright.plan.serving.storing import StoredDtypes


class ServiceResult(msgspec.Struct, frozen=True, kw_only=True):
    """Plans of a service, best first; if ``is_frontier``, the plans that no other beats in TPOT and tokens per chip.

    ``as_written`` is the best plan with weights and caches in bfloat16, None if that was not tried or misses the
    targets. ``num_meeting`` of the ``num_services`` that fit in memory meet the targets. ``frontiers`` has for each
    pair of dtypes the points (TPOT, tokens per second and chip) of its own frontier. ``split`` has for each of `BOUNDS`
    and for prefills of other prompts the points (TPOT, seconds of it per token) of the frontier over all dtypes.
    ``stored`` and ``axes`` are the dtypes that were tried and the sizes that were fixed.
    """

    setting: Setting
    service: Service
    stored: tuple[StoredDtypes, ...]
    axes: Mapping[str, int]
    plans: tuple[ServicePlan, ...]
    is_frontier: bool
    as_written: ServicePlan | None
    num_services: int
    num_meeting: int
    frontiers: dict[str, tuple[tuple[float, float], ...]]
    split: dict[str, tuple[tuple[float, float], ...]]
    notes: tuple[str, ...]

    def listed(self, top: int) -> tuple[ServicePlan, ...]:
        """Returns at most ``top`` plans: the first ones, or of a frontier ones that are spread evenly over it."""
        if not self.is_frontier or len(self.plans) <= top:
            return self.plans[:top]
        indices = np.unique(np.round(np.linspace(0, len(self.plans) - 1, top)).astype(int))
        return tuple(self.plans[index] for index in indices)

    def to_json(self) -> dict[str, Any]:
        """Returns the result as plain data, the object of `service --json`."""
        return {
            "model": self.setting.model.name,
            "cluster": self.setting.cluster.short_name,
            "service": msgspec.to_builtins(self.service),
            "is_frontier": self.is_frontier,
            "plans": [plan.to_json() for plan in self.plans],
            "as_written": self.as_written and self.as_written.to_json(),
            "num_services": self.num_services,
            "num_meeting": self.num_meeting,
            "frontiers": self.frontiers,
            "split": self.split,
            "memory_room": self.setting.memory_room,
            "notes": list(self.notes),
        }


def service_plan(priced: PricedFleet, found: Services, number: int) -> ServicePlan:
    """Returns service ``number`` of ``found`` as a plan, with its dollars if the chip has a price."""
    setting, service, decode_row = priced.setting, priced.service, int(found.decode[number])
    value_of: dict[str, Any] = {name: getattr(found, name)[number].item() for name in Services.__struct_fields__}
    has_pools, num_decode = value_of["pools"], value_of["num_decode"]
    generate = _pool(priced, priced.decode, decode_row, num_decode)
    prefill = _pool(priced, priced.prefill, value_of["prefill"], value_of["num_prefill"] if has_pools else num_decode)
    # seconds of all chips that a request pays for, and the share of them that prefills
    chip_s = value_of["num_chips"] / value_of["served_per_s"]
    if has_pools:
        prefill_share = prefill.num_chips / (prefill.num_chips + generate.num_chips)
    else:
        token_s = float(priced.decode.token_s[decode_row])
        generation_s = service.output_len * token_s / generate.batch_seqs
        prefill_share = value_of["prompt_s"] / (value_of["prompt_s"] + generation_s)
    figure_by_name = {name: value_of[name] for name in ServiceFigures.__struct_fields__ if name in value_of}
    if not (service.itl_s or service.chunk_len):
        del figure_by_name["itl_s"]
    usd_per_hour = setting.cluster.chip.price_usd_per_hour
    if usd_per_hour is not None:
        usd_per_m_tokens = usd_per_hour / 3600 * chip_s * 1e6
        figure_by_name["usd_per_m_input"] = usd_per_m_tokens * prefill_share / service.prompt_len
        figure_by_name["usd_per_m_output"] = usd_per_m_tokens * (1 - prefill_share) / service.output_len
    dtypes = priced.stored[priced.decode.dtypes[decode_row]]
    return ServicePlan(
        **ServicePlan.fields_of(setting),
        service=service,
        has_pools=has_pools,
        weights=dtypes.weights,
        cache=dtypes.cache,
        num_drafts=int(priced.decode.drafts[decode_row]),
        chunk_len=value_of["chunk_len"],
        generate=generate,
        prefill=prefill,
        predicted=ServiceFigures(**figure_by_name),
    )


def _pool(priced: PricedFleet, steps: Steps, row: int, num_engines: int) -> EnginePool:
    engine, dtypes = int(steps.engine[row]), priced.stored[steps.dtypes[row]]
    bounds_s = {name: float(column[row]) for name, column in steps.bounds_s.items()}
    return EnginePool(
        num_engines=num_engines,
        part=priced.fleet.parts[engine],
        strategy=priced.fleet.strategy(engine, dtypes.precision),
        batch_seqs=int(steps.batch[row]),
        step_s=float(steps.step_s[row]),
        bound_by=max(bounds_s, key=lambda name: bounds_s[name]),
        bounds_s=bounds_s,
        memory={name: float(column[row]) for name, column in steps.memory.items()},
    )
