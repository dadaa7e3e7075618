"""The legs of a group: its part on each physical axis, and how far its furthest shard travels there."""

import functools
from collections.abc import Iterable, Sequence

import msgspec

from meshwright.algebra.rewrites.torus import second_turn
from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError, nearest
from meshwright.cost.network.links import Level, Link
from meshwright.cost.network.placement import Placement, physical_placement
from meshwright.spec.cluster import Cluster

TWIST_GAIN = {"k x k x 2k": 1.63, "k x 2k x 2k": 1.31}
"""AllToAll throughput of a whole twisted torus divided by that of the plain torus of its shape, as measured on TPU v4
in slices of 4x4x8 and 4x8x8. Source: Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer" (2023)."""


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a group on one physical axis.

    ``bytes_per_s`` is one way and per chip; ``sharing`` is the number of interleaved groups on the same links; ``hops``
    are the links that the furthest shard crosses; ``twist_gain`` is the factor by which a twisted torus that the group
    fills speeds up its AllToAll. ``later`` is the factor of ``size`` that a ReduceScatter crosses in a second turn,
    after all other chips (`algebra.rewrites.torus.second_turn`): the whole leg, or neighbours on it.
    """

    level: Level
    size: Number
    bytes_per_s: Number
    wraps: Number = False
    sharing: Number = 1
    hops: Number = 1
    hop_s: float = 1e-6
    twist_gain: float = 1.0
    later: Number = 1


def switched(link: Link, size: int) -> Leg:
    """Returns a leg on one level of switches: every chip has its own port, so that groups do not share links.

    Inside a domain any chip is one hop away; across the network a tree forwards a shard (`tree_hops`).
    """
    hops = 1 if link.level in ("nvlink", "host") else tree_hops(size)
    return Leg(level=link.level, size=size, bytes_per_s=link.bytes_per_s, hops=hops, hop_s=link.hop_s)


def ring_hops(size: Number) -> Number:
    """Returns the serial hops when each member sends to the next: n - 1. An AllReduce takes twice as many."""
    return size - 1


def tree_hops(size: int) -> int:
    """Returns the serial hops when each round doubles the members reached: log2 n, rounded up.

    Never more than ``ring_hops``. Libraries choose between the two by size: a ring sends (n-1)/n of the array, a tree
    all of it. A price from the latency of a tree and the bandwidth of a ring is too low by n/(n-1) at most.
    Source: Sanders, Speck and Traeff, "Two-tree algorithms" (2009), which NCCL's trees follow.
    """
    return (size - 1).bit_length()


def group_legs(placement: Placement, axes: Iterable[str]) -> tuple[Leg, ...]:
    """Returns the legs of a group of mesh axes, one for each physical axis that it uses (`legs_of_links`)."""
    return tuple(leg for leg in legs_of_links(placement, axes) if leg is not None)


def legs_of_links(placement: Placement, axes: Iterable[str]) -> tuple[Leg | None, ...]:
    """Returns the leg of a group of mesh axes on each physical axis, its factors there merged; None if it has none.

    A leg that includes the outermost factor spans the physical axis, so it wraps if the axis wraps. Factors inside it
    that are not in the group are other groups on the same links (``sharing``). Raises InputError for an unknown axis.
    """
    group = frozenset(axes)
    unknown_axes = group.difference(placement.mesh)
    if unknown_axes:
        unknown_axis = min(unknown_axes)
        raise InputError(f"{unknown_axis!r} is not an axis of the mesh.{nearest(unknown_axis, placement.mesh)}")
    closes, gain = _twist(placement.links, group)
    link, later = _later(placement.links, group)
    return tuple(_merged_leg(axis, group, closes, gain, later if axis.name == link else 1) for axis in placement.links)


def turns_text(placement: Placement, axes: Iterable[str]) -> str:
    """Returns in words how a ReduceScatter over a group of mesh axes is split in two, and why; "" if it is not."""
    axis_name, num_chips = _later(placement.links, frozenset(axes))
    if num_chips == 1:
        return ""
    is_whole_axis = any(link.name == axis_name and link.size == num_chips for link in placement.links)
    last_text = f"{axis_name} last" if is_whole_axis else f"{num_chips} neighbours on {axis_name} last"
    return f"reduce_scatter in two steps, {last_text}: libtpu makes one over all axes an all_reduce"


def slice_turns_text(cluster: Cluster) -> str:
    """Returns `turns_text` for all chips of a cluster: "" if a ReduceScatter over them is one collective."""
    placement = physical_placement(cluster)
    return turns_text(placement, placement.mesh)


def _later(links: Sequence[Link], group: frozenset[str]) -> tuple[str, int]:
    """Returns the second turn of a group's ReduceScatter: a torus axis and how many of its chips; else ("", 1)."""
    ici_links = [link for link in reversed(links) if link.level == "ici" and not link.sums_at_once]
    link_sizes = ((link.name, [size for axis, size in link.parts if axis in group and size > 1]) for link in ici_links)
    sizes_by_link = {name: sizes for name, sizes in link_sizes if sizes}
    if len(sizes_by_link) < 2:
        return "", 1
    shared_names = {link.name for link in ici_links if any(axis not in group and size > 1 for axis, size in link.parts)}
    return second_turn(sizes_by_link, shared_names)


def _twist(links: Sequence[Link], group: frozenset[str]) -> tuple[bool, float]:
    """Returns whether twisted axes close into rings in this group, and the speed-up of its AllToAll by the twist.

    A twisted axis wraps around to the middle of the longer axes, so the group must contain these whole.
    """
    if not any(link.twisted for link in links):
        return True, 1.0
    torus_links = [link for link in links if link.level == "ici"]
    whole_names = {link.name for link in torus_links if all(axis in group for axis, _ in link.parts)}
    if not all(link.name in whole_names for link in torus_links if not link.twisted):
        return False, 1.0
    num_short = sum(link.twisted for link in torus_links)
    twist_gain = TWIST_GAIN["k x k x 2k" if num_short == 2 else "k x 2k x 2k"]
    return True, twist_gain if len(whole_names) == len(torus_links) else 1.0


@functools.lru_cache(maxsize=1 << 14)
def _merged_leg(link: Link, group: frozenset[str], closes_rings: bool, twist_gain: float, later: int) -> Leg | None:
    leg_size = stride = num_groups = sharing = 1
    hops, is_in_group = 0, False
    for axis, factor in reversed(link.parts):
        is_in_group = axis in group
        if is_in_group:
            leg_size *= factor
            hops += (factor - 1) * stride
            sharing = num_groups
        else:
            num_groups *= factor
        stride *= factor
    if leg_size == 1:
        return None
    if link.level != "ici":
        return switched(link, leg_size)
    wraps = link.wraps and is_in_group and (closes_rings or not link.twisted)
    return Leg(
        level="ici",
        size=leg_size,
        bytes_per_s=link.bytes_per_s,
        wraps=wraps,
        sharing=sharing,
        hops=stride / 2 if wraps else hops,
        hop_s=link.hop_s,
        twist_gain=twist_gain,
        later=later,
    )
