"""One simulator for every schedule: times of each op, idle time and peak stash of each device."""

import itertools
from collections.abc import Iterable, Sequence
from numbers import Real

import msgspec

from meshwright.algebra.schedules.table import Result, Schedule, Task
from meshwright.core.errors import InputError

Seconds = float | Sequence[float]
"""One time for all virtual stages, or a list with one for each."""


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one step of a schedule. The unit of time is the caller's; seconds in meshwright.

    ``start_s`` and ``end_s`` have the shape of the schedule's ``orders``.
    """

    schedule: Schedule
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]

    @property
    def makespan_s(self) -> float:
        """Time from the first start to the last end of all devices, which is the time of a step with a barrier at its
        end, such as one that clips gradients by their norm."""
        return max(ends[-1] for ends in self.end_s)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Time in which each device runs passes."""
        device_times = zip(self.start_s, self.end_s, strict=True)
        return tuple(sum(end_s - start_s for start_s, end_s in zip(*row, strict=True)) for row in device_times)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Idle time of each device before the barrier."""
        makespan_s = self.makespan_s
        return tuple(makespan_s - busy_s for busy_s in self.busy_s)

    @property
    def span_s(self) -> tuple[float, ...]:
        """Time of each device from its own first start to its own last end: without a barrier the next step can begin
        on a device once it has finished, and the largest span is the time of a step."""
        return tuple(ends[-1] - starts[0] for starts, ends in zip(self.start_s, self.end_s, strict=True))

    @property
    def peak_stash(self) -> tuple[float, ...]:
        """Peak stash of each device, in whole-stage microbatches (`simulation.peak_stash`)."""
        return peak_stash(self.schedule)

    @property
    def bubble_s(self) -> float:
        """Idle time of the busiest device, which is the time of the step beyond its passes."""
        return self.makespan_s - max(self.busy_s)

    @property
    def bubble_share(self) -> float:
        """Idle time of all devices over their total time: (p - 1) / (m + p - 1) for GPipe with p stages."""
        return sum(self.idle_s) / (self.schedule.num_devices * self.makespan_s)

    @property
    def bubble_without_barrier_s(self) -> float:
        """The largest span less the busy time of the busiest device: the bubble if no barrier separates steps."""
        return max(self.span_s) - max(self.busy_s)


def simulate(
    schedule: Schedule, *, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds = 0.0, send_s: float = 0.0
) -> Simulation:
    """Simulates a step in which every op runs as early as its device's order and the results it needs allow.

    ``forward_s``, ``backward_s`` and ``weight_s`` are per virtual stage and microbatch; ``backward_s`` makes the
    gradients of the inputs (with any recomputation) and ``weight_s`` those of the weights. A row B without a row W of
    its own takes both. A result reaches another device ``send_s`` after it is ready; sending keeps neither busy.
    Raises InputError where the order cannot run.
    """
    seconds_by_kind = pass_times(schedule, forward_s=forward_s, backward_s=backward_s, weight_s=weight_s)
    ready_s: dict[Result, float] = {}
    waiting_device: dict[Result, int] = {}
    start_s: list[list[float]] = [[] for _ in schedule.orders]
    end_s: list[list[float]] = [[] for _ in schedule.orders]
    awake_devices, zero_s = list(range(schedule.num_devices)), 0 * seconds_by_kind["F"][0]
    # a device runs until a result is missing; the device that makes the result wakes it up
    while awake_devices:
        device = awake_devices.pop()
        tasks, starts, ends = schedule.tasks[device], start_s[device], end_s[device]
        now_s = ends[-1] if ends else zero_s
        while len(ends) < len(tasks):
            result, needed_result, is_sent, pass_kind = tasks[len(ends)]
            if needed_result:
                arrival_s = ready_s.get(needed_result)
                if arrival_s is None:
                    waiting_device[needed_result] = device
                    break
                if is_sent:
                    arrival_s += send_s
                now_s = arrival_s if arrival_s > now_s else now_s
            starts.append(now_s)
            now_s += seconds_by_kind[pass_kind][result.stage]
            ends.append(now_s)
            ready_s[result] = now_s
            if result in waiting_device:
                awake_devices.append(waiting_device.pop(result))
    rows = enumerate(zip(schedule.orders, end_s, strict=True))
    stuck_texts = [f"device {device} before {ops[len(ends)]}" for device, (ops, ends) in rows if len(ends) < len(ops)]
    if stuck_texts:
        raise InputError(
            f"schedule {schedule.name} cannot run: devices wait for each other ({', '.join(stuck_texts[:4])}). "
            f"Move an op that another device waits for earlier in its device's order."
        )
    return Simulation(schedule=schedule, start_s=tuple(map(tuple, start_s)), end_s=tuple(map(tuple, end_s)))


def pass_times(
    schedule: Schedule, *, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds
) -> dict[str, list[float]]:
    """Maps "F", "B", "W" and "BW" (B and W in one pass) to their seconds in each virtual stage."""
    num_stages = schedule.num_virtual_stages
    f_times = _of_each(forward_s, num_stages, "forward")
    b_times, w_times = _of_each(backward_s, num_stages, "backward"), _of_each(weight_s, num_stages, "weight")
    bw_times = [inputs_s + weights_s for inputs_s, weights_s in zip(b_times, w_times, strict=True)]
    return {"F": f_times, "B": b_times, "W": w_times, "BW": bw_times}


def _of_each(seconds: Seconds, num_stages: int, pass_name: str) -> list[float]:
    # Real, not float: a scalar of NumPy is one time as well.
    times = [seconds] * num_stages if isinstance(seconds, Real) else list(seconds)  # type: ignore[arg-type]
    # Whole numbers stay exact: `forms` counts passes with them.
    times = [pass_s if isinstance(pass_s, int) else float(pass_s) for pass_s in times]
    if len(times) != num_stages:
        raise InputError(f"{len(times)} {pass_name} times for {num_stages} virtual stages. Give one, or one for each.")
    if any(not 0 <= pass_s < float("inf") for pass_s in times):
        raise InputError(f"{pass_name} times {times} must be numbers of at least 0.")
    return times


def peak_stash(schedule: Schedule) -> tuple[float, ...]:
    """Returns the most stashes of each device that are alive at once, in whole-stage microbatches.

    One is what the backward pass of one microbatch needs on a device with ``1 / num_devices`` of the model. It lives
    from the start of F to the end of B. Where B only makes input gradients, it counts in full until W ends: W needs the
    inputs of the products and the gradients of their results. Depends on the order only, not on times.
    """
    return tuple(schedule.piece_share * most_alive(tasks) for tasks in schedule.tasks)


def most_alive(tasks: Iterable[Task]) -> float:
    """Returns the most stashes of one virtual stage that are alive at once while a device runs its tasks."""
    changes = {"F": 1.0, "B": 0.0, "W": -1.0, "BW": -1.0}
    return max(itertools.accumulate(changes[task.takes] for task in tasks), default=0.0)
