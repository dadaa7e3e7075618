"""Predicts many cases at once: cases of a pattern share their derived steps, and differ in sizes, which are arrays."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from meshwright.accuracy.cases import Case
from meshwright.algebra.derived import Derived
from meshwright.algebra.rewrites.repeated_heads import strategy_of_heads
from meshwright.cost.arrays import map_figures, stack
from meshwright.cost.network.collectives import leg_rates
from meshwright.cost.network.legs import Leg, Level, group_legs
from meshwright.cost.network.placement import Placement
from meshwright.cost.pipeline import PipelineCost
from meshwright.cost.step_costs import collective_groups
from meshwright.cost.step_rates import (
    StepRates,
    busy_links,
    exchanges_hide,
    gathers_narrow,
    spanned_nodes,
    strategy_placements,
)
from meshwright.cost.train_step import PricedStep
from meshwright.cost.work.kernels import AxisGroup, chip_rates
from meshwright.cost.work.slots import SlotSizes
from meshwright.spec.calibration import Calibration, Efficiency, datasheet_calibration
from meshwright.spec.efficiency import family, fitted_calibration

NO_LEG = Leg(level="ici", size=1, bytes_per_s=1.0, hops=0, hop_s=0.0)
"""Placeholder in cases that have fewer legs than other cases of a batch: its size is 1, so it takes no time."""

ALIKE = ("narrow", "engine_s", "attention", "overlap", "overlap_weights", "low", "high", "low_experts", "high_experts")
"""Fields of `Efficiency` that are not stacked into arrays directly: not needed, already in the rates of a chip, or None
in some batches."""


RATES = ("matmul_flops_per_s", "wide_flops_per_s", "attention_flops_per_s", "hbm_bytes_per_s", "processors")
"""Fields of a chip's rates that differ between the cases of a batch."""


class CaseBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Cases of one pattern as arrays, without anything that depends on a calibration.

    ``numbers`` are the indices of the cases in the list that was batched. ``fills`` (true if a group uses the axis) and
    ``links`` (the axis's link level) are [physical axes, cases].
    """

    cases: tuple[Case, ...]
    numbers: np.ndarray
    derived: Derived
    sizes: SlotSizes
    pipeline: PipelineCost
    legs: dict[AxisGroup, tuple[Leg, ...]]
    fills: dict[AxisGroup, np.ndarray]
    links: np.ndarray
    num_hosts: np.ndarray
    num_nodes: dict[AxisGroup, np.ndarray]

    def seconds(self, *tables: Mapping[str, Calibration]) -> np.ndarray:
        """Returns predicted step seconds [tables, cases]; each table has a calibration for each chip, by name."""
        # repeats the list of cases once per table
        array_fields = ("sizes", "pipeline", "legs", "fills", "links", "num_hosts", "num_nodes")
        tiled_fields = map_figures(
            lambda value: np.tile(value, len(tables)) if isinstance(value, np.ndarray) else value,
            {field: getattr(self, field) for field in array_fields},
        )
        tiled_fields["sizes"] = msgspec.structs.replace(tiled_fields["sizes"], cache={})
        cases = self.cases * len(tables)
        batch = msgspec.structs.replace(self, cases=cases, derived=_with_repeats(self.derived, cases), **tiled_fields)
        step_rates = batch.rates([table[case.chip.name] for table in tables for case in self.cases])
        priced_step = PricedStep(derived=batch.derived, sizes=batch.sizes, rates=step_rates, pipeline=batch.pipeline)
        return np.broadcast_to(priced_step.seconds.step_s, len(batch.cases)).reshape(len(tables), -1)

    def rates(self, calibrations: Sequence[Calibration]) -> StepRates:
        """Returns the rates of the cases' machines as arrays; ``calibrations`` has one for each case."""
        case_rates = [
            chip_rates(
                case.chip,
                calibration,
                dtype=case.strategy.matmul_dtype,
                state_dtype=case.strategy.state_dtype,
                assumptions=case.setting.assumptions,
            )
            for case, calibration in zip(self.cases, calibrations, strict=True)
        ]
        figures = _stacked_calibration(calibrations)
        scatters = self.cases[0].setting.assumptions.scatters
        rates_by_group = {group: leg_rates(legs, figures, scatters=scatters) for group, legs in self.legs.items()}
        return StepRates(
            chip=msgspec.structs.replace(case_rates[0], **_arrays(case_rates, RATES), efficiency=figures.efficiency),
            peak_flops_per_s=1.0,
            groups=rates_by_group,
            link_levels=("",) * len(self.links),
            uses={
                key: busy_flags
                for group, rates in rates_by_group.items()
                for key, busy_flags in busy_links(group, rates, self.fills[group], self.links).items()
            },
            num_hosts=self.num_hosts,
            num_nodes=self.num_nodes,
            hides_exchanges=exchanges_hide(self.cases[0].strategy, self.cases[0].setting.assumptions),
            narrow_gathers=gathers_narrow(self.cases[0].strategy, self.cases[0].setting.assumptions),
            engine=self.cases[0].setting.assumptions.engine,
        )


def calibrations(
    cases: Sequence[Case], numbers: Mapping[str, float] | None = None, *, datasheet: bool = False
) -> dict[str, Calibration]:
    """Maps the name of every chip to its calibration from ``numbers`` (default: the shipped ones). Chips without fitted
    numbers, or with ``datasheet`` all chips, get data-sheet rates."""
    chips = {case.chip.name: case.chip for case in cases}
    fitted_by_name = {name: None if datasheet else fitted_calibration(chip, numbers) for name, chip in chips.items()}
    return {name: fitted_by_name[name] or datasheet_calibration(chip) for name, chip in chips.items()}


def batches(cases: Sequence[Case]) -> tuple[CaseBatch, ...]:
    """Returns the cases as batches of one pattern each."""
    indices_by_pattern: dict[tuple[object, ...], list[int]] = {}
    for case_index, case in enumerate(cases):
        indices_by_pattern.setdefault(_pattern(case), []).append(case_index)
    return tuple(_batch(cases, case_indices) for case_indices in indices_by_pattern.values())


def _pattern(case: Case) -> tuple[object, ...]:
    """Returns the key by which cases are batched: derived steps of cases with equal keys differ only in sizes."""
    strategy, setting, cluster = case.strategy, case.setting, case.setting.cluster
    ops = tuple((block.name, block.ops, block.carry) for block in setting.program.blocks)
    choices: tuple[object, ...] = (
        strategy.remat,
        strategy.context_attention,
        strategy.schedule,
        strategy.state,
        strategy.assignment,
    )
    is_narrow = strategy.matmul_dtype in ("fp8", "fp4", "int8")
    # a chip without fitted numbers overlaps by the data sheet, the others by one exponent
    is_fitted = family(cluster.chip) is not None
    assumed = setting.assumptions
    if not setting.job.trains:
        heads_assignment = strategy_of_heads(strategy, setting.model.common_kv_heads).assignment
        choices = (setting.job.kind, setting.storage, heads_assignment, assumed.engine, cluster.chip.name)
    mode = (assumed.software, assumed.dispatch, assumed.exchange_overlap, gathers_narrow(strategy, assumed))
    choices = (*choices, assumed.scatters)
    return (ops, *map(str, choices), *mode, is_narrow, is_fitted, cluster.kind, cluster.num_slices > 1, _left_out(case))


def _left_out(case: Case) -> tuple[str, ...]:
    """Returns the mesh axes to leave out of the derivation: axes of size 1, in generation and with adapters; else none.
    Even at size 1 an axis would delay the sum of the adapter's and the base's cotangents by a collective."""
    mesh, setting = case.strategy.mesh, case.setting
    return (
        tuple(axis for axis, size in mesh.items() if size == 1) if setting.model.lora or not setting.job.trains else ()
    )


def _batch(cases: Sequence[Case], case_indices: Sequence[int]) -> CaseBatch:
    batch_cases = tuple(cases[case_index] for case_index in case_indices)
    first_case = batch_cases[0]
    if first_case.setting.job.trains:
        derived = first_case.setting.symbolic(first_case.strategy, without=_left_out(first_case))
    else:
        derived = first_case.setting.derived(first_case.strategy)
    placements = [strategy_placements(case.setting.cluster, case.strategy)[0] for case in batch_cases]
    groups = collective_groups(derived)
    case_sizes = [case.setting.sizes(case.strategy) for case in batch_cases]
    dims, mesh, sequences = (
        map_figures(lambda *values: np.array(values, dtype=float), *(getattr(size, name) for size in case_sizes))
        for name in ("dims", "mesh", "sequences")
    )
    return CaseBatch(
        cases=batch_cases,
        numbers=np.array(case_indices),
        derived=_with_repeats(derived, batch_cases),
        sizes=msgspec.structs.replace(case_sizes[0], dims=dims, mesh=mesh, sequences=sequences),
        pipeline=PipelineCost(
            schedule=first_case.strategy.schedule,
            stages=np.array([case.strategy.mesh["pipeline"] for case in batch_cases]),
            chunks=np.array([case.strategy.chunks for case in batch_cases]),
            microbatches=np.array([case.strategy.num_microbatches for case in batch_cases]),
            in_lockstep=first_case.setting.assumptions.traits.is_compiled,
        ),
        legs={group: _stacked_legs([group_legs(placement, group) for placement in placements]) for group in groups},
        fills={group: _filled(placements, group) for group in groups},
        links=_links(placements),
        num_hosts=np.array([case.setting.cluster.num_hosts for case in batch_cases]),
        num_nodes={group: np.array([spanned_nodes(group_legs(p, group)) for p in placements]) for group in groups},
    )


def _with_repeats(derived: Derived, cases: Sequence[Case]) -> Derived:
    """Returns the derived steps with each block's ``repeat`` as an array, an entry per case."""
    programs = [case.setting.program for case in cases]
    repeated_blocks = []
    for block_index, block_steps in enumerate(derived.blocks):
        repeats_of_case = np.array([program.blocks[block_index].repeat for program in programs])
        block = msgspec.structs.replace(block_steps.block, repeat=repeats_of_case)
        repeated_blocks.append(msgspec.structs.replace(block_steps, block=block))
    return msgspec.structs.replace(derived, blocks=tuple(repeated_blocks))


def _stacked_legs(legs_of_cases: Sequence[tuple[Leg, ...]]) -> tuple[Leg, ...]:
    """Stacks the legs of all cases: their n-th legs of a level become one leg whose figures are arrays."""
    legs_by_slot: dict[tuple[Level, int], list[Leg]] = {}
    for case_index, legs in enumerate(legs_of_cases):
        leg_counts: Counter[Level] = Counter()
        for leg in legs:
            legs_by_slot.setdefault((leg.level, leg_counts[leg.level]), [NO_LEG] * len(legs_of_cases))[case_index] = leg
            leg_counts[leg.level] += 1
    rank_by_level = {"ici": 0, "nvlink": 0, "host": 0, "network": 1, "dcn": 2}
    return tuple(
        msgspec.structs.replace(stack(legs), level=level)
        for (level, _), legs in sorted(legs_by_slot.items(), key=lambda entry: rank_by_level[entry[0][0]])
    )


def _arrays(items: Sequence[object], field_names: Iterable[str]) -> dict[str, Any]:
    """Stacks attributes of several objects into arrays."""
    return {field: np.array([getattr(item, field) for item in items]) for field in field_names}


def _filled(placements: Sequence[Placement], group: AxisGroup) -> np.ndarray:
    """Returns True where the group uses the physical axis [physical axes, cases]."""
    is_filled = np.zeros(_links(placements).shape, dtype=bool)
    for case_index, placement in enumerate(placements):
        is_used = [any(axis in group and factor > 1 for axis, factor in link.parts) for link in placement.links]
        is_filled[: len(is_used), case_index] = is_used
    return is_filled


def _links(placements: Sequence[Placement]) -> np.ndarray:
    """Returns the link level of each physical axis, "" if a case has fewer axes [physical axes, cases]."""
    max_axes = max(len(placement.links) for placement in placements)
    return np.array([[*(link.level for link in p.links), *[""] * (max_axes - len(p.links))] for p in placements]).T


def _stacked_calibration(calibrations: Sequence[Calibration]) -> Any:
    """Returns an object with the calibration fields that pricing reads, most as arrays."""
    array_fields = [name for name in Efficiency.__struct_fields__ if name not in ALIKE]
    figures = _arrays([calibration.efficiency for calibration in calibrations], array_fields)
    has_overlap = calibrations[0].efficiency.overlap is not None
    exponents = ["overlap", "hiding"]
    tables = [calibration.efficiency.engine_s for calibration in calibrations]
    figures["engine_s"] = {engine: np.array([table.get(engine, 0.0) for table in tables]) for engine in tables[0]}
    figures |= _arrays([c.efficiency for c in calibrations], exponents) if has_overlap else dict.fromkeys(exponents)
    efficiency = SimpleNamespace(**figures)
    return SimpleNamespace(efficiency=efficiency, hop_s=_Hops([c.hop_s for c in calibrations]), collectives=())


class _Hops:
    """Hop latencies of several calibrations; `get` returns an array, ``own`` where a calibration lacks the level."""

    def __init__(self, every: Sequence[Mapping[str, float]]) -> None:
        self.every = every

    def get(self, level: str, own: np.ndarray) -> np.ndarray:
        hop_s = np.array([hop_s_by_level.get(level, np.nan) for hop_s_by_level in self.every])
        return np.where(np.isnan(hop_s), own, hop_s)
