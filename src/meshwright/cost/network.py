"""Seconds of a collective over the links of a group: torus rings, switched domains, slices, this machine.

A GROUP is one or several mesh axes that one collective uses jointly. ``array_bytes`` is the full (gathered)
array on that group, per device that ends up with it; for a permute, what each device sends. Sizes and bytes may
be NumPy arrays: nothing branches on them.
Sources: How to Scale Your Model, sections 3.2 (rings, latency), 3.4 (summary), 5.1.6 (DCN).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.core.errors import InputError, nearest
from meshwright.cost.placement import Level, Link, Placement, place_axes
from meshwright.spec.calibration import Calibration, CollectiveKind, collective_rate

__all__ = [
    "KINDS",
    "GroupRates",
    "KindRate",
    "Leg",
    "Placement",
    "collective_bound_by",
    "collective_time",
    "group_legs",
    "group_rates",
    "latency_bound_bytes",
    "leg_rates",
    "place_axes",
    "received_share",
    "ring",
    "ring_link_share",
    "stack_rates",
]

Number = Any
"""A float, an int or a NumPy array of them."""

KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")

_INNER: tuple[Level, ...] = ("ici", "nvlink", "host")


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a group on one physical axis.

    ``bytes_per_s`` is one way and per chip; ``sharing`` is how many interleaved groups use the same links;
    ``hops`` are the links that the furthest shard crosses.
    """

    level: Level
    size: Number
    bytes_per_s: Number
    wraps: Any = False
    sharing: Number = 1
    hops: Number = 1
    hop_s: float = 1e-6


class KindRate(msgspec.Struct, frozen=True):
    """``time = setup_s + max(bytes x seconds_per_byte, floor_s)``."""

    seconds_per_byte: Number
    floor_s: Number = 0.0
    setup_s: Number = 0.0

    def time(self, array_bytes: Number) -> Number:
        """Seconds for that many bytes."""
        return self.setup_s + _larger(array_bytes * self.seconds_per_byte, self.floor_s)


class GroupRates(msgspec.Struct, frozen=True, kw_only=True):
    """What a group needs to be priced: its size, the level that binds, and the rate of each kind of collective."""

    size: Number
    level: Any
    kinds: dict[str, KindRate]

    def __getitem__(self, kind: str) -> KindRate:
        rate = self.kinds.get(kind)
        if rate is None:
            raise InputError(f"no rate of the collective {kind!r} on this group.{nearest(kind, self.kinds)}")
        return rate

    @property
    def seconds_per_byte_all_gather(self) -> Number:
        return self["all_gather"].seconds_per_byte

    @property
    def seconds_per_byte_all_to_all(self) -> Number:
        return self["all_to_all"].seconds_per_byte

    @property
    def latency_s(self) -> Number:
        """The floor of one AllGather: hops x the latency of a hop."""
        return self["all_gather"].floor_s


def collective_time(kind: CollectiveKind, array_bytes: Number, group: GroupRates) -> Number:
    """Seconds of one collective: the larger of its bandwidth and its latency term.

    AllReduce is a ReduceScatter and an AllGather. Source: How to Scale Your Model, section 3.2.
    """
    return group[kind].time(array_bytes)


def collective_bound_by(kind: CollectiveKind, array_bytes: float, group: GroupRates) -> str:
    """ "latency" where the hops take longer than the bytes, else the level whose bandwidth binds."""
    rate = group[kind]
    return "latency" if rate.floor_s > array_bytes * rate.seconds_per_byte else str(group.level)


def ring(
    size: Number,
    link_bytes_per_s: Number,
    *,
    wraps: Any = True,
    sharing: Number = 1,
    hop_s: float = 1e-6,
) -> Leg:
    """A leg on one torus axis: ``link_bytes_per_s`` one way; n/2 hops where it wraps, else n - 1."""
    hops = sharing * (size / 2 * wraps + (size - 1) * (1 - wraps))
    return Leg(
        level="ici", size=size, bytes_per_s=link_bytes_per_s, wraps=wraps, sharing=sharing, hops=hops, hop_s=hop_s
    )


def group_legs(placement: Placement, axes: Iterable[str]) -> tuple[Leg, ...]:
    """The legs of a group of mesh axes, those on the same physical axis merged.

    A merged leg that reaches the outermost factor spans the whole physical axis, so it wraps where that wraps;
    factors inside it that are not in the group are other groups on the same links (``sharing``).
    """
    chosen = frozenset(axes)
    unknown = chosen.difference(placement.mesh)
    if unknown:
        name = min(unknown)
        raise InputError(f"{name!r} is not an axis of the mesh.{nearest(name, placement.mesh)}")
    legs = (_merged_leg(link, chosen) for link in placement.links)
    return tuple(leg for leg in legs if leg is not None)


def _merged_leg(link: Link, chosen: frozenset[str]) -> Leg | None:
    size = stride = between = sharing = 1
    hops, outermost = 0, False
    for axis, factor in reversed(link.parts):
        outermost = axis in chosen
        if outermost:
            size *= factor
            hops += (factor - 1) * stride
            sharing = between
        else:
            between *= factor
        stride *= factor
    if size == 1:
        return None
    if link.level != "ici":
        # every chip has its own port into a switch: groups do not share links, and any chip is one hop away
        hops = 1 if link.level in ("nvlink", "host") else (size - 1).bit_length()
        return Leg(level=link.level, size=size, bytes_per_s=link.bytes_per_s, hops=hops, hop_s=link.hop_s)
    wraps = link.wraps and outermost
    return Leg(
        level="ici",
        size=size,
        bytes_per_s=link.bytes_per_s,
        wraps=wraps,
        sharing=sharing,
        hops=stride / 2 if wraps else hops,
        hop_s=link.hop_s,
    )


def group_rates(placement: Placement, axes: Iterable[str], calibration: Calibration | None = None) -> GroupRates:
    """The rates of a group of mesh axes on a placement; the data sheet's without a calibration."""
    return leg_rates(group_legs(placement, axes), calibration)


def leg_rates(legs: Sequence[Leg], calibration: Calibration | None = None) -> GroupRates:
    """The rates of a group made of these legs.

    Torus axes add their bandwidths: W = 2 x one way of a ring, one way of a line, over ``sharing``. AllGather
    is V/W with a ring, (n-1)/n V/W without; AllToAll a quarter of it, or half. Inside a switch: (n-1)/n V over
    the port. Levels work at the same time: an outer one carries V/n_inner per chip, the slower one binds.
    """
    inner = [leg for leg in legs if leg.level in _INNER]
    outer = [leg for leg in legs if leg.level not in _INNER]
    if not legs:
        free = KindRate(0.0)
        return GroupRates(size=1, level="none", kinds=dict.fromkeys(KINDS, free))
    if inner and inner[0].level == "host":
        return _host_rates(inner[0], calibration)
    num_inner, num_outer = _product(inner), _product(outer)
    gather_in, exchange_in = _inner_terms(inner, num_inner, calibration)
    gather_out = exchange_out = 0.0
    for leg in outer:
        rate = leg.bytes_per_s * _efficiency(calibration, leg.level)
        gather_out = gather_out + (leg.size - 1) / leg.size / num_inner / rate
        exchange_out = exchange_out + (leg.size - 1) / leg.size / (num_inner * num_outer) / rate
    gather = _larger(gather_in, gather_out)
    exchange = _larger(exchange_in / num_outer, exchange_out)
    floor = sum(leg.hops * (leg.size > 1) * _hop_s(calibration, leg) for leg in legs)
    once = KindRate(gather, floor)
    return GroupRates(
        size=num_inner * num_outer,
        level=_binding(inner, outer, gather_in, gather_out),
        kinds={
            "all_gather": once,
            "reduce_scatter": once,
            "all_reduce": KindRate(2 * gather, 2 * floor),
            "all_to_all": KindRate(exchange, floor),
            "permute": KindRate(*_permute_terms(legs, calibration)),
        },
    )


def _inner_terms(legs: Sequence[Leg], size: Number, calibration: Calibration | None) -> tuple[Number, Number]:
    """Seconds per byte of an AllGather and an AllToAll over the innermost level alone."""
    if not legs:
        return 0.0, 0.0
    rates = [leg.bytes_per_s * _efficiency(calibration, leg.level) / leg.sharing for leg in legs]
    if legs[0].level == "nvlink":
        gather = (size - 1) / size / rates[0]
        return gather, gather / size
    width: Number = sum((1 + leg.wraps) * rate * (leg.size > 1) for leg, rate in zip(legs, rates, strict=True))
    closed: Number = sum(leg.wraps * (leg.size > 1) for leg in legs) > 0
    # a group of one has width 0 and moves nothing: its numerator is 0, and the divisor only must not be
    gather = (size - 1 + closed) * (size > 1) / size / (width + (size == 1))
    return gather, gather * (0.5 - 0.25 * closed)


def _permute_terms(legs: Sequence[Leg], calibration: Calibration | None) -> tuple[Number, Number]:
    """Every device sends to its neighbour in a ring over the group: the slowest link of the legs, one hop on it."""
    seconds: Number = 0.0
    floor: Number = 0.0
    for leg in legs:
        rate = leg.bytes_per_s * _efficiency(calibration, leg.level) / leg.sharing
        seconds = _larger(seconds, (leg.size > 1) / rate)
        floor = _larger(floor, (leg.size > 1) * leg.sharing * _hop_s(calibration, leg))
    return seconds, floor


def received_share(kind: CollectiveKind, size: Number) -> Number:
    """Bytes each device must receive, as a share of ``array_bytes``: how measured rates are counted."""
    once = (size - 1) / size
    if kind == "all_reduce":
        return 2 * once
    if kind == "all_to_all":
        return once / size
    return 1.0 * (size > 1) if kind == "permute" else once


def _host_rates(leg: Leg, calibration: Calibration | None) -> GroupRates:
    if calibration is None:
        raise InputError("devices of this machine have no data sheet. Measure them: give a calibration.")
    kinds = {}
    for kind in KINDS:
        if any(rate.kind == kind for rate in calibration.collectives):
            measured = collective_rate(calibration, kind, leg.size)
            kinds[str(kind)] = KindRate(received_share(kind, leg.size) / measured.bytes_per_s, 0.0, measured.latency_s)
    if not kinds:
        collective_rate(calibration, "all_gather", leg.size)
    return GroupRates(size=leg.size, level="host", kinds=kinds)


def stack_rates(rates: Sequence[GroupRates]) -> GroupRates:
    """Many groups as one whose figures are arrays: ``collective_time`` then prices all of them at once."""
    kinds = [kind for kind in KINDS if all(kind in one.kinds for one in rates)]
    return GroupRates(
        size=np.array([one.size for one in rates]),
        level=np.array([one.level for one in rates]),
        kinds={
            kind: KindRate(
                np.array([one.kinds[kind].seconds_per_byte for one in rates]),
                np.array([one.kinds[kind].floor_s for one in rates]),
                np.array([one.kinds[kind].setup_s for one in rates]),
            )
            for kind in kinds
        },
    )


def latency_bound_bytes(link_bytes_per_s: Number, *, hop_s: float = 1e-6, num_shards: Number = 1) -> Number:
    """Array bytes below which a hop takes longer to start than to send its shard: shards x link x hop.

    Source: How to Scale Your Model, sections 3.2 and 7.6.3.
    """
    return num_shards * link_bytes_per_s * hop_s


def ring_link_share(kind: CollectiveKind, size: Number, *, two_way: bool) -> Number:
    """Share of the array that crosses one link in one direction of a ring of ``size`` devices.

    One way, AllGather (n-1)/n and AllToAll half of it; both directions used, a half and a quarter of that.
    Exact on a one-way ring; for AllToAll over both directions the limit of a large ring.
    Source: How to Scale Your Model, exercise 3.10.
    """
    factors: Mapping[str, tuple[float, float]] = {
        "all_gather": (1.0, 0.5),
        "reduce_scatter": (1.0, 0.5),
        "all_reduce": (2.0, 1.0),
        "all_to_all": (0.5, 0.125),
    }
    return factors[kind][two_way] * (size - 1) / size


def _product(legs: Sequence[Leg]) -> Number:
    size: Number = 1
    for leg in legs:
        size = size * leg.size
    return size


def _efficiency(calibration: Calibration | None, level: Level) -> float:
    return 1.0 if calibration is None else float(getattr(calibration.efficiency, level))


def _hop_s(calibration: Calibration | None, leg: Leg) -> float:
    return leg.hop_s if calibration is None else calibration.hop_s.get(leg.level, leg.hop_s)


def _larger(first: Number, second: Number) -> Number:
    """The larger of two numbers or arrays, without a branch on them."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.maximum(first, second)
    return max(first, second)


def _binding(inner: Sequence[Leg], outer: Sequence[Leg], inside: Number, outside: Number) -> Any:
    names = inner[0].level if inner else "none", outer[0].level if outer else "none"
    chosen = np.where(outside > inside, names[1], names[0])
    return chosen if chosen.ndim else str(chosen)
