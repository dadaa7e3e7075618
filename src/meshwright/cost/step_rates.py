"""Rates that price a step's ops and collectives: one chip's, and those of every group of mesh axes on its links."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.cost.network import GroupRates, Leg, Placement, group_legs, leg_rates, stack_rates
from meshwright.cost.ops import Scores
from meshwright.spec.calibration import Calibration, datasheet_calibration, matmul_rate, memory_rate, reference_peak
from meshwright.spec.cluster import Cluster

Number = Any
"""A float, or a NumPy array with one entry per candidate."""

Group = frozenset[str]
"""Mesh axes that one collective uses jointly; their order does not change its time."""


class StepRates(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine does per second, for one placement or (arrays) for many.

    ``peak_flops_per_s`` is what utilisation is a share of. ``links`` is, per group, a bit mask of the physical
    axes it uses: groups with a common bit compete. ``overlaps`` is false where communication runs on the cores
    that compute (emulated devices).
    """

    matmul_flops_per_s: float
    peak_flops_per_s: float
    hbm_bytes_per_s: float
    groups: dict[Group, GroupRates]
    links: dict[Group, Number]
    overlaps: bool = True
    scores: Scores = "on_chip"

    def shares(self, one: Group, other: Group) -> Any:
        """Whether two groups use some physical axis both."""
        return (self.links[one] & self.links[other]) != 0

    def take(self, index: Any) -> "StepRates":
        """The rates of the candidates whose placement has these numbers."""
        groups = {group: _take(rates, index) for group, rates in self.groups.items()}
        links = {group: mask[index] for group, mask in self.links.items()}
        return msgspec.structs.replace(self, groups=groups, links=links)


def step_rates(
    cluster: Cluster,
    placements: Placement | Sequence[Placement],
    groups: Iterable[Group],
    *,
    dtype: str,
    calibration: Calibration | None = None,
) -> StepRates:
    """The rates of one placement, or arrays of them with one entry for each placement.

    ``dtype`` is that of the operands of matrix products. Raises InputError for a figure that is not known.
    """
    measured = calibration or datasheet_calibration(cluster.chip)
    on_host = cluster.kind == "host"
    one = isinstance(placements, Placement)
    laid = [placements] if isinstance(placements, Placement) else placements
    rates, links = _group_tables(laid, tuple(groups), calibration)
    every = StepRates(
        matmul_flops_per_s=matmul_rate(cluster.chip, measured, dtype),
        peak_flops_per_s=reference_peak(cluster.chip, measured, dtype),
        hbm_bytes_per_s=memory_rate(cluster.chip, measured),
        groups=rates,
        links=links,
        overlaps=not on_host,
        # CPUs have no fused attention kernel: the chain of products and softmax writes its scores
        scores="in_memory" if on_host else "on_chip",
    )
    return every.take(0) if one else every


def _group_tables(
    placements: Sequence[Placement], groups: tuple[Group, ...], calibration: Calibration | None
) -> tuple[dict[Group, GroupRates], dict[Group, Number]]:
    """Per group the rates and link masks of all placements. Placements that use the same legs are priced once."""
    known: dict[tuple[Leg, ...], GroupRates] = {}
    rates: dict[Group, GroupRates] = {}
    links: dict[Group, Number] = {}
    for group in groups:
        numbers: dict[tuple[Leg, ...], int] = {}
        which = np.empty(len(placements), dtype=np.intp)
        for index, placement in enumerate(placements):
            legs = group_legs(placement, group)
            if legs not in known:
                known[legs] = leg_rates(legs, calibration)
            which[index] = numbers.setdefault(legs, len(numbers))
        stacked = stack_rates([known[legs] for legs in numbers])
        rates[group] = _take(stacked, which)
        links[group] = np.array([_mask(placement, group) for placement in placements], dtype=np.int64)
    return rates, links


def _mask(placement: Placement, group: Group) -> int:
    used = (any(axis in group and factor > 1 for axis, factor in link.parts) for link in placement.links)
    return sum(1 << number for number, uses in enumerate(used) if uses)


def _take(rates: GroupRates, index: Any) -> GroupRates:
    """The entries of stacked rates that an index picks."""
    kinds: Mapping[str, Any] = rates.kinds
    return GroupRates(
        size=rates.size[index],
        level=rates.level[index],
        kinds={
            name: type(rate)(rate.seconds_per_byte[index], rate.floor_s[index], rate.setup_s[index])
            for name, rate in kinds.items()
        },
    )
