"""The plans of a service as data and as JSON."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright.cost.setting import Setting
from meshwright.plan.serving.engines import PricedFleet, Steps
from meshwright.plan.serving.fleet import engine_words, layout_of
from meshwright.plan.serving.search import Services
from meshwright.plan.serving.service import Service
from meshwright.plan.serving.storing import StoredDtypes
from meshwright.spec.cluster import Cluster
from meshwright.spec.strategy import Strategy


class EnginePool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``num_engines`` equal engines and one step of each: ``batch_seqs`` sequences in ``step_s`` seconds.

    ``bounds_s`` are the seconds of each part of the step by itself, ``bound_by`` is the longest; ``memory`` is in bytes
    per chip.
    """

    num_engines: int
    part: Cluster
    strategy: Strategy
    batch_seqs: int
    step_s: float
    bound_by: str
    bounds_s: dict[str, float]
    memory: dict[str, float]

    @property
    def words(self) -> str:
        """``"8 x tp8"``."""
        return f"{self.num_engines} x {engine_words(self.strategy)}"

    @property
    def num_chips(self) -> int:
        """Chips of all engines."""
        return self.num_engines * self.part.num_chips

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        fields = {name: getattr(self, name) for name in ("num_engines", "batch_seqs", "step_s", "bound_by")}
        axes = {axis: size for axis, size in self.strategy.mesh.items() if size > 1}
        engine = {
            "part": self.part.short_name,
            "axes": axes,
            "layout": layout_of(self.strategy),
            "placement": self.strategy.placement,
        }
        return {**fields, **engine, "bounds_s": self.bounds_s, "memory": self.memory}


class ServiceFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of one way to serve; see `plan.serving.search` for the formulas.

    ``tpot_s`` is in the steady state, ``ttft_s`` at low load. The engines could serve ``requests_per_s``; the other
    figures count ``served_per_s``, at most the load, and ``num_chips``, which are paid for. Dollars are None without a
    price: of a million input tokens those of prefill, of a million output tokens those of generation; chips that are
    idle count with both alike.
    """

    ttft_s: float
    tpot_s: float
    transfer_s: float
    requests_per_s: float
    served_per_s: float
    tokens_per_s_per_chip: float
    num_chips: int
    free_bytes: float
    usd_per_m_input: float | None = None
    usd_per_m_output: float | None = None


class ServicePlan(ServiceFigures, frozen=True, kw_only=True):
    """One way to serve. ``generate`` are the engines that generate. ``prefill`` are those that prefill: the same, or a
    pool of their own if the plan ``has_pools``. ``weights`` and ``cache`` are the dtypes in which these are stored. A
    step of generation checks ``num_drafts`` tokens and makes ``step_tokens`` of each sequence in the mean. ``itl_s`` is
    the longest time between two tokens, with prompts in chunks of ``chunk_len`` tokens, 0 if they are not cut; None if
    neither was asked for."""

    has_pools: bool
    weights: str
    cache: str
    generate: EnginePool
    prefill: EnginePool
    num_drafts: int = 0
    step_tokens: float = 1.0
    chunk_len: int = 0
    itl_s: float | None = None

    @property
    def bound_by(self) -> str:
        """What takes most of a step of generation."""
        return self.generate.bound_by

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        fields = msgspec.structs.asdict(self)
        return {**fields, "generate": self.generate.to_json(), "prefill": self.prefill.to_json()}


class ServiceResult(msgspec.Struct, frozen=True, kw_only=True):
    """Plans of a service, best first; with ``is_frontier`` those that no other beats in TPOT and tokens per chip.

    ``as_written`` is the best plan with weights and caches in bfloat16, None if none was asked for or fits the targets.
    Of ``num_services`` that fit in memory ``num_meeting`` meet the targets. ``frontiers`` has for each pair of dtypes
    the points (TPOT, tokens per second and chip) of plans that none with the same dtypes beats in both. ``split`` has
    for each of `BOUNDS`, and the prefills of others, the points (TPOT, seconds of a token by itself) of the plans that
    none at all beats. ``stored`` and ``axes`` are the dtypes and sizes that it was planned with.
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
        """Returns at most ``top`` plans: the first, or of a frontier some that are spread over it."""
        if not self.is_frontier or len(self.plans) <= top:
            return self.plans[:top]
        indices = np.unique(np.round(np.linspace(0, len(self.plans) - 1, top)).astype(int))
        return tuple(self.plans[index] for index in indices)

    def to_json(self) -> dict[str, Any]:
        """Returns one object for `service --json`."""
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


def service_plan(priced: PricedFleet, found: Services, number: int, service: Service) -> ServicePlan:
    """Returns one of the services as a plan."""
    decode_row, prefill_row = int(found.decode[number]), int(found.prefill[number])
    has_pools, dtypes = bool(found.pools[number]), priced.stored[priced.decode.dtypes[decode_row]]
    num_decode, num_prefill = int(found.num_decode[number]), int(found.num_prefill[number])
    generate = _pool(priced, priced.decode, decode_row, num_decode)
    prefill = _pool(priced, priced.prefill, prefill_row, num_prefill if has_pools else num_decode)
    served_per_s, num_chips = float(found.served_per_s[number]), int(found.num_chips[number])
    # seconds of all chips that a request pays for, and the share of them that prefills
    chip_s = num_chips / served_per_s
    if has_pools:
        prefill_share = prefill.num_chips / (prefill.num_chips + generate.num_chips)
    else:
        prompt_s = float(found.prompt_s[number])
        token_s = float(priced.decode.token_s[decode_row])
        prefill_share = prompt_s / (prompt_s + service.output_len * token_s / generate.batch_seqs)
    price = priced.fleet.cluster.chip.price_usd_per_hour
    usd_per_m = None if price is None else price / 3600 * chip_s * 1e6
    return ServicePlan(
        has_pools=has_pools,
        weights=dtypes.weights,
        cache=dtypes.cache,
        generate=generate,
        prefill=prefill,
        num_drafts=int(priced.decode.drafts[decode_row]),
        step_tokens=float(priced.decode.tokens[decode_row]),
        chunk_len=int(found.chunk_len[number]),
        itl_s=float(found.itl_s[number]) if service.itl_s or service.chunk_len else None,
        ttft_s=float(found.ttft_s[number]),
        tpot_s=float(found.tpot_s[number]),
        transfer_s=float(found.transfer_s[number]),
        requests_per_s=float(found.requests_per_s[number]),
        served_per_s=served_per_s,
        tokens_per_s_per_chip=float(found.tokens_per_s_per_chip[number]),
        num_chips=num_chips,
        free_bytes=float(found.free_bytes[number]),
        usd_per_m_input=None if usd_per_m is None else usd_per_m * prefill_share / service.prompt_len,
        usd_per_m_output=None if usd_per_m is None else usd_per_m * (1 - prefill_share) / service.output_len,
    )


def _pool(priced: PricedFleet, steps: Steps, number: int, count: int) -> EnginePool:
    engine, dtypes = int(steps.engine[number]), priced.stored[steps.dtypes[number]]
    bounds_s = {name: float(column[number]) for name, column in steps.bounds_s.items()}
    return EnginePool(
        num_engines=count,
        part=priced.fleet.parts[engine],
        strategy=priced.fleet.strategy(engine, dtypes.precision),
        batch_seqs=int(steps.batch[number]),
        step_s=float(steps.step_s[number]),
        bound_by=max(bounds_s, key=lambda name: bounds_s[name]),
        bounds_s=bounds_s,
        memory={name: float(column[number]) for name, column in steps.memory.items()},
    )
