"""One simulator for every schedule: times of each op, idle time of each device, and the most it keeps alive."""

from collections.abc import Callable, Sequence
from numbers import Real

import msgspec

from meshwright.algebra.schedules.table import Op, Schedule
from meshwright.core.errors import InputError

Seconds = float | Sequence[float]
"""Of every virtual stage alike, or of each one."""


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """What one step of a schedule takes. The unit of time is the caller's; seconds in the product.

    ``start_s`` and ``end_s`` have the shape of the schedule's ``orders``. ``makespan_s`` is from the first start to
    the last end of all devices: a step that ends with a barrier, as one that clips gradients by their norm does.
    ``span_s`` is that of each device alone, from its own first start to its own last end: with no barrier the next
    step can begin on a device as soon as it is through, and the largest span is the time of a step.
    ``peak_stash`` is in whole-stage microbatches: one is what the backward pass of one microbatch needs of a device
    that holds ``1 / num_devices`` of the model.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    span_s: tuple[float, ...]
    peak_stash: tuple[float, ...]
    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]

    @property
    def bubble_s(self) -> float:
        """Idle time of the device that works most: what the step takes beyond its work."""
        return self.makespan_s - max(self.busy_s)

    @property
    def bubble_share(self) -> float:
        """Idle time of all devices over the time they are held; (K - 1) / (M + K - 1) for GPipe."""
        return sum(self.idle_s) / (len(self.idle_s) * self.makespan_s)

    @property
    def bubble_without_barrier_s(self) -> float:
        """The largest span less the work of the device that works most: the bubble where steps are not kept apart."""
        return max(self.span_s) - max(self.busy_s)


def simulate(
    schedule: Schedule,
    *,
    forward_s: Seconds,
    backward_s: Seconds,
    weight_s: Seconds = 0.0,
    send_s: float = 0.0,
    weight_stash: float = 1.0,
) -> Simulation:
    """Every op as early as its device's order and what it needs allow.

    ``forward_s``, ``backward_s`` and ``weight_s`` are per virtual stage and microbatch; ``backward_s`` makes the
    gradients of the inputs (with any recomputation) and ``weight_s`` those of the weights. A row B without a row W of
    its own takes both. A result reaches another device ``send_s`` after it is ready; sending keeps neither busy.
    ``weight_stash`` goes to `peak_stash`. Raises InputError where the order cannot run.
    """
    times = _Times(schedule, forward_s=forward_s, backward_s=backward_s, weight_s=weight_s)
    start, end = _run(schedule, times, send_s)
    busy = tuple(sum(e - s for s, e in zip(starts, ends, strict=True)) for starts, ends in zip(start, end, strict=True))
    makespan = max(ends[-1] for ends in end)
    return Simulation(
        makespan_s=makespan,
        busy_s=busy,
        idle_s=tuple(makespan - one for one in busy),
        span_s=tuple(ends[-1] - starts[0] for starts, ends in zip(start, end, strict=True)),
        peak_stash=peak_stash(schedule, weight_stash=weight_stash),
        start_s=tuple(map(tuple, start)),
        end_s=tuple(map(tuple, end)),
    )


def makespan(
    schedule: Schedule, *, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds = 0.0, send_s: float = 0.0
) -> float:
    """The time of `simulate` alone."""
    times = _Times(schedule, forward_s=forward_s, backward_s=backward_s, weight_s=weight_s)
    _, end = _run(schedule, times, send_s)
    return max(ends[-1] for ends in end)


def peak_stash(schedule: Schedule, *, weight_stash: float = 1.0) -> tuple[float, ...]:
    """Of each device, the most that is alive at once, in whole-stage microbatches.

    A microbatch's stash lives from the start of F to the end of B. Where B only makes input gradients, what W needs
    (inputs of the products and gradients of their results) stays until W ends: ``weight_stash`` of a stash, which is
    near 1 where results are saved and above it where they are recomputed. Depends on the order only, not on times.
    """
    return tuple(schedule.piece_share * _most_alive(order, weight_stash) for order in schedule.orders)


def _most_alive(order: Sequence[Op], weight_stash: float) -> float:
    split = {(op.microbatch, op.chunk) for op in order if op.kind == "W"}
    alive = most = 0.0
    for op in order:
        if op.kind == "F":
            alive += 1
            most = max(most, alive)
        elif op.kind == "W":
            alive -= weight_stash
        elif (op.microbatch, op.chunk) in split:
            alive += weight_stash - 1
            most = max(most, alive)
        else:
            alive -= 1
    return most


class _Times:
    """Every pass of a microbatch through a virtual stage as one number, and what it takes."""

    def __init__(self, schedule: Schedule, *, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds) -> None:
        count = schedule.num_virtual_stages
        self.forward_s = per_virtual_stage(forward_s, count, "forward")
        self.backward_s = per_virtual_stage(backward_s, count, "backward")
        self.weight_s = per_virtual_stage(weight_s, count, "weight")

    def of(self, op: Op, stage: int, *, split: bool) -> float:
        """Seconds of one op; ``split`` says whether the microbatch has a row W there."""
        if op.kind == "F":
            return self.forward_s[stage]
        if op.kind == "W":
            return self.weight_s[stage]
        return self.backward_s[stage] + (0 if split else self.weight_s[stage])


def per_virtual_stage(seconds: Seconds, count: int, what: str) -> list[float]:
    """One time for each of ``count`` virtual stages."""
    # Real, not float: a scalar of NumPy is one time as well.
    given = [seconds] * count if isinstance(seconds, Real) else list(seconds)  # type: ignore[arg-type]
    # Whole numbers stay exact: `simulated` counts passes with them.
    given = [one if isinstance(one, int) else float(one) for one in given]
    if len(given) != count:
        raise InputError(f"{len(given)} {what} times for {count} virtual stages. Give one, or one for each.")
    if any(not 0 <= one < float("inf") for one in given):
        raise InputError(f"{what} times {given} must be numbers of at least 0.")
    return given


def _run(schedule: Schedule, times: _Times, send_s: float) -> tuple[list[list[float]], list[list[float]]]:
    """Starts and ends of every op. A device runs until it waits; who makes what it waits for wakes it up.

    A pass F, B or W of microbatch m through virtual stage k has the number (kind * stages + k) * microbatches + m, so
    that what it needs lies at a fixed distance: one step instead of a search, for tables of 100,000 rows.
    """
    num_stages, num_microbatches = schedule.num_virtual_stages, schedule.num_microbatches
    block, stage_of, split = num_stages * num_microbatches, schedule.virtual_stages(), _split(schedule)
    device_of = [[place.device for place in route] for route in schedule.routes]
    ready: list[float | None] = [None] * (3 * block)
    waiting: dict[int, int] = {}
    start: list[list[float]] = [[] for _ in schedule.orders]
    end: list[list[float]] = [[] for _ in schedule.orders]
    awake, nothing = list(range(schedule.num_devices)), 0 * times.forward_s[0]
    while awake:
        device = awake.pop()
        order, starts, ends = schedule.orders[device], start[device], end[device]
        now = ends[-1] if ends else nothing
        while len(ends) < len(order):
            op = order[len(ends)]
            m, route = op.microbatch, schedule.route_of[op.microbatch]
            k = stage_of[route, device, op.chunk]
            number = k * num_microbatches + m
            if op.kind == "F":
                needs, other = (number - num_microbatches, k - 1) if k else (-1, k)
            elif op.kind == "B":
                needs, other = (block + number + num_microbatches, k + 1) if k < num_stages - 1 else (number, k)
                number += block
            else:
                needs, other = block + number, k
                number += 2 * block
            if needs >= 0:
                came = ready[needs]
                if came is None:
                    waiting[needs] = device
                    break
                if device_of[route][other] != device:
                    came += send_s
                now = came if came > now else now
            starts.append(now)
            now += times.of(op, k, split=(k, m) in split)
            ends.append(now)
            ready[number] = now
            if number in waiting:
                awake.append(waiting.pop(number))
    _require_finished(schedule, end)
    return start, end


def op_seconds(
    schedule: Schedule, *, forward_s: Seconds, backward_s: Seconds, weight_s: Seconds
) -> Callable[[int, Op], float]:
    """What an op takes on a device, as `simulate` counts it."""
    times = _Times(schedule, forward_s=forward_s, backward_s=backward_s, weight_s=weight_s)
    stage_of, split = schedule.virtual_stages(), _split(schedule)

    def seconds(device: int, op: Op) -> float:
        stage = stage_of[schedule.route_of[op.microbatch], device, op.chunk]
        return times.of(op, stage, split=(stage, op.microbatch) in split)

    return seconds


def _split(schedule: Schedule) -> set[tuple[int, int]]:
    """(virtual stage, microbatch) of every row W."""
    stage_of = schedule.virtual_stages()
    return {
        (stage_of[schedule.route_of[op.microbatch], device, op.chunk], op.microbatch)
        for device, order in enumerate(schedule.orders)
        for op in order
        if op.kind == "W"
    }


def _require_finished(schedule: Schedule, end: Sequence[Sequence[float]]) -> None:
    stuck = [
        f"device {device} before {order[len(ends)]}"
        for device, (order, ends) in enumerate(zip(schedule.orders, end, strict=True))
        if len(ends) < len(order)
    ]
    if stuck:
        raise InputError(
            f"schedule {schedule.name} cannot run: devices wait for each other ({', '.join(stuck[:4])}). "
            f"Move an op that others wait for to an earlier place."
        )
