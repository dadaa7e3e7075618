"""Legs of collectives on a torus: large sums over a whole torus run in two turns, small ones along one axis after
another.

A reduce-scatter over a whole slice, and one of a small array over any part of it, is compiled as an all-reduce of the
whole array on TPUs, which sends twice the bytes. A large one over a part of the slice, and then one over the rest, stay
reduce-scatters, which send (n - 1)/n of the array in all: see `second_turn`. Gathers run along one axis after another
where TPUs would compile them as all-reduces too: of small arrays over a whole slice, and of all arrays over several
whole slices or where two mesh axes share physical axes. Other collectives use all axes at once."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from meshwright.algebra.derived import BlockSteps
from meshwright.algebra.steps import Step
from meshwright.spec.cluster_shapes import SLICES, TORUS_AXES
from meshwright.spec.strategy import Strategy

SMALL_BYTES = 2**25
"""Arrays of fewer bytes are gathered and scattered leg by leg. libtpu 0.0.51 compiles one gather over a whole v5e:8x8
or v5e:16x16 as an all-reduce up to 17 MB, and as a gather from 34 MB (2026-11-24); 0.0.42 one scatter over 8 x 8 x 8 of
v5p:16x16x16 as an all-reduce up to 10 MB, and as a scatter from 94 MB (2026-11-25). On v5p:4x4x4 all sizes are an
all-reduce if the group's order of chips interleaves a physical axis with others, else none. Over two whole slices of
v4p or v5p all sizes are (libtpu 0.0.42, 2026-11-25), of v5e, v6e and tpu7x none."""

_PLACED = re.compile(r"(?:(\d+) of )?(\S+) \((\d+)\)")


class PlacedPart(NamedTuple):
    """A factor of a mesh axis on one physical axis or level of switches."""

    link: str
    size: int

    @property
    def on_torus(self) -> bool:
        return self.link in TORUS_AXES


def parts_of(placement: Mapping[str, str], axis: str) -> tuple[PlacedPart, ...]:
    """Returns the parts of a mesh axis, major to minor; () for one chip.

    Slices and levels of switches come first, outermost first, then torus axes, the longest before shorter ones: sums
    cross the parts in this order without copies between. ``placement`` is a strategy's, such as ``{"fsdp": "8 of x (16)
    x y (8)"}``.
    """
    matches = _PLACED.findall(placement.get(axis, ""))
    parts = [PlacedPart(link, int(factor or size)) for factor, link, size in reversed(matches)]
    return tuple(sorted(parts, key=lambda part: -part.size if part.on_torus else -math.inf))


def mesh_order(
    mesh: Mapping[str, int], placement: Mapping[str, str], *, links: Sequence[str] = (*TORUS_AXES, SLICES)
) -> np.ndarray:
    """Returns the chip numbers that a placement assigns to the mesh, as an array of the mesh's shape.

    ``links`` are from the innermost out. Chips are numbered row-major over them, outermost first: slices, then z, y, x;
    or nodes, then the chips of a domain. On one link the mesh's minor axes are inside.
    """
    axis_parts = {axis: parts_of(placement, axis) for axis in mesh}
    placed_parts = [(a, part) for link in reversed(links) for a in mesh for part in axis_parts[a] if part.link == link]
    chip_numbers = np.arange(math.prod(mesh.values())).reshape([part.size for _, part in placed_parts])
    dim_order = [placed_parts.index((axis, part)) for axis in mesh for part in axis_parts[axis]]
    return chip_numbers.transpose(dim_order).reshape(tuple(mesh.values()))


class Legs(msgspec.Struct, frozen=True, dict=True):
    """The legs that a collective crosses one after another: physical axes, or all torus axes together.

    ``parts`` are the factors of its group, major to minor, and ``axes`` their mesh axes; ``order`` has for each leg, in
    the order in which a sum crosses the legs, the indices of its parts. Gathers cross them in reverse. ``at_once`` is
    the order of gathers, and of sums of large arrays, if it differs. ``fills_slices``: the group is several whole
    slices."""

    parts: tuple[int, ...]
    axes: tuple[str, ...]
    order: tuple[tuple[int, ...], ...]
    at_once: tuple[tuple[int, ...], ...] = ()
    fills_slices: bool = False

    def of(self, op: str, full_bytes: int) -> "Legs":
        """Returns the legs in the order for ``op`` on an array of ``full_bytes``: gathers, large sums ``at_once``."""
        if self.at_once and (op == "all_gather" or full_bytes >= SMALL_BYTES):
            return msgspec.structs.replace(self, order=self.at_once, at_once=())
        return self

    @property
    def places(self) -> tuple[int, ...]:
        """Indices of the group's parts, in the order of the legs."""
        return tuple(index for leg in self.order for index in leg)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each leg."""
        return tuple(math.prod(self.parts[index] for index in leg) for leg in self.order)

    @property
    def is_interleaved(self) -> bool:
        """True if the parts of some leg are not consecutive in the group."""
        return any(leg != tuple(range(leg[0], leg[-1] + 1)) for leg in self.order)

    @cached_property
    def groups(self) -> tuple[list[list[int]], ...]:
        """For each leg the groups of ranks along it; the ranks of a group run over its parts, major to minor."""
        ranks = np.arange(math.prod(self.parts)).reshape(self.parts)
        end_dims = [range(-len(leg), 0) for leg in self.order]
        moved_ranks = (np.moveaxis(ranks, leg, to_dims) for leg, to_dims in zip(self.order, end_dims, strict=True))
        return tuple(array.reshape(-1, size).tolist() for array, size in zip(moved_ranks, self.sizes, strict=True))


def second_turn(factors: Mapping[str, Sequence[int]], used: Collection[str]) -> tuple[str, int]:
    """Returns the torus axis, and the number of its chips, that a large scatter crosses after all other chips; ("", 1)
    if it crosses all at once.

    ``factors`` are a group's sizes on each torus axis, major to minor; ``used`` has the axes that other groups use.
    Over a slice of three axes, or over two of them and a part of the third, libtpu sums the whole array, and over a
    slice of two equal axes of at least 4 chips. So of three axes the shortest comes later, and of two the neighbours on
    one: 2 chips of an even number. libtpu 0.0.52 scatters in both turns on v4p, v5e, v5p, v6e and tpu7x, and at once
    over slices of 2x2 and of unequal axes of v5e and v6e (2026-11-28).
    """
    links = sorted(factors, key=lambda link: -math.prod(factors[link]))
    link_sizes = [math.prod(factors[link]) for link in links]
    if len(links) > 2 and len(factors.keys() - used) > 1:
        return links[2], link_sizes[2]
    if len(links) == 2 and not used and link_sizes[0] == link_sizes[1] > 2:
        minor_size = factors[links[1]][-1]
        return links[1], next(divisor for divisor in range(2, minor_size + 1) if minor_size % divisor == 0)
    return "", 1


def group_legs(strategy: Strategy, axes: tuple[str, ...], *, scatters: bool = False) -> Legs | None:
    """Returns the legs of a group of mesh axes; None if no part of it is on a torus, or the strategy's placement does
    not fit its mesh.

    Each torus axis is a leg, the longest first, and slices follow. If the group does not fill a slice, all torus axes
    can be crossed at once; a group that ``scatters`` crosses the chips of its `second_turn` in a leg after.
    """
    axis_parts = [(axis, part) for axis in axes for part in parts_of(strategy.placement, axis)]
    group_size = math.prod(strategy.mesh[axis] for axis in axes)
    if not any(part.on_torus for _, part in axis_parts) or math.prod(part.size for _, part in axis_parts) != group_size:
        return None
    outside_axes = {axis for axis in strategy.mesh if axis not in axes}
    used_links = {part.link for axis in outside_axes for part in parts_of(strategy.placement, axis) if part.on_torus}
    torus_links = dict.fromkeys(part.link for _, part in axis_parts if part.on_torus)
    sizes_by_link = {link: [part.size for _, part in axis_parts if part.link == link] for link in torus_links}
    last_link, num_last_chips = second_turn(sizes_by_link, used_links) if scatters else ("", 1)
    pieces: list[tuple[str, PlacedPart, str]] = []
    for axis, part in reversed(axis_parts):
        last_size = min(part.size, num_last_chips) if part.link == last_link else 1
        num_last_chips //= last_size
        turns = ((last_size, part.link), (part.size // last_size, "torus" if part.on_torus else part.link))
        pieces += [(axis, PlacedPart(part.link, num_chips), turn) for num_chips, turn in turns if num_chips > 1]
    axes_of_parts, parts, part_turns = zip(*reversed(pieces), strict=True)
    order_in_turn, order_at_once = _order(parts, [part.link for part in parts]), _order(parts, part_turns)
    return Legs(
        parts=tuple(part.size for part in parts),
        axes=axes_of_parts,
        order=order_in_turn,
        at_once=() if order_at_once == order_in_turn or not (used_links or scatters) else order_at_once,
        fills_slices=not used_links and not all(part.on_torus for part in parts),
    )


def _order(parts: Sequence[PlacedPart], leg_names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the indices of the parts of each leg, torus axes first and longer ones before shorter; parts of one name
    are one leg."""
    leg_by_key: dict[tuple[bool, str], tuple[int, ...]] = {}
    for index, (part, leg_name) in enumerate(zip(parts, leg_names, strict=True)):
        key = (not part.on_torus, leg_name)
        leg_by_key[key] = (*leg_by_key.get(key, ()), index)
    size_by_key = {key: math.prod(parts[index].size for index in leg) for key, leg in leg_by_key.items()}
    return tuple(leg_by_key[key] for key in sorted(leg_by_key, key=lambda key: (key[0], -size_by_key[key])))


def leg_by_leg(steps: Iterable[Step], strategy: Strategy) -> tuple[Step, ...]:
    """Returns the steps; every gather and reduce-scatter gets its `Legs` as details."""
    return tuple(
        msgspec.structs.replace(step, details=group_legs(strategy, step.axes, scatters=step.op == "reduce_scatter"))
        if step.op in ("all_gather", "reduce_scatter")
        else step
        for step in steps
    )


def blocks_leg_by_leg(blocks: Iterable[BlockSteps], strategy: Strategy) -> tuple[BlockSteps, ...]:
    """Returns the blocks; every gather and reduce-scatter in them gets its `Legs` as details."""
    return tuple(
        msgspec.structs.replace(
            block, forward=leg_by_leg(block.forward, strategy), backward=leg_by_leg(block.backward, strategy)
        )
        for block in blocks
    )


class CrossedLeg(NamedTuple):
    """One leg of a collective: its devices, its mesh axes, and the number of parts into which the legs before it in
    `Legs.order` have divided the array."""

    size: int
    axes: tuple[str, ...]
    divided: int


def crossed_legs(step: Step, full_bytes: int) -> tuple[CrossedLeg, ...]:
    """Returns the legs of a gather or reduce-scatter that crosses several one after another; () for every other step.

    ``full_bytes`` are the bytes of the step's whole array (`Step.full`).
    """
    if step.op not in ("all_gather", "reduce_scatter") or not isinstance(step.details, Legs):
        return ()
    legs = step.details.of(step.op, full_bytes)
    if len(legs.order) == 1:
        return ()
    is_in_turn = full_bytes < SMALL_BYTES or legs.is_interleaved or legs.fills_slices
    if step.op == "all_gather" and not is_in_turn:
        return ()
    leg_sizes = legs.sizes
    return tuple(
        CrossedLeg(leg_size, tuple(dict.fromkeys(legs.axes[i] for i in leg)), math.prod(leg_sizes[:index]))
        for index, (leg_size, leg) in enumerate(zip(leg_sizes, legs.order, strict=True))
    )
