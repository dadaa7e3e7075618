"""Rates that price a step: of one chip for local ops, and of every group of mesh axes for collectives."""

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from meshwright.algebra.sizes import Number, Scores
from meshwright.core.errors import CannotRunError
from meshwright.cost.arrays import select, stack
from meshwright.cost.network.collectives import GroupRates, leg_rates
from meshwright.cost.network.legs import Leg, legs_of_links
from meshwright.cost.network.placement import Placement, place_axes
from meshwright.cost.work.kernels import AxisGroup, ChipRates, chip_rates
from meshwright.spec.assumptions import AS_RUN, SENDING_SMS, Assumptions
from meshwright.spec.calibration import Calibration, datasheet_calibration, reference_peak
from meshwright.spec.cluster import Cluster
from meshwright.spec.efficiency import family
from meshwright.spec.strategy import Strategy, mesh_words

BETWEEN_NODES = ("network", "dcn")
"""Levels of links that leave a domain or a slice."""


class StepRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of the machine, for one placement or (arrays) for many.

    Utilisation is a share of ``peak_flops_per_s``. ``link_levels`` has the level of each physical axis. ``uses`` says
    for a group and a kind of collective which physical axes it keeps busy; collectives that share one compete.
    ``overlaps`` is false if communication runs on the cores that compute (emulated devices). ``num_nodes`` counts the
    nodes that a group spans. ``hides_exchanges``: exchanges of slots overlap with the pass of the other direction.
    ``narrow_gathers``: weights are gathered in one byte.
    """

    chip: ChipRates
    peak_flops_per_s: Number
    groups: dict[AxisGroup, GroupRates]
    link_levels: tuple[str, ...]
    uses: dict[tuple[AxisGroup, str], tuple[Number, ...]]
    overlaps: bool = True
    num_hosts: Number = 1
    pcie_bytes_per_s: float | None = None
    num_nodes: dict[AxisGroup, Number] = {}
    hides_exchanges: bool = False
    narrow_gathers: bool = False
    engine: str = ""

    @property
    def compute_share(self) -> Number:
        """The share of SMs that compute while the other SMs send exchanges of slots; 1 if exchanges do not overlap."""
        num_sms = np.asarray(self.chip.processors)
        return np.where(num_sms > 0, 1 - SENDING_SMS / np.maximum(num_sms, 1), 1.0) if self.hides_exchanges else 1.0


def exchanges_hide(strategy: Strategy, assumptions: Assumptions) -> bool:
    """True if exchanges of slots overlap with the pass of another microbatch."""
    return assumptions.exchange_overlap or (
        assumptions.dispatch == "nodes" and strategy.schedule.startswith("dualpipe")
    )


def gathers_narrow(strategy: Strategy, assumptions: Assumptions) -> bool:
    """True if software gathers weights in the dtype of products, and that is fp8."""
    return assumptions.narrow_gathers and strategy.matmul_dtype == "fp8"


def spanned_nodes(legs: Iterable[Leg]) -> Number:
    """Returns the number of domains or slices that a group with these legs spans."""
    return math.prod(leg.size for leg in legs if leg.level in BETWEEN_NODES)


def attention_scores(cluster: Cluster, assumptions: Assumptions = AS_RUN) -> Scores:
    """Returns where attention keeps scores: on chip in fused kernels, in memory on CPUs and in software of 2021."""
    if cluster.kind == "host":
        return "in_memory"
    return "on_chip" if assumptions.traits.fuses_attention else "in_memory_16"


def has_grouped_kernels(cluster: Cluster) -> bool:
    """True for TPUs and Hopper, for which `nn.experts.grouped` has kernels."""
    return cluster.kind == "torus" or family(cluster.chip) == "h100"


def strategy_placements(cluster: Cluster, strategy: Strategy) -> tuple[Placement, ...]:
    """Returns the placement that ``strategy.placement`` describes, or every candidate if it is empty.

    Raises CannotRunError if the mesh cannot be laid on the cluster, or not as described.
    """
    placements = place_axes(cluster, strategy.mesh)
    text_of = strategy.placement
    matching_placements = tuple(placement for placement in placements if not text_of or placement.describe() == text_of)
    if not matching_placements:
        mesh_text = mesh_words(strategy.mesh, " x ")
        as_text = f" as {', '.join(f'{axis}: {text}' for axis, text in text_of.items())}" if placements else ""
        raise CannotRunError(
            f"mesh {mesh_text} cannot be laid on {cluster.short_name}{as_text}: every mesh axis must be made of whole "
            f"factors of the physical axes. Change the mesh, or leave out the placement."
        )
    return matching_placements


def step_rates(
    cluster: Cluster,
    placements: Sequence[Placement],
    groups: Iterable[AxisGroup],
    strategy: Strategy,
    *,
    assumptions: Assumptions = AS_RUN,
    calibration: Calibration | None = None,
) -> StepRates:
    """Returns the rates for the dtypes of a strategy, as arrays with one entry for each placement.

    Raises InputError if the chip lacks a figure that is needed.
    """
    calib = calibration or datasheet_calibration(cluster.chip)
    dtype = strategy.matmul_dtype
    rates_by_legs: dict[tuple[Leg | None, ...], GroupRates] = {}
    rates_by_group: dict[AxisGroup, GroupRates] = {}
    busy_by_kind: dict[tuple[AxisGroup, str], tuple[Number, ...]] = {}
    nodes_by_group: dict[AxisGroup, Number] = {}
    for group in groups:
        # placements with the same legs are priced once
        index_by_legs: dict[tuple[Leg | None, ...], int] = {}
        legs_index_by_placement = np.empty(len(placements), dtype=np.intp)
        is_used = np.zeros((len(placements[0].links), len(placements)), dtype=bool)
        num_nodes = np.ones(len(placements))
        for index, placement in enumerate(placements):
            legs = legs_of_links(placement, group)
            if legs not in rates_by_legs:
                used_legs = [leg for leg in legs if leg is not None]
                rates_by_legs[legs] = leg_rates(used_legs, calibration, scatters=assumptions.scatters)
            legs_index_by_placement[index] = index_by_legs.setdefault(legs, len(index_by_legs))
            is_used[:, index] = [leg is not None for leg in legs]
            num_nodes[index] = spanned_nodes(leg for leg in legs if leg is not None)
        nodes_by_group[group] = num_nodes
        rates_by_group[group] = select(stack([rates_by_legs[legs] for legs in index_by_legs]), legs_index_by_placement)
        busy_by_kind |= busy_links(group, rates_by_group[group], is_used, [link.level for link in placements[0].links])
    return StepRates(
        chip=chip_rates(cluster.chip, calib, dtype=dtype, state_dtype=strategy.state_dtype, assumptions=assumptions),
        peak_flops_per_s=reference_peak(cluster.chip, calib, dtype),
        groups=rates_by_group,
        link_levels=tuple(link.level for link in placements[0].links),
        uses=busy_by_kind,
        overlaps=cluster.kind != "host",
        num_hosts=cluster.num_hosts,
        pcie_bytes_per_s=cluster.chip.pcie_bytes_per_s,
        num_nodes=nodes_by_group,
        hides_exchanges=exchanges_hide(strategy, assumptions),
        narrow_gathers=gathers_narrow(strategy, assumptions),
        engine=assumptions.engine,
    )


def busy_links(
    group: AxisGroup, rates: GroupRates, fills: np.ndarray, levels: Iterable[str | np.ndarray]
) -> dict[tuple[AxisGroup, str], tuple[Number, ...]]:
    """Maps (group, kind of collective) to a flag for each physical axis: whether the collective keeps it busy.

    Busy are axes that the group uses (``fills``) and whose level binds; axes of faster levels stay half idle.
    """
    return {
        (group, kind): tuple(
            is_used & (np.asarray(rate.level) == level) for is_used, level in zip(fills, levels, strict=True)
        )
        for kind, rate in rates.kinds.items()
    }
