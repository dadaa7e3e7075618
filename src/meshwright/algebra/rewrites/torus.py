"""Sums over a whole torus run along one physical axis after the other, the longest first.

A reduce-scatter over a whole slice is compiled as an all-reduce of the whole array on TPUs, which sends twice the
bytes; one for each physical axis stays a reduce-scatter, and sends (n - 1)/n of the array in all. So are gathers of
small arrays. Over parts of a slice both stay what they are, and use all axes at once.
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
    """The legs that a collective crosses one after the other: physical axes, or all torus axes together.

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
    """Returns the legs of a group of mesh axes; None if no part of it is on a torus, or the strategy's placement is not
    of its mesh.

    Each torus axis is a leg, the longest first, if the group fills a slice; else all of them are one. Slices follow.
    """
    parts = [part for axis in axes for part in parts_of(strategy.placement, axis)]
    whole = math.prod(strategy.mesh[axis] for axis in axes)
    if not any(part.on_torus for part in parts) or math.prod(part.size for part in parts) != whole:
        return None
    outside = {axis for axis in strategy.mesh if axis not in axes}
    fills = not any(part.on_torus for axis in outside for part in parts_of(strategy.placement, axis))
    legs: dict[str, tuple[int, ...]] = {}
    for index, part in enumerate(parts):
        name = part.link if fills or not part.on_torus else TORUS_AXES
        legs[name] = (*legs.get(name, ()), index)
    sizes = {name: math.prod(parts[index].size for index in leg) for name, leg in legs.items()}
    order = sorted(legs, key=lambda name: (name not in TORUS_AXES, -sizes[name]))
    return Legs(tuple(part.size for part in parts), tuple(legs[name] for name in order))


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
    runs = step.op == "reduce_scatter" or (step.op == "all_gather" and full_bytes < SMALL_GATHER_BYTES)
    sizes = step.details.sizes if runs and isinstance(step.details, Legs) else ()
    if len(sizes) == 1:
        return ()
    return tuple((size, math.prod(sizes[:index])) for index, size in enumerate(sizes))
