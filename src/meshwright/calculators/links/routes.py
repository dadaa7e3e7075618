"""Routes from one memory of a cluster to another, as legs: chip to chip, host memory to chip, all chips to one.

Between two chips the array is split over paths that share no link, as many as give the shortest time. Source: How to
Scale Your Model, exercises 2.5 and 2.6.
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
from meshwright.core.units import counted, plural
from meshwright.cost.network.links import Link, physical_links
from meshwright.spec.cluster import Cluster
from meshwright.spec.cluster_shapes import times

Via = Literal["ici", "dcn"]
Coordinates = tuple[int, ...]

_PLACE = re.compile(r"(host:)?(?:(\d+):)?(\d+(?:,\d+)*)")
_EXAMPLES = "3,3 (a chip), 1:0,0 (in slice 1), host:0,0 (host memory beside a chip), chips or hosts (evenly over all)"


class RouteEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A source or target: memory of one chip or of its host, or of all chips or hosts if ``everywhere``."""

    in_host: bool
    everywhere: bool = False
    slice_number: int = 0
    chip: tuple[int, ...] = ()


def parse_place(text: str, cluster: Cluster) -> RouteEnd:
    """Reads a source or target: ``"3,3"``, ``"1:0,0"``, ``"host:0,0"``, ``"chips"`` or ``"hosts"`` of the cluster.

    Coordinates are in the order of the cluster's sizes; a single number is the index of a chip, the first size fastest.
    Raises InputError for other texts, and for chips that the cluster does not have.
    """
    if text in ("chips", "hosts"):
        return RouteEnd(in_host=text == "hosts", everywhere=True)
    place_match = _PLACE.fullmatch(text.replace(" ", ""))
    if place_match is None:
        raise InputError(f"place {text!r} is not understood. Write {_EXAMPLES}.")
    host_prefix, slice_text, indices_text = place_match.groups()
    shape, coords, slice_number = cluster.shape, tuple(map(int, indices_text.split(","))), int(slice_text or 0)
    if len(coords) == 1 and coords[0] < math.prod(shape):
        coords = tuple(map(int, np.unravel_index(coords[0], shape, order="F")))
    coords += (0,) * (len(shape) - len(coords))
    is_outside = len(coords) != len(shape) or any(coord >= size for coord, size in zip(coords, shape, strict=True))
    if is_outside or slice_number >= cluster.num_slices:
        raise InputError(
            f"place {text!r} is not on {cluster.short_name}: coordinates count from 0 below {times(shape)}."
        )
    return RouteEnd(in_host=host_prefix is not None, slice_number=slice_number, chip=coords)


def route(
    cluster: Cluster, source: RouteEnd, target: RouteEnd, num_bytes: float, *, via: Via = "ici"
) -> list[TransferLeg]:
    """Returns the legs that move an array from source to target; [] if both are equal.

    ``via`` says how parts from other hosts get to the target's host: over chip links, or between the hosts. Raises
    InputError for a cluster without a data sheet, and for a transfer from one end to all.
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
    uses_hosts = source.slice_number != target.slice_number
    if source.everywhere and source.in_host and via == "dcn" and not target.everywhere:
        num_hosts, name = cluster.num_hosts, "parts of other hosts into one"
        legs = [channel_leg(cluster.chip, "dcn", num_bytes * (num_hosts - 1) / num_hosts, hops=1, name=name)]
        uses_hosts = True
    elif uses_hosts:
        legs = [channel_leg(cluster.chip, "dcn", num_bytes, hops=1, name="host to host between slices")]
    elif source.everywhere and not target.everywhere:
        legs = _gather_to_chip(cluster, target.chip, num_bytes)
    elif source.chip != target.chip:
        legs = [_chip_to_chip(cluster, source.chip, target.chip, num_bytes)]
    # PCIe lies between a host's memory and chip links, or between a chip and the network
    if source.in_host != uses_hosts or target.everywhere:
        legs.insert(0, _pcie(cluster, source, num_bytes, into_host=not source.in_host))
    if target.in_host != uses_hosts and not target.everywhere:
        legs.append(_pcie(cluster, target, num_bytes, into_host=target.in_host))
    return legs


def _pcie(cluster: Cluster, end: RouteEnd, num_bytes: float, *, into_host: bool) -> TransferLeg:
    """Returns the PCIe leg at one end of the route: of one chip, or of all of them at once."""
    name, num_lanes = "chip to its host's memory" if into_host else "host memory to its chip", 1
    if end.everywhere:
        name, num_lanes = f"PCIe of all {cluster.num_chips} chips", cluster.num_chips
    return channel_leg(cluster.chip, "pcie", num_bytes, lanes=num_lanes, name=name)


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
        link, hop_choices = links[0], disjoint_paths(cluster, source, target)
        # shares arrive together, when the longest path of those that are used delivers
        path_hops = min(hop_choices, key=lambda hops: max(hops) * link.hop_s + num_bytes / len(hops) / link.bytes_per_s)
        lengths_text = " and ".join(f"{n}" for n in sorted(set(path_hops)))
        name = f"{counted(len(path_hops), 'path')}, {lengths_text} {plural('hop', max(path_hops))}"
        return _link_leg(link, num_bytes, lanes=len(path_hops), hops=max(path_hops), name=name)
    used_links = [link for link, a, b in zip(links, source, target, strict=False) if a != b]
    crossed_links = [link for link in used_links if link.level == used_links[-1].level]
    slowest_link = min(crossed_links, key=lambda link: link.bytes_per_s)
    return _link_leg(slowest_link, num_bytes, hops=len(crossed_links), name=f"through {used_links[-1].name}")


def _gather_to_chip(cluster: Cluster, target: tuple[int, ...], num_bytes: float) -> list[TransferLeg]:
    """Returns the legs that bring the parts of all other chips into one chip, whose links are the bottleneck."""
    n_chips, links = cluster.num_chips, physical_links(cluster)
    if n_chips == 1:
        return []
    if cluster.kind == "torus":
        num_lanes = sum(neighbour != target for neighbour in neighbours(cluster, target))
        hops = max(torus_hops(cluster, target).values())
        name = f"{n_chips - 1} chips into one over its {num_lanes} links"
        return [_link_leg(links[0], num_bytes * (n_chips - 1) / n_chips, lanes=num_lanes, hops=hops, name=name)]
    domain = cluster.shape[0]
    parts = ((links[0], domain - 1, "its domain into one chip"), (links[1], n_chips - domain, "the rest into one chip"))
    return [_link_leg(link, num_bytes * num_from / n_chips, name=name) for link, num_from, name in parts if num_from]


# -- on a torus -----------------------------------------------------------------------------------------


def disjoint_paths(cluster: Cluster, source: Coordinates, target: Coordinates) -> list[tuple[int, ...]]:
    """Returns the hops of each path: first with one path, then with two that share no link, and so on, fewest hops in
    total.

    Each path is the shortest over free links; it may free a link that an earlier path uses in the opposite direction
    (successive shortest paths of the cheapest flow).
    """
    used_hops: set[tuple[Coordinates, Coordinates]] = set()
    hop_choices: list[tuple[int, ...]] = []
    while target in (previous_of := _shortest_paths(cluster, source, used_hops)[1]):
        path = [target]
        while path[-1] != source:
            path.append(previous_of[path[-1]])
        for chip_before, chip_after in itertools.pairwise(path):
            if (chip_before, chip_after) in used_hops:
                used_hops.remove((chip_before, chip_after))
            else:
                used_hops.add((chip_after, chip_before))
        next_chips_of: dict[Coordinates, list[Coordinates]] = {}
        for chip_after, chip_before in used_hops:
            next_chips_of.setdefault(chip_after, []).append(chip_before)
        hops_of_paths = []
        for chip in next_chips_of[source]:
            num_hops = 1
            while chip != target:
                chip, num_hops = next_chips_of[chip].pop(), num_hops + 1
            hops_of_paths.append(num_hops)
        hop_choices.append(tuple(sorted(hops_of_paths)))
    return hop_choices


def torus_hops(cluster: Cluster, source: Coordinates) -> dict[Coordinates, int]:
    """Returns the links on a shortest path from a chip to each of a torus."""
    return _shortest_paths(cluster, source, set())[0]


def _shortest_paths(
    cluster: Cluster, source: Coordinates, used_hops: set[tuple[Coordinates, Coordinates]]
) -> tuple[dict[Coordinates, int], dict[Coordinates, Coordinates]]:
    """Returns the fewest hops to each chip over free links, and the previous chip on that path. Using a link of
    ``used_hops`` in the opposite direction frees it and saves a hop."""
    hops_to, previous_of, queue = {source: 0}, dict[Coordinates, Coordinates](), deque([source])
    while queue:
        chip = queue.popleft()
        for neighbour in neighbours(cluster, chip):
            new_hops = hops_to[chip] + (-1 if (neighbour, chip) in used_hops else 1)
            if (chip, neighbour) not in used_hops and new_hops < hops_to.get(neighbour, new_hops + 1):
                hops_to[neighbour], previous_of[neighbour] = new_hops, chip
                queue.append(neighbour)
    return hops_to, previous_of


def neighbours(cluster: Cluster, chip: Coordinates) -> Iterator[Coordinates]:
    """Yields the neighbours of a chip; a twisted axis leads around to the middle of the longer ones."""
    shape, max_len, twist = cluster.shape, max(cluster.shape), min(cluster.shape)
    for axis, direction in itertools.product(range(len(shape)), (1, -1)):
        place, coordinate = list(chip), chip[axis] + direction
        place[axis] = coordinate % shape[axis]
        if coordinate != place[axis]:
            if not cluster.wraps[axis]:
                continue
            if cluster.twisted and shape[axis] < max_len:
                place = [(n + twist) % max_len if size == max_len else n for n, size in zip(place, shape, strict=True)]
        yield tuple(place)
