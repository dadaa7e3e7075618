"""The fused ticks of a schedule: in every tick each device runs up to one F, one B and one W.

Devices that exchange messages in every tick run in lockstep with their neighbours. With one op per tick the forward
passes of one device wait for the backward passes of the next; with all three in a tick every steady tick costs the same
on every device, and no time is lost to it.
"""

from collections.abc import Iterator

from meshwright.algebra.schedules.simulation import peak_stash
from meshwright.algebra.schedules.table import PassKind, Result, Schedule, Task

Tick = tuple[tuple[Task, ...], ...]
"""The tasks of each device in one tick, in the order they run; results reach other devices before the next tick."""

PASSES: tuple[PassKind, ...] = ("F", "B", "W")


def fused_ticks(schedule: Schedule) -> Iterator[Tick]:
    """Returns the ops of a schedule in the earliest ticks that keep its character.

    On each device every kind keeps its order; B and W also wait for the forward passes that precede them (GPipe
    stays GPipe), W for the backward passes. Forward passes may run ahead, because a message now takes a tick each
    way, until a device holds twice its peak stash less one: for 1F1B 2 (stages - 1 - device) + 1 microbatches.
    """
    stashes = zip(schedule.tasks, peak_stash(schedule), strict=True)
    queues = [_Queue(tasks, 2 * round(stash / schedule.piece_share) - 1) for tasks, stash in stashes]
    made: set[Result] = set()
    while any(queue.is_open for queue in queues):
        tick = tuple(queue.take(made) for queue in queues)
        assert any(tick), f"no op of {schedule.name} can run: check the schedule first"
        made.update(task.makes for tasks in tick for task in tasks)
        yield tick


class _Queue:
    """The tasks that a device has yet to run, kind by kind."""

    def __init__(self, tasks: tuple[Task, ...], limit: int) -> None:
        self._tasks: dict[PassKind, list[Task]] = {kind: [] for kind in PASSES}
        self._after: dict[Result, tuple[int, ...]] = {}
        for task in tasks:
            # B waits for the F that precede it here, W for the F and B
            earlier = PASSES[: PASSES.index(task.makes.kind)]
            self._after[task.makes] = tuple(len(self._tasks[kind]) for kind in earlier)
            self._tasks[task.makes.kind].append(task)
        self._done: dict[PassKind, int] = dict.fromkeys(PASSES, 0)
        self._alive, self._limit = 0, limit

    @property
    def is_open(self) -> bool:
        return any(self._done[kind] < len(tasks) for kind, tasks in self._tasks.items())

    def take(self, made: set[Result]) -> tuple[Task, ...]:
        """Returns the tasks of one tick, from what was made in earlier ticks and by this device up to here."""
        taken: list[Task] = []
        for kind in PASSES:
            task = self._next(kind, made, taken)
            if task:
                taken.append(task)
                self._done[kind] += 1
                # the last of a microbatch's rows here decides when its stash is free
                self._alive += (kind == "F") - (task.takes in ("W", "BW"))
        return tuple(taken)

    def _next(self, kind: PassKind, made: set[Result], taken: list[Task]) -> Task | None:
        count = self._done[kind]
        if count == len(self._tasks[kind]) or (kind == "F" and self._alive >= self._limit):
            return None
        task = self._tasks[kind][count]
        if any(self._done[earlier] < least for earlier, least in zip(PASSES, self._after[task.makes], strict=False)):
            return None
        is_ready = task.needs is None or task.needs in made or any(task.needs == one.makes for one in taken)
        return task if is_ready else None
