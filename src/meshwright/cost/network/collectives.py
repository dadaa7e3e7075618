"""Seconds of a collective over the links of a group: torus rings, switched domains, slices, this machine.

A GROUP is the mesh axes, one or several, that one collective uses jointly. ``array_bytes`` are the bytes of the full
(gathered) array of one group; of a permute, the bytes that each device sends. Sizes and bytes may be NumPy arrays:
nothing branches on them. Sources: How to Scale Your Model, sections 3.2 (rings, latency), 3.4 (summary), 5.1.6 (DCN).
"""

import functools
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from meshwright.algebra.notation import product
from meshwright.algebra.sizes import Number
from meshwright.core.dims import COLLECTIVES, CollectiveKind
from meshwright.core.errors import InputError
from meshwright.cost.network.legs import Leg, group_legs
from meshwright.cost.network.links import Level
from meshwright.cost.network.placement import Placement
from meshwright.spec.assumptions import Scatters
from meshwright.spec.calibration import Calibration, collective_rate

_INNER: tuple[Level, ...] = ("ici", "nvlink", "host")


class KindRate(msgspec.Struct, frozen=True):
    """``time = setup_s + max(bytes x seconds_per_byte, floor_s)``; ``level`` is the level whose bandwidth binds."""

    seconds_per_byte: Number
    floor_s: Number = 0.0
    setup_s: Number = 0.0
    level: str | np.ndarray = "none"

    @property
    def latency_s(self) -> Number:
        """Seconds that do not shrink with the bytes."""
        return self.setup_s + self.floor_s

    def time(self, array_bytes: Number) -> Number:
        """Returns the seconds of a collective on an array of ``array_bytes``."""
        return self.setup_s + _larger(array_bytes * self.seconds_per_byte, self.floor_s)


class GroupRates(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a group, and the rate of each kind of collective on it.

    ``ring_links`` is 2 if a device has a link to each neighbour in a ring, so that halves sent in both directions
    travel at the same time. It is 1 if both directions share a port, and on a line, where one direction uses all links.
    """

    size: Number
    kinds: dict[str, KindRate]
    ring_links: Number = 1

    def __getitem__(self, kind: str) -> KindRate:
        rate = self.kinds.get(kind)
        if rate is None:
            raise InputError(
                f"the calibration has no rate of {kind} over these devices, only of {', '.join(self.kinds) or 'none'}. "
                f"Measure again with more --seconds, or take --calibration datasheet."
            )
        return rate

    @property
    def latency_s(self) -> Number:
        """The floor of one AllGather: hops x the latency of a hop."""
        return self["all_gather"].floor_s


def collective_time(kind: CollectiveKind, array_bytes: Number, group: GroupRates) -> Number:
    """Returns the seconds of one collective: the larger of its bandwidth and its latency term, plus any setup.

    AllReduce is a ReduceScatter and an AllGather. Source: How to Scale Your Model, section 3.2.
    """
    return group[kind].time(array_bytes)


def collective_bound_by(kind: CollectiveKind, array_bytes: float, group: GroupRates) -> str:
    """Returns "latency" if that takes longer than the bytes, else the level whose bandwidth binds."""
    rate = group[kind]
    return "latency" if rate.latency_s > array_bytes * rate.seconds_per_byte else str(rate.level)


def group_rates(placement: Placement, axes: Iterable[str], calibration: Calibration | None = None) -> GroupRates:
    """Returns the rates of a group of mesh axes on a placement; without a calibration by the data sheet."""
    return leg_rates(group_legs(placement, axes), calibration)


def leg_rates(
    legs: Sequence[Leg], calibration: Calibration | None = None, *, scatters: Scatters = "turns"
) -> GroupRates:
    """Returns the rates of a group made of these legs.

    The bandwidths of torus axes add up to W: twice the one-way rate for a ring, once for a line, each over ``sharing``.
    An AllGather of V bytes takes V/W if an axis is a ring, (n-1)/n V/W otherwise. An AllToAll crosses the axes one
    after the other in a pipeline; each takes a quarter (a line: half) of what a ring's AllGather of that axis's share
    takes, and the longest binds. Inside a switch an AllGather sends (n-1)/n V through the port, from other domains too.
    Levels work at the same time and the slowest binds: see `_outer_terms`. A ReduceScatter takes as long as an
    AllGather; over a whole slice it takes more: in two turns (`_scatter_term`), or with ``scatters`` "once" as long as
    an AllReduce. Raises InputError on emulated devices without a calibration.
    """
    if not legs:
        return GroupRates(size=1, kinds=dict.fromkeys(COLLECTIVES, KindRate(0.0)))
    if legs[0].level == "host":
        return _host_rates(legs[0], calibration)
    if calibration is not None:
        legs = [_calibrated(leg, calibration) for leg in legs]
    inner_legs = [leg for leg in legs if leg.level in _INNER]
    outer_legs = [leg for leg in legs if leg.level not in _INNER]
    inner_size, outer_size = (product(leg.size for leg in side_legs) for side_legs in (inner_legs, outer_legs))
    group_size = inner_size * outer_size
    inner_gather, inner_exchange = _inner_term(inner_legs, group_size), _exchange_term(inner_legs, inner_size)
    outer_gather, outer_exchange = _outer_terms(outer_legs, inner_size)
    has_two_turns = product(leg.later for leg in inner_legs) > 1
    inner_scatter = (1 + has_two_turns) * inner_gather if scatters == "once" else _scatter_term(inner_legs, group_size)
    gather_term = _larger(inner_gather, outer_gather)
    exchange_term = _larger(inner_exchange / outer_size, outer_exchange)
    hops_s = sum(leg.hops * (leg.size > 1) * leg.hop_s for leg in legs)
    setup_s: Number = 0.0
    if legs[0].level != "ici" and calibration is not None and calibration.efficiency.overlap is not None:
        # kernels start and finish these collectives without moving bytes; a ring overlaps hops with bytes
        setup_s, hops_s = hops_s, 0.0
    inner_level, outer_level = (side_legs[0].level if side_legs else "none" for side_legs in (inner_legs, outer_legs))
    gather_level = _binding((inner_gather, inner_level), (outer_gather, outer_level))
    exchange_level = _binding((inner_exchange / outer_size, inner_level), (outer_exchange, outer_level))
    scatter_level = _binding((inner_scatter, inner_level), (outer_gather, outer_level))
    return GroupRates(
        size=group_size,
        kinds={
            "all_gather": KindRate(gather_term, hops_s, setup_s, level=gather_level),
            "reduce_scatter": KindRate(_larger(inner_scatter, outer_gather), hops_s, setup_s, level=scatter_level),
            "all_reduce": KindRate(2 * gather_term, 2 * hops_s, 2 * setup_s, level=gather_level),
            "all_to_all": KindRate(exchange_term, hops_s, setup_s, level=exchange_level),
            "permute": _permute_rate(legs),
        },
        ring_links=_ring_links(legs),
    )


def _calibrated(leg: Leg, calibration: Calibration) -> Leg:
    """Returns a leg with its bandwidth times the calibration's efficiency, and its measured latency of a hop, if
    any."""
    bytes_per_s = leg.bytes_per_s * getattr(calibration.efficiency, leg.level)
    return replace(leg, bytes_per_s=bytes_per_s, hop_s=calibration.hop_s.get(leg.level, leg.hop_s))


def _outer_terms(legs: Sequence[Leg], inner_size: Number) -> tuple[Number, Number]:
    """Returns the seconds per byte of an AllGather and an AllToAll on the slowest of the outer levels.

    Traffic to outer levels also passes the levels before them. With p members inside a level and n in the group, a
    chip carries 1/p - 1/n of the gathered array through that level, and (1 - p/n)/n of an AllToAll's array.
    """
    group_size = inner_size * product(leg.size for leg in legs)
    num_inside, gather_term, exchange_term = inner_size, 0.0, 0.0
    for leg in legs:
        # a level that the group does not use cannot bind, whatever outer levels carry
        is_used = leg.size > 1
        gather_term = _larger(gather_term, is_used * (1 / num_inside - 1 / group_size) / leg.bytes_per_s)
        exchange_term = _larger(exchange_term, is_used * (1 - num_inside / group_size) / group_size / leg.bytes_per_s)
        num_inside = num_inside * leg.size
    return gather_term, exchange_term


def _inner_term(legs: Sequence[Leg], num_devices: Number) -> Number:
    """Returns the seconds per byte of an AllGather on the innermost level of a group of ``num_devices`` in all: 1/W if
    an axis is a ring, (n-1)/n of that otherwise.

    Blocks from other domains and slices cross these links too.
    """
    bytes_per_s: Number = sum((1 + leg.wraps) * leg.bytes_per_s / leg.sharing * (leg.size > 1) for leg in legs)
    has_ring: Number = sum(leg.wraps * (leg.size > 1) for leg in legs) > 0
    # a group of one has width 0 and moves nothing, and the divisor must not be 0
    return (bytes_per_s > 0) * (num_devices - 1 + has_ring) / num_devices / (bytes_per_s + (bytes_per_s == 0))


def _exchange_term(legs: Sequence[Leg], num_devices: Number) -> Number:
    """Returns the seconds per byte of an AllToAll over the ``num_devices`` of the innermost level only."""
    slowest_term: Number = 0.0
    for leg in legs:
        bytes_per_s = leg.bytes_per_s / leg.sharing
        if leg.level == "nvlink":
            return (num_devices - 1) / num_devices / bytes_per_s / num_devices
        # this axis exchanges the share of the array that one line of chips along it has
        busiest_share = busiest_link_share(leg.size, leg.wraps) * leg.size / num_devices
        slowest_term = _larger(slowest_term, busiest_share * (leg.size > 1) / bytes_per_s / leg.twist_gain)
    return slowest_term


def _scatter_term(legs: Sequence[Leg], num_devices: Number) -> Number:
    """Returns the seconds per byte of a ReduceScatter on the innermost level of a group of ``num_devices`` in all: the
    AllGather of the first turn, and that of the ``later`` parts of legs on the remaining share of the array.

    Of a leg that takes part in both turns, the first has every so many chips, and the later one neighbours.
    """
    first_legs = [replace(leg, size=leg.size // leg.later, sharing=leg.sharing * leg.later) for leg in legs]
    later_legs = [replace(leg, size=leg.later, wraps=leg.wraps & (leg.later == leg.size)) for leg in legs]
    first_size, later_size = (product(leg.size for leg in turn_legs) for turn_legs in (first_legs, later_legs))
    return _inner_term(first_legs, num_devices // later_size) + _inner_term(later_legs, later_size) / first_size


def busiest_link_share(size: Number, wraps: bool | np.ndarray) -> Number:
    """Returns the share of the array that the busiest link carries in one direction of an AllToAll of n devices.

    In a line the middle link parts k = n/2 devices (rounded down) from n - k, and each device sends 1/n^2 of the array
    to each device beyond it: k (n - k) / n^2, a quarter if n is even. A ring used in both directions has two such links
    and carries half as much over each. Source: How to Scale Your Model, exercise 3.10, which counts rings.
    """
    half_size = size // 2
    return half_size * (size - half_size) / size**2 / (1 + wraps)


def _permute_rate(legs: Sequence[Leg]) -> KindRate:
    """Returns the rate of sends from every device to the next of its group: bytes on the slowest link of the legs,
    after the latency of one hop."""
    level_terms = [((leg.size > 1) / (leg.bytes_per_s / leg.sharing), leg.level) for leg in legs]
    hop_floors_s = [(leg.size > 1) * leg.sharing * leg.hop_s for leg in legs]
    return KindRate(
        functools.reduce(_larger, (seconds_per_byte for seconds_per_byte, _ in level_terms)),
        setup_s=functools.reduce(_larger, hop_floors_s),
        level=_binding(*level_terms),
    )


def _ring_links(legs: Sequence[Leg]) -> Number:
    """Links of a device that a ring can use at once: 2 if all axes are closed torus axes of over two chips, else 1."""
    is_two_way: Number = 1
    for leg in legs:
        is_two_way = is_two_way * ((leg.size == 1) | (leg.wraps & (leg.size > 2) & (leg.level == "ici")))
    return 1 + is_two_way


def received_share(kind: str, size: Number) -> Number:
    """Returns the bytes that each device receives, over ``array_bytes``; measured rates are per received byte."""
    others_share = (size - 1) / size
    if kind == "all_reduce":
        return 2 * others_share
    if kind == "all_to_all":
        return others_share / size
    return 1.0 * (size > 1) if kind == "permute" else others_share


def _host_rates(leg: Leg, calibration: Calibration | None) -> GroupRates:
    if calibration is None:
        raise InputError("the devices of this machine have no data sheet. Measure them and give a calibration.")
    rate_by_kind = {}
    for kind in COLLECTIVES:
        if any(rate.kind == kind for rate in calibration.collectives):
            measured_rate = collective_rate(calibration, kind, leg.size)
            rate_by_kind[str(kind)] = KindRate(
                received_share(kind, leg.size) / measured_rate.bytes_per_s, 0.0, measured_rate.latency_s, "host"
            )
    if not rate_by_kind:
        collective_rate(calibration, "all_gather", leg.size)
    return GroupRates(size=leg.size, kinds=rate_by_kind)


def latency_bound_bytes(link_bytes_per_s: Number, *, hop_s: float = 1e-6, num_shards: Number = 1) -> Number:
    """Returns the array bytes below which a hop's latency is longer than the time to send a shard: shards x link x hop.

    Source: How to Scale Your Model, sections 3.2 and 7.6.3.
    """
    return num_shards * link_bytes_per_s * hop_s


def ring_link_share(kind: CollectiveKind, size: Number, *, two_way: bool) -> Number:
    """Returns the share of the array that crosses one link in one direction of a ring of ``size`` devices.

    On a one-way ring AllGather sends (n-1)/n and AllToAll half of that; with ``two_way`` AllGather sends half as much
    and AllToAll `busiest_link_share`. Source: How to Scale Your Model, exercise 3.10.
    """
    if kind == "all_to_all" and two_way:
        return busiest_link_share(size, wraps=True)
    factor_by_kind = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 0.5}
    return factor_by_kind[kind] / (1 + two_way) * (size - 1) / size


def _larger(first_value: Number, second_value: Number) -> Number:
    """Returns the elementwise larger of two numbers or arrays."""
    if isinstance(first_value, np.ndarray) or isinstance(second_value, np.ndarray):
        return np.maximum(first_value, second_value)
    return max(first_value, second_value)


def _binding(*terms: tuple[Number, str]) -> str | np.ndarray:
    """Returns the level of the longest of some (seconds, level), from inside out; of equal ones the inner level."""
    longest_s, binding_level = terms[0][0], np.where(np.asarray(terms[0][0]) > 0, terms[0][1], "none")
    for term_s, level in terms[1:]:
        binding_level = np.where(term_s > longest_s, level, binding_level)
        longest_s = _larger(longest_s, term_s)
    return binding_level if binding_level.ndim else str(binding_level)
