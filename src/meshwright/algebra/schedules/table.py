"""A pipeline schedule as a table: which pass of which microbatch every device runs, in which order.

The same rows are simulated, drawn and executed. A *device* is a position on the mesh axis ``pipeline`` (a group of
chips, when other axes split its work too); a *virtual stage* is one of the consecutive pieces that the model is cut
into; a device holds one piece per *chunk*.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

PassKind = Literal["F", "B", "W"]
"""F forward; B backward; W weight gradients in a separate pass, for microbatches whose B only makes input gradients."""


class StagePass(msgspec.Struct, frozen=True):
    """One pass of one microbatch through one chunk of a device; written ``F3``, or ``F3/1`` in chunk 1."""

    kind: PassKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f"/{self.chunk}" if self.chunk else "")


class Result(NamedTuple):
    """The result of a pass of a microbatch through a virtual stage."""

    kind: PassKind
    stage: int
    microbatch: int


class Task(NamedTuple):
    """An op by the result that it ``makes`` and the result that it ``needs``: of two results, the one that is made
    later.

    ``is_sent``: the needed result comes from another device. ``takes`` says which pass times the op takes: "BW" if a B
    is the whole backward pass."""

    makes: Result
    needs: Result | None
    is_sent: bool
    takes: Literal["F", "B", "W", "BW"]


class StagePlace(msgspec.Struct, frozen=True):
    """The device and the chunk of a virtual stage."""

    device: int
    chunk: int = 0


Route = tuple[StagePlace, ...]
"""Places of the virtual stages, first to last: the path of a microbatch through the devices."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Every device's ops in their order, and the placement of the virtual stages.

    ``routes`` has one route through the model, or two if microbatches enter at both ends (then two devices have every
    virtual stage); ``route_of`` has the number of each microbatch's route. A microbatch may have a row W for a virtual
    stage or not: without one, its row B there is the whole backward pass. `check.check` says whether it can run.
    """

    name: str
    routes: tuple[Route, ...]
    route_of: tuple[int, ...]
    orders: tuple[tuple[StagePass, ...], ...]

    @property
    def num_devices(self) -> int:
        """Positions on the pipeline axis."""
        return len(self.orders)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step, over all routes."""
        return len(self.route_of)

    @property
    def num_virtual_stages(self) -> int:
        """Pieces that the model is cut into."""
        return len(self.routes[0])

    @property
    def num_chunks(self) -> int:
        """Pieces that one device holds, copies counted."""
        return 1 + max(place.chunk for route in self.routes for place in route)

    @property
    def weight_copies(self) -> int:
        """Copies of the weights on all devices together: one per route."""
        return len(self.routes)

    @property
    def piece_share(self) -> float:
        """One virtual stage's share of what a device would hold were the model cut into ``num_devices`` pieces."""
        return self.num_devices / self.num_virtual_stages

    @property
    def is_split(self) -> bool:
        """True if any weight gradients are made in a separate pass W."""
        return any(op.kind == "W" for order in self.orders for op in order)

    def virtual_stages(self) -> dict[tuple[int, int, int], int]:
        """Maps (route, device, chunk) to the virtual stage."""
        return {
            (route_index, place.device, place.chunk): stage
            for route_index, route in enumerate(self.routes)
            for stage, place in enumerate(route)
        }

    def place(self, stage: int, microbatch: int) -> StagePlace:
        """Returns the device and chunk on which a microbatch passes a virtual stage."""
        return self.routes[self.route_of[microbatch]][stage]

    @cached_property
    def tasks(self) -> tuple[tuple[Task, ...], ...]:
        """The ops of every device in their order, by virtual stage."""
        stage_of, last_stage = self.virtual_stages(), self.num_virtual_stages - 1
        tasks_by_device = []
        for device, order in enumerate(self.orders):
            split_passes = {(op.microbatch, op.chunk) for op in order if op.kind == "W"}
            tasks = []
            for op in order:
                kind, m = op.kind, op.microbatch
                stage = stage_of[self.route_of[m], device, op.chunk]
                needed_result: Result | None = Result("B", stage, m)
                if kind == "F":
                    needed_result = Result("F", stage - 1, m) if stage else None
                elif kind == "B":
                    needed_result = Result("B", stage + 1, m) if stage < last_stage else Result("F", stage, m)
                is_sent = needed_result is not None and self.place(needed_result.stage, m).device != device
                is_whole = kind == "B" and (m, op.chunk) not in split_passes
                tasks.append(Task(Result(kind, stage, m), needed_result, is_sent, "BW" if is_whole else kind))
            tasks_by_device.append(tuple(tasks))
        return tuple(tasks_by_device)


class StagePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """The placement of virtual stages on devices.

    ``routes`` returns the routes for numbers of devices and chunks. ``ends_share`` is the share of the microbatches for
    which an outer device runs both embedding and head; None if one device runs all embeddings, another all heads.
    """

    routes: Callable[[int, int], tuple[Route, ...]]
    weight_copies: int = 1
    ends_share: float | None = None


PlacementName = Literal["looped", "v", "bidirectional"]
PLACEMENTS: dict[PlacementName, StagePlacement] = {
    "looped": StagePlacement(routes=lambda devices, chunks: (sum((_down(devices, c) for c in range(chunks)), ()),)),
    "v": StagePlacement(routes=lambda devices, chunks: (_down(devices, 0) + _down(devices, 1)[::-1],), ends_share=1.0),
    "bidirectional": StagePlacement(
        routes=lambda devices, chunks: (_down(devices, 0), _down(devices, 1)[::-1]), weight_copies=2, ends_share=0.5
    ),
}
"""looped: virtual stage ``chunk * devices + device``, round and round, as interleaved schedules want it. v: down the
devices in chunk 0 and up again in chunk 1, so that device 0 holds the first piece and the last. bidirectional: down the
devices in chunk 0, and up them in chunk 1: device d holds the pieces d and devices - 1 - d."""


def _down(num_devices: int, chunk: int) -> Route:
    return tuple(StagePlace(device, chunk) for device in range(num_devices))


def microbatch_routes(orders: Sequence[Sequence[StagePass]], num_routes: int) -> dict[int, int]:
    """Maps each microbatch to its route; of two routes, to the one with the chunk of the microbatch's first op."""
    if num_routes == 1:
        return dict.fromkeys((op.microbatch for order in orders for op in order), 0)
    route_of: dict[int, int] = {}
    for order in orders:
        for op in order:
            route_of.setdefault(op.microbatch, min(op.chunk, num_routes - 1))
    return route_of
