"""Reduce-scatters over several torus axes run along one physical axis after the other, the longest first.

One scatter over a whole two-dimensional slice is compiled as an all-reduce of the whole array on TPUs, which sends
twice the bytes; one for each physical axis stays a reduce-scatter and sends (n - 1)/n of the array in all.
"""

import math
from collections.abc import Iterable
from functools import cached_property

import msgspec
import numpy as np

from meshwright.algebra.derived import BlockSteps
from meshwright.algebra.steps import Step
from meshwright.spec.placed import TORUS_AXES, parts_of
from meshwright.spec.strategy import Strategy


class Legs(msgspec.Struct, frozen=True, dict=True):
    """The physical axes that a reduce-scatter crosses.

    ``parts`` are the factors of its group, major to minor; ``order`` has for each physical axis, in the order in which
    they are crossed, the indices of its parts. A leg is the group's part on one physical axis.
    """

    parts: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each leg, in the order in which they are crossed."""
        return tuple(math.prod(self.parts[index] for index in leg) for leg in self.order)

    @cached_property
    def groups(self) -> tuple[list[list[int]], ...]:
        """For each leg the groups of ranks along it; the ranks of a group run over its parts, major to minor."""
        ranks = np.arange(math.prod(self.parts)).reshape(self.parts)
        ends = [range(-len(leg), 0) for leg in self.order]
        moved = (np.moveaxis(ranks, leg, end) for leg, end in zip(self.order, ends, strict=True))
        return tuple(one.reshape(-1, size).tolist() for one, size in zip(moved, self.sizes, strict=True))


def leg_by_leg(steps: Iterable[Step], strategy: Strategy) -> tuple[Step, ...]:
    """Returns steps whose reduce-scatters have `Legs` as details where the strategy is placed on a torus."""
    return tuple(
        msgspec.structs.replace(step, details=scatter_legs(strategy, step.axes))
        if step.op == "reduce_scatter"
        else step
        for step in steps
    )


def scatter_legs(strategy: Strategy, axes: tuple[str, ...]) -> Legs | None:
    """Returns the legs of a group of mesh axes: torus axes longest first, then slices.

    None if no part of the group is on a torus, or the strategy has no placement of the group.
    """
    parts = [part for axis in axes for part in parts_of(strategy.placement, axis)]
    whole = math.prod(strategy.mesh[axis] for axis in axes)
    if not any(part.on_torus for part in parts) or math.prod(part.size for part in parts) != whole:
        return None
    links = dict.fromkeys(part.link for part in parts)
    order = {link: tuple(i for i, part in enumerate(parts) if part.link == link) for link in links}
    found = Legs(tuple(part.size for part in parts), tuple(order.values()))
    lengths = dict(zip(order, found.sizes, strict=True))
    ranked = sorted(order, key=lambda link: (link not in TORUS_AXES, -lengths[link]))
    return msgspec.structs.replace(found, order=tuple(order[link] for link in ranked))


def block_leg_by_leg(block: BlockSteps, strategy: Strategy) -> BlockSteps:
    """Returns the steps of a block after `leg_by_leg`."""
    forward, backward = (leg_by_leg(steps, strategy) for steps in (block.forward, block.backward))
    return msgspec.structs.replace(block, forward=forward, backward=backward)


def crossed_legs(step: Step) -> tuple[tuple[int, int], ...]:
    """Returns for each leg of a reduce-scatter its size, and by how much the legs before it have divided the array; ()
    for every other step."""
    sizes = step.details.sizes if isinstance(step.details, Legs) else ()
    return tuple((size, math.prod(sizes[:index])) for index, size in enumerate(sizes))
