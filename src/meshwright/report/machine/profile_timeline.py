"""The timeline of a training step as it is predicted: what one device computes, and what its links carry meanwhile."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.algebra.steps import Phase
from meshwright.cost.breakdown import label_text
from meshwright.cost.lanes import Lanes, Slice
from meshwright.cost.train_step import PricedStrategy
from meshwright.cost.work.kernels import StepCost
from meshwright.profile.classes import class_of_op

MAX_SLICES = 50_000
"""Slices up to which every layer and microbatch has its own; beyond, one pass stands for all repeats of it."""


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
    lanes = _Passes(overlaps=priced.rates.overlaps)
    for one in _passes(priced, num_microbatches):
        lanes.run(one)
    bubble = float(priced.estimate.terms.get("bubble", 0.0))
    if bubble:
        lanes.compute("pipeline bubble", bubble, kind="idle")
    return lanes.slices


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


class _Passes(Lanes):
    """Passes laid on both lanes, each with the steps in it."""

    def __init__(self, *, overlaps: bool) -> None:
        super().__init__()
        self.overlaps = overlaps

    def run(self, one: _Pass) -> None:
        """One pass and its steps; collectives that nothing waits for begin at once, and the pass ends with them."""
        begin, number = self.chip_s, len(self.slices)
        self.links_s = max(self.links_s, begin)
        for cost, times in zip(one.costs, one.times, strict=True):
            seconds = float(cost.time_s) * times
            if seconds > 0:
                self._step(cost, seconds)
        self.chip_s = max(self.chip_s, self.links_s)
        if self.chip_s > begin:
            whole = Slice(lane="compute", what=one.name, kind="pass", start_s=begin, end_s=self.chip_s)
            self.slices.insert(number, whole)

    def _step(self, cost: StepCost, seconds: float) -> None:
        name, kind = label_text(cost.step), class_of_op(cost.step.op)
        if not cost.step.is_collective:
            self.compute(name, seconds, kind=kind)
        elif cost.hides and self.overlaps:
            self.send(name, seconds, kind=kind)
        else:
            self.chip_s = self.send(name, seconds, kind=kind, when=self.chip_s)
