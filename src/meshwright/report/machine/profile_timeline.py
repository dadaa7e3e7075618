"""The timeline of a training step as it is predicted: what one device computes, and what its links carry meanwhile."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from meshwright.algebra.steps import Phase
from meshwright.cost.step_costs import StepCost
from meshwright.cost.train_step import PricedStrategy
from meshwright.profile.classes import class_of_op
from meshwright.profile.compare import label_text

MAX_SLICES = 50_000
"""Slices up to which every layer and microbatch has its own; beyond, one pass stands for all repeats of it."""


class Slice(NamedTuple):
    """Something that takes time on one of the two lanes; a pass holds the steps in it."""

    lane: Literal["compute", "links"]
    name: str
    kind: str
    start_s: float
    seconds: float


class _Pass(NamedTuple):
    """One pass over a block, and how many times its steps count."""

    name: str
    costs: Sequence[StepCost]
    times: Sequence[float]


def predicted_timeline(priced: PricedStrategy, *, num_microbatches: int) -> list[Slice]:
    """One step as it is expected: local steps one after the other, collectives beside them or in their way.

    A collective that nothing waits for begins when the links are free, and its pass ends with it at the latest. Passes
    run for one microbatch after the other, as often as on the busiest device of a pipeline; its bubble comes last.
    """
    lanes = _Lanes(overlaps=priced.rates.overlaps)
    for one in _passes(priced, num_microbatches):
        lanes.run(one)
    bubble = float(priced.estimate.terms.get("bubble", 0.0))
    if bubble:
        lanes.found.append(Slice("compute", "pipeline bubble", "idle", lanes.at, bubble))
    return lanes.found


def _passes(priced: PricedStrategy, count: int) -> Iterator[_Pass]:
    """Every pass in order: forward and backward of each microbatch, then the update."""
    blocks = []
    for block in priced.costs.blocks:
        here = max((float(cost.here) for cost in block.forward), default=0.0)
        turns = max(1, round(here / count)) if here else 0
        blocks.append((block.name, turns, block.forward, block.backward))
    update = priced.costs.once
    one_by_one = count * sum(turns * (len(f) + len(b)) for _, turns, f, b in blocks) <= MAX_SLICES
    for microbatch in range(count if one_by_one else 1):
        last = microbatch == count - 1 or not one_by_one
        for name, turns, forward, _ in blocks:
            yield from _turns(
                name, "forward", turns, forward, count=count, microbatch=microbatch if one_by_one else None
            )
        for name, turns, _, backward in reversed(blocks):
            chosen = [cost for cost in backward if last or cost.step.scope != "step"]
            yield from _turns(
                name, "backward", turns, chosen, count=count, microbatch=microbatch if one_by_one else None
            )
    yield _Pass("update", update, [float(cost.here) for cost in update])


def _turns(
    block: str, phase: Phase, turns: int, costs: Sequence[StepCost], *, count: int, microbatch: int | None
) -> Iterator[_Pass]:
    """The passes over the repeats of a block, the backward one from the last; without a microbatch all as one."""
    if microbatch is None:
        times = [turns * (1.0 if cost.step.scope == "step" else count) for cost in costs]
        yield _Pass(f"{block} {phase}, {turns} x {count} microbatches", costs, times)
        return
    which = f", microbatch {microbatch}" if count > 1 else ""
    for turn in range(turns):
        number = turn if phase == "forward" else turns - 1 - turn
        yield _Pass(f"{block}{f' {number}' if turns > 1 else ''} {phase}{which}", costs, [1.0] * len(costs))


class _Lanes:
    """Both lanes while passes are laid down."""

    def __init__(self, *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.at = self.links = 0.0
        self.found: list[Slice] = []

    def run(self, one: _Pass) -> None:
        """One pass and its steps."""
        begin = self.at
        self.links = max(self.links, begin)
        inside: list[Slice] = []
        for cost, times in zip(one.costs, one.times, strict=True):
            seconds = float(cost.time_s) * times
            if seconds > 0:
                inside.append(self._step(cost, seconds))
        self.at = max(self.at, self.links)
        if self.at > begin:
            self.found += [Slice("compute", one.name, "pass", begin, self.at - begin), *inside]

    def _step(self, cost: StepCost, seconds: float) -> Slice:
        name, kind = label_text(cost.step), class_of_op(cost.step.op)
        if not cost.step.is_collective:
            self.at += seconds
            return Slice("compute", name, kind, self.at - seconds, seconds)
        hides = cost.hides and self.overlaps
        start = self.links if hides else max(self.links, self.at)
        self.links = start + seconds
        self.at = self.at if hides else self.links
        return Slice("links", name, kind, start, seconds)
