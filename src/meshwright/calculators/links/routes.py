"""Routes from one memory of a cluster to another, as legs: chip to chip, host memory to chip, all to one.

A route uses the paths between two chips that share no link, as many as make the array arrive first.
Source: How to Scale Your Model, exercises 2.5 and 2.6.
"""

import itertools
import math
import re
from collections import deque
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from meshwright.calculators.links.transfer import TransferLeg, channel_leg
from meshwright.core.errors import InputError
from meshwright.cost.network.links import Link, physical_links
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_shapes import times

Via = Literal["ici", "dcn"]
Coordinates = tuple[int, ...]

_PLACE = re.compile(r"(host:)?(?:(\d+):)?(\d+(?:,\d+)*)")
_EXAMPLES = "3,3 (a chip), 1:0,0 (in slice 1), host:0,0 (host memory beside a chip), chips or hosts (evenly over all)"


class RouteEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one chip or of the host beside it, or of all of these if the bytes are ``everywhere``."""

    in_host: bool
    everywhere: bool = False
    slice_number: int = 0
    chip: tuple[int, ...] = ()


def parse_place(text: str, cluster: Cluster) -> RouteEnd:
    """Returns the place of ``"3,3"``, ``"1:0,0"``, ``"host:0,0"``, ``"chips"`` or ``"hosts"`` on the cluster.

    Coordinates are in the order of the cluster's sizes; one number alone counts chips with the first size inside.
    """
    if text in ("chips", "hosts"):
        return RouteEnd(in_host=text == "hosts", everywhere=True)
    match = _PLACE.fullmatch(text.replace(" ", ""))
    if match is None:
        raise InputError(f"place {text!r} is not understood. Write {_EXAMPLES}.")
    host, slice_text, numbers = match.groups()
    shape, chip, slice_number = cluster.shape, tuple(map(int, numbers.split(","))), int(slice_text or 0)
    if len(chip) == 1 and chip[0] < math.prod(shape):
        chip = tuple(map(int, np.unravel_index(chip[0], shape, order="F")))
    chip += (0,) * (len(shape) - len(chip))
    outside = len(chip) != len(shape) or any(coordinate >= size for coordinate, size in zip(chip, shape, strict=True))
    if outside or slice_number >= cluster.num_slices:
        raise InputError(
            f"place {text!r} is not on {cluster.short_name}: coordinates count from 0 below {times(shape)}."
        )
    return RouteEnd(in_host=host is not None, slice_number=slice_number, chip=chip)


def route(
    cluster: Cluster, source: RouteEnd, target: RouteEnd, num_bytes: float, *, via: Via = "ici"
) -> list[TransferLeg]:
    """Returns the legs of an array from one place to another; none when it is there already.

    ``via`` is how parts on other hosts reach the target's host: over chip links, or between the hosts.
    """
    if source == target:
        return []
    if cluster.kind == "host":
        raise InputError(f"devices of {cluster.short_name} have no data sheet: use --axis devices, which is measured.")
    if (source.everywhere or target.everywhere) and cluster.num_slices > 1:
        raise InputError(f"{cluster.short_name}: chips and hosts are those of one slice. Name one slice's cluster.")
    if target.everywhere and not source.everywhere:
        raise InputError("from one place to all is a scatter or a broadcast. Use --axis and --collective, or a --leg.")
    legs: list[TransferLeg] = []
    through_hosts = source.slice_number != target.slice_number
    if source.everywhere and source.in_host and via == "dcn" and not target.everywhere:
        hosts, name = cluster.num_hosts, "parts of other hosts into one"
        legs = [channel_leg(cluster.chip, "dcn", num_bytes * (hosts - 1) / hosts, hops=1, name=name)]
        through_hosts = True
    elif through_hosts:
        legs = [channel_leg(cluster.chip, "dcn", num_bytes, hops=1, name="host to host between slices")]
    elif source.everywhere and not target.everywhere:
        legs = _gather_to_chip(cluster, target.chip, num_bytes)
    elif source.chip != target.chip:
        legs = [_chip_to_chip(cluster, source.chip, target.chip, num_bytes)]
    # PCIe lies between a host's memory and chip links, or between a chip and the network
    if source.in_host != through_hosts or target.everywhere:
        legs.insert(0, _pcie(cluster, source, num_bytes, into_host=not source.in_host))
    if target.in_host != through_hosts and not target.everywhere:
        legs.append(_pcie(cluster, target, num_bytes, into_host=target.in_host))
    return legs


def _pcie(cluster: Cluster, end: RouteEnd, num_bytes: float, *, into_host: bool) -> TransferLeg:
    """Returns the PCIe leg at one end of the route: of one chip, or of all of them at once."""
    name, lanes = "chip to its host's memory" if into_host else "host memory to its chip", 1
    if end.everywhere:
        name, lanes = f"PCIe of all {cluster.num_chips} chips", cluster.num_chips
    return channel_leg(cluster.chip, "pcie", num_bytes, lanes=lanes, name=name)


def _link_leg(link: Link, num_bytes: float, *, lanes: int = 1, hops: int = 1, name: str) -> TransferLeg:
    return TransferLeg(
        name=name,
        channel=link.level,
        amount=num_bytes,
        rate=link.bytes_per_s,
        lanes=lanes,
        hops=hops,
        latency_s=hops * link.hop_s,
    )


def _chip_to_chip(cluster: Cluster, source: tuple[int, ...], target: tuple[int, ...], num_bytes: float) -> TransferLeg:
    links = physical_links(cluster)
    if cluster.kind == "torus":
        link, ways = links[0], disjoint_paths(cluster, source, target)
        # shares arrive together, when the longest path of those that are used delivers
        hops = min(ways, key=lambda paths: max(paths) * link.hop_s + num_bytes / len(paths) / link.bytes_per_s)
        lengths = " and ".join(f"{n}" for n in sorted(set(hops)))
        name = f"{len(hops)} path{'s' * (len(hops) > 1)}, {lengths} hop{'s' * (max(hops) > 1)}"
        return _link_leg(link, num_bytes, lanes=len(hops), hops=max(hops), name=name)
    used = [link for link, a, b in zip(links, source, target, strict=False) if a != b]
    crossed = [link for link in used if link.level == used[-1].level]
    slowest = min(crossed, key=lambda link: link.bytes_per_s)
    return _link_leg(slowest, num_bytes, hops=len(crossed), name=f"through {used[-1].name}")


def _gather_to_chip(cluster: Cluster, target: tuple[int, ...], num_bytes: float) -> list[TransferLeg]:
    """Returns the legs of all other chips' parts into one chip, whose own links are taken as the bottleneck."""
    chips, links = cluster.num_chips, physical_links(cluster)
    if chips == 1:
        return []
    if cluster.kind == "torus":
        lanes = sum(there != target for there in neighbours(cluster, target))
        hops = max(torus_hops(cluster, target).values())
        name = f"{chips - 1} chips into one over its {lanes} links"
        return [_link_leg(links[0], num_bytes * (chips - 1) / chips, lanes=lanes, hops=hops, name=name)]
    domain = cluster.shape[0]
    parts = ((links[0], domain - 1, "its domain into one chip"), (links[1], chips - domain, "the rest into one chip"))
    return [_link_leg(link, num_bytes * count / chips, name=name) for link, count, name in parts if count]


# -- on a torus -----------------------------------------------------------------------------------------


def disjoint_paths(cluster: Cluster, source: Coordinates, target: Coordinates) -> list[tuple[int, ...]]:
    """Returns the hops of each path for one path, for two that share no link, and so on, with the fewest hops in all.

    Each is found as the shortest path over links that are free; an earlier path gives back a link, and its hop, where
    the new one would pass it the other way (successive shortest paths of the cheapest flow).
    """
    used: set[tuple[Coordinates, Coordinates]] = set()
    path_hops: list[tuple[int, ...]] = []
    while target in (came := _shortest_paths(cluster, source, used)[1]):
        path = [target]
        while path[-1] != source:
            path.append(came[path[-1]])
        for there, here in itertools.pairwise(path):
            if (there, here) in used:
                used.remove((there, here))
            else:
                used.add((here, there))
        onward: dict[Coordinates, list[Coordinates]] = {}
        for here, there in used:
            onward.setdefault(here, []).append(there)
        hops = []
        for chip in onward[source]:
            count = 1
            while chip != target:
                chip, count = onward[chip].pop(), count + 1
            hops.append(count)
        path_hops.append(tuple(sorted(hops)))
    return path_hops


def torus_hops(cluster: Cluster, source: Coordinates) -> dict[Coordinates, int]:
    """Returns the links on a shortest path from a chip to each of a torus."""
    return _shortest_paths(cluster, source, set())[0]


def _shortest_paths(
    cluster: Cluster, source: Coordinates, used: set[tuple[Coordinates, Coordinates]]
) -> tuple[dict[Coordinates, int], dict[Coordinates, Coordinates]]:
    """Returns the fewest hops to each chip over links that are free, and the chip before it on the way there.

    To pass a ``used`` link the other way gives it back, and its hop.
    """
    length, came, waiting = {source: 0}, dict[Coordinates, Coordinates](), deque([source])
    while waiting:
        here = waiting.popleft()
        for there in neighbours(cluster, here):
            step = length[here] + (-1 if (there, here) in used else 1)
            if (here, there) not in used and step < length.get(there, step + 1):
                length[there], came[there] = step, here
                waiting.append(there)
    return length, came


def neighbours(cluster: Cluster, chip: Coordinates) -> Iterator[Coordinates]:
    """Yields the neighbours of a chip; a twisted axis leads around to the middle of the longer ones."""
    shape, longest, shift = cluster.shape, max(cluster.shape), min(cluster.shape)
    for axis, step in itertools.product(range(len(shape)), (1, -1)):
        there, coordinate = list(chip), chip[axis] + step
        there[axis] = coordinate % shape[axis]
        if coordinate != there[axis]:
            if not cluster.wraps[axis]:
                continue
            if cluster.twisted and shape[axis] < longest:
                there = [(n + shift) % longest if size == longest else n for n, size in zip(there, shape, strict=True)]
        yield tuple(there)
