"""Sums over several torus axes run along one physical axis after the other, the longest first.

One reduce-scatter over a whole two-dimensional slice is compiled as an all-reduce of the whole array on TPUs, which
sends twice the bytes; one for each physical axis stays a reduce-scatter, and sends (n - 1)/n of the array in all. So
are gathers of small arrays; large ones stay gathers and use all axes at once.
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

SMALL_GATHER_BYTES = 2**25
"""Arrays of fewer bytes are gathered leg by leg. libtpu 0.0.51 compiles one gather over a whole v5e:8x8 or v5e:16x16 as
an all-reduce up to 17 MB, and as a gather from 34 MB (2026-11-24)."""


class Legs(msgspec.Struct, frozen=True, dict=True):
    """The physical axes that a collective crosses; a leg is the group's part on one of them.

    ``parts`` are the factors of its group, major to minor; ``order`` has for each leg, in the order in which a sum
    crosses them, the indices of its parts. Gathers cross them in reverse.
    """

    parts: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Indices of the parts, leg by leg."""
        return tuple(index for leg in self.order for index in leg)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each leg."""
        return tuple(math.prod(self.parts[index] for index in leg) for leg in self.order)

    @cached_property
    def groups(self) -> tuple[list[list[int]], ...]:
        """For each leg the groups of ranks along it; the ranks of a group run over its parts, major to minor."""
        ranks = np.arange(math.prod(self.parts)).reshape(self.parts)
        ends = [range(-len(leg), 0) for leg in self.order]
        moved = (np.moveaxis(ranks, leg, end) for leg, end in zip(self.order, ends, strict=True))
        return tuple(one.reshape(-1, size).tolist() for one, size in zip(moved, self.sizes, strict=True))


def group_legs(strategy: Strategy, axes: tuple[str, ...]) -> Legs | None:
    """Returns the legs of a group of mesh axes: torus axes longest first, then slices.

    None if no part of the group is on a torus, or the strategy's placement is not of its mesh.
    """
    parts = [part for axis in axes for part in parts_of(strategy.placement, axis)]
    whole = math.prod(strategy.mesh[axis] for axis in axes)
    if not any(part.on_torus for part in parts) or math.prod(part.size for part in parts) != whole:
        return None
    links = dict.fromkeys(part.link for part in parts)
    order = {link: tuple(i for i, part in enumerate(parts) if part.link == link) for link in links}
    lengths = {link: math.prod(parts[index].size for index in order[link]) for link in links}
    ranked = sorted(order, key=lambda link: (link not in TORUS_AXES, -lengths[link]))
    return Legs(tuple(part.size for part in parts), tuple(order[link] for link in ranked))


def leg_by_leg(steps: Iterable[Step], strategy: Strategy) -> tuple[Step, ...]:
    """Returns steps whose gathers and reduce-scatters have their `Legs` as details."""
    return tuple(
        msgspec.structs.replace(step, details=group_legs(strategy, step.axes))
        if step.op in ("all_gather", "reduce_scatter")
        else step
        for step in steps
    )


def block_leg_by_leg(block: BlockSteps, strategy: Strategy) -> BlockSteps:
    """Returns the steps of a block after `leg_by_leg`."""
    forward, backward = (leg_by_leg(steps, strategy) for steps in (block.forward, block.backward))
    return msgspec.structs.replace(block, forward=forward, backward=backward)


def crossed_legs(step: Step, full_bytes: int) -> tuple[tuple[int, int], ...]:
    """Returns for each leg of a collective that runs leg by leg its size, and the parts into which longer legs have
    divided the array; () for every other step. ``full_bytes`` are those of the step's whole array."""
    gathers = step.op == "all_gather" and full_bytes < SMALL_GATHER_BYTES
    sizes = step.details.sizes if isinstance(step.details, Legs) and (gathers or step.op == "reduce_scatter") else ()
    return tuple((size, math.prod(sizes[:index])) for index, size in enumerate(sizes))
