"""What a pipeline schedule does to one training step: layers per device, microbatches in flight, idle time."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.schedule_forms import bubble_seconds, is_legal, peak_stash, weight_copies
from meshwright.algebra.schedule_rows import build
from meshwright.core.errors import InputError
from meshwright.spec.strategy import Strategy

Number = Any
"""A float, or a NumPy array with one entry per candidate."""


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A named schedule on ``stages`` devices of ``chunks`` runs of layers each; all but the name may be arrays.

    Layers that do not divide are shared out so that no run is more than one layer longer than another.
    """

    schedule: str = "1f1b"
    stages: Number = 1
    chunks: Number = 1
    microbatches: Number = 1

    @property
    def is_one(self) -> Any:
        """Where there is nothing to pass on."""
        return np.asarray(self.stages) == 1

    def layers_held(self, num_layers: int) -> Number:
        """Layers of the device that holds the most."""
        return np.ceil(num_layers / (self.stages * self.chunks)) * self.chunks

    def share(self, num_layers: int) -> Number:
        """The same as a share of all layers."""
        return self.layers_held(num_layers) / num_layers

    @property
    def stash(self) -> Number:
        """Microbatches whose kept results the fullest device holds at once, in units of all its layers."""
        found = peak_stash(self.schedule, stages=self.stages, microbatches=self.microbatches, chunks=self.chunks)
        return np.where(self.is_one, 1.0, found)

    @property
    def weight_copies(self) -> Number:
        """How many stages' weights a device holds: two where the schedule runs in both directions."""
        return np.where(self.is_one, 1, weight_copies(self.schedule))

    def ends(self, sizes: list[Number]) -> Number:
        """What embedding and head add to the memory of the fullest device: both where one has both, else the larger."""
        both, larger = _sum_and_largest(sizes)
        return both if self.schedule in MEETING_ENDS else np.where(self.is_one, both, larger)

    @property
    def end_shares(self) -> tuple[Number, Number]:
        """The share of the microbatches for which the busiest device runs the embedding, and the head."""
        shared = MEETING_ENDS.get(self.schedule)
        first, last = (0.0, 1.0) if shared is None else (shared, shared)
        return np.where(self.is_one, 1.0, first), np.where(self.is_one, 1.0, last)

    def ends_run(self, sizes: list[Number]) -> Number:
        """The same of what they take of each microbatch's time: half of both where two devices take turns."""
        both, larger = _sum_and_largest(sizes)
        apart = both * MEETING_ENDS[self.schedule] if self.schedule in MEETING_ENDS else larger
        return np.where(self.is_one, both, apart)

    @property
    def num_sends(self) -> Number:
        """Sends from stage to stage that a step waits for."""
        stages = np.asarray(self.stages)
        found = SENDS[self.schedule](stages, self.microbatches, self.chunks)
        return np.where(self.is_one, 0.0, found)

    def bubble_s(self, *, forward_s: Number, backward_s: Number, weight_s: Number) -> Number:
        """Idle seconds of a step, for seconds that one microbatch takes in all layers of a device.

        ``weight_s`` is the part of ``backward_s`` that makes gradients of weights.
        """
        found = bubble_seconds(
            self.schedule,
            stages=self.stages,
            microbatches=self.microbatches,
            chunks=self.chunks,
            forward_s=forward_s,
            backward_s=backward_s - weight_s,
            weight_s=weight_s,
        )
        return np.where(self.is_one, 0.0, found)


ONE_STAGE = Pipeline()

SENDS: dict[str, Callable[[Number, Number, Number], Number]] = {
    "naive": lambda p, m, v: 2 * m * (p - 1),
    "gpipe": lambda p, m, v: 2 * (p - 1),
    "1f1b": lambda p, m, v: 2 * m * (p - 1) / p + 2 * (p - 2) * (p > 1),
    "interleaved": lambda p, m, v: 2 * (p * v - 1),
    "zb-h1": lambda p, m, v: 4 * (p - 1),
    "zb-h2": lambda p, m, v: p - 1,
    "dualpipe": lambda p, m, v: 2.5 * p - 3,
    "dualpipe-v": lambda p, m, v: 4 * (p - 1),
}
"""Stages p, microbatches m, chunks v -> how many sends one way a step waits for, where a send is short beside a pass.

Read off the simulator for equal passes and at least twice as many microbatches as stages: others pass meanwhile.
"""

MEETING_ENDS: dict[str, float] = {"dualpipe": 0.5, "dualpipe-v": 1.0}
"""Schedules whose outer devices hold embedding and head, and for which share of the microbatches they run them."""


def _sum_and_largest(sizes: list[Number]) -> tuple[Number, Number]:
    both: Number = 0.0
    larger: Number = 0.0
    for size in sizes:
        both, larger = both + size, np.maximum(larger, size)
    return both, larger


def schedule_fits(schedule: str, *, stages: Number, chunks: Number, microbatches: Number) -> Any:
    """Whether a named schedule runs with these sizes, which may be arrays; on one stage every one does."""
    fits = is_legal(schedule, stages=stages, microbatches=microbatches, chunks=chunks)
    return fits | ((np.asarray(stages) == 1) & (np.asarray(chunks) == 1))


def schedule_refusal(schedule: str, *, stages: int, chunks: int, microbatches: int) -> str:
    """Why a named schedule does not run with these sizes."""
    try:
        build(schedule, stages=stages, microbatches=microbatches, chunks=chunks)
    except InputError as error:
        return str(error)
    raise AssertionError(f"{schedule} has rows for {stages} stages, {microbatches} microbatches, {chunks} chunks")


def strategy_pipeline(strategy: Strategy) -> Pipeline:
    """The pipeline of one strategy."""
    return Pipeline(
        schedule=strategy.schedule,
        stages=strategy.mesh.get("pipeline", 1),
        chunks=strategy.chunks,
        microbatches=strategy.num_microbatches,
    )
