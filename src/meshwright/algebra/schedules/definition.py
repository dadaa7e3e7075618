"""The definition of a pipeline schedule: its order of passes, the sizes it exists for, and its closed forms."""

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import msgspec
import numpy as np

from meshwright.algebra.schedules import table
from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError

OfSizes = Callable[[Number, Number, Number], Number]
"""A function of stages p, microbatches m and chunks v, each a number or an array."""

OfTimes = Callable[[Number, Number, Number, Number, Number, Number], Number]
"""A function of p, m, v, and the seconds of F, B and W: B for the gradients of the inputs (with any recomputation), W
for those of the weights. A schedule that does not split its backward pass runs B and W as one pass of b + w seconds."""


class PassOrder(Protocol):
    """A function that returns the passes of one device, first to last."""

    def __call__(self, device: int, *, stages: int, microbatches: int, chunks: int) -> Iterable[table.StagePass]: ...


class Requirement(msgspec.Struct, frozen=True):
    """A condition on the sizes of a schedule. ``message`` says what to change where the sizes do not meet it."""

    holds: OfSizes
    message: Callable[[int, int, int], str]


class StageForms(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as it runs with a program for each stage: devices run ahead as far as messages let them.

    ``bubble_s`` is the time of a step beyond m (f + b + w), where f, b and w are the seconds of one microbatch's F, B
    and W through all layers of a device; a step ends when its last device ends, and sends take no time. A stash is what
    the backward pass of one microbatch needs of its forward pass; it lives until W ends. ``stash`` is the largest
    number alive at once on one device; a stash of one of v chunks counts 1 / v. ``sends`` counts the sends in one
    direction that a step waits for if a send is short compared to a pass; it was read off the simulator for equal
    passes and at least twice as many microbatches as stages. ``split`` counts the microbatches whose weight gradients
    have a separate pass, on the device with most of them; a pass of one of v chunks counts 1 / v.
    """

    bubble_s: OfTimes
    stash: OfSizes
    sends: OfSizes
    split: OfSizes = lambda p, m, v: 0 * m


class LockstepForms(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as one program runs it on all devices. The defaults describe 1F1B.

    ``bubble_s`` is as in `StageForms`, and ``ticks`` counts the rows of the table. The next five fields are the counts
    of `ticks.Slots`, which all devices allocate; an entry of ``stash`` or ``handed`` is for one virtual stage.
    ``waits``, if given, replaces the default of `sends`.
    """

    bubble_s: OfTimes = lambda p, m, v, f, b, w: (p - 1) * (f + b) + (p - 1) * w
    ticks: OfSizes = lambda p, m, v: m + 2 * (p - 1)
    x: OfSizes = lambda p, m, v: 1 + 0 * p
    dx: OfSizes = lambda p, m, v: 1 + 0 * p
    stash: OfSizes = lambda p, m, v: np.minimum(2 * p - 1, m)
    head: OfSizes = lambda p, m, v: 1 + 0 * m
    handed: OfSizes = lambda p, m, v: 0 * p
    waits: OfSizes | None = None

    def sends(self, p: Number, m: Number, v: Number) -> Number:
        """Returns the sends in one direction that a step of two stages or more waits for; by default ticks - 2."""
        return self.waits(p, m, v) if self.waits else self.ticks(p, m, v) - 2


class PublishedBubble(msgspec.Struct, frozen=True, kw_only=True):
    """The bubble that a schedule's paper gives, if the rows here have a different one. ``seconds`` takes the arguments
    of `OfTimes`; ``formula`` is in the paper's letters, ``why`` explains the difference."""

    formula: str
    seconds: OfTimes
    why: str


class ScheduleDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline schedule for all sizes.

    ``year`` of publication puts the schedules in order. ``chunks`` is the fewest virtual stages of a device, the only
    number unless ``more_chunks``. ``search`` says which searches try the schedule. A schedule without ``forms`` or
    without ``lockstep`` is simulated instead, once for each size (`algebra.schedules.forms`). ``published`` is the
    paper's bubble if these rows have a different one.
    """

    name: str
    year: int
    order: PassOrder
    placement: table.PlacementName = "looped"
    chunks: int = 1
    more_chunks: bool = False
    requirements: tuple[Requirement, ...] = ()
    search: Literal["usual", "full", "never"] = "full"
    forms: StageForms | None = None
    lockstep: LockstepForms | None = None
    published: PublishedBubble | None = None

    @property
    def stage_placement(self) -> table.StagePlacement:
        """The placement of the virtual stages on devices."""
        return table.PLACEMENTS[self.placement]

    def is_legal(self, stages: Number, microbatches: Number, chunks: Number) -> Number:
        """True where the schedule exists for these sizes."""
        p, m, v = (np.asarray(size) for size in (stages, microbatches, chunks))
        # no requirement divides by a size of 0
        masks = [(p >= 1) & (m >= 1) & (v >= 1), *(rule.holds(np.maximum(p, 1), m, v) for rule in self._requirements)]
        return functools.reduce(operator.and_, masks)

    def refusal(self, stages: int, microbatches: int, chunks: int) -> str | None:
        """Returns why the schedule does not exist for these sizes; None where it does."""
        for size_name, size in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
            if size < 1:
                return f"{size_name}={size} must be at least 1."
        sizes = stages, microbatches, chunks
        return next((rule.message(*sizes) for rule in self._requirements if not rule.holds(*sizes)), None)

    @property
    def _requirements(self) -> tuple[Requirement, ...]:
        chunks_rule = Requirement(
            lambda p, m, v: v == self.chunks,
            lambda p, m, v: (
                f"chunks={v} is not for {self.name}, whose devices hold {self.chunks}. "
                f"Use chunks={self.chunks}{', or the interleaved schedule' if v > 1 else ''}."
            ),
        )
        return self.requirements if self.more_chunks else (chunks_rule, *self.requirements)

    def build(self, stages: int, microbatches: int, chunks: int) -> table.Schedule:
        """Returns the rows of the schedule. Raises InputError for sizes that it does not exist for."""
        if refusal := self.refusal(stages, microbatches, chunks):
            raise InputError(refusal)
        orders = tuple(
            tuple(self.order(device, stages=stages, microbatches=microbatches, chunks=chunks))
            for device in range(stages)
        )
        routes = self.stage_placement.routes(stages, chunks)
        route_of = table.microbatch_routes(orders, len(routes))
        return table.Schedule(
            name=self.name,
            routes=routes,
            route_of=tuple(route_of.get(m, 0) for m in range(microbatches)),
            orders=orders,
        )
