"""Advice on the terms of a step that are furthest from their prediction, one line each."""

import math
from collections.abc import Callable, Mapping

import msgspec

from meshwright.core.units import format_bytes, format_flops, format_seconds
from meshwright.cost.breakdown import LabelledStep
from meshwright.cost.step_rates import StepRates
from meshwright.profile.classes import OUTSIDE, OpClass, class_of_op
from meshwright.profile.compare import NOTHING, ClassRow, ProfileComparison, TimeRow
from meshwright.profile.times import StepTimes
from meshwright.spec.calibration import Calibration
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy

MAX_LINES = 5
SMALL_SHARE = 0.02
"""Smallest difference that gets advice, as a share of the measured step."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Advice on one term of a step; ``difference_s`` is measured minus predicted seconds, ``text`` what to change."""

    term: str
    difference_s: float
    text: str


class AdviceCase(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of `advise`: the comparison and times of a profile, and the job, strategy and rates of its plan."""

    comparison: ProfileComparison
    times: StepTimes
    job: Job
    strategy: Strategy
    rates: StepRates
    expected: Mapping[str, LabelledStep]
    calibration: Calibration

    @property
    def seqs_per_device(self) -> float:
        """Sequences per device and microbatch."""
        batch_axes = self.strategy.assignment.get("input", {}).get("B", ())
        num_devices = math.prod(self.strategy.mesh.get(axis, 1) for axis in batch_axes)
        return self.job.batch_seqs / num_devices / self.strategy.num_microbatches

    def of_class(self, kind: str) -> ClassRow | None:
        return next((row for row in self.comparison.classes if row.kind == kind), None)


def advise(case: AdviceCase) -> tuple[Advice, ...]:
    """Returns advice on the `MAX_LINES` terms furthest from prediction, if off by `SMALL_SHARE` of the step or more."""
    step_s = case.times.mean.total_s
    return tuple(
        Advice(term=row.name, difference_s=row.difference_s, text=_line(row, case))
        for row in case.comparison.terms[:MAX_LINES]
        if abs(row.difference_s) >= SMALL_SHARE * step_s
    )


def _line(row: TimeRow, case: AdviceCase) -> str:
    if row.name.startswith("collectives"):
        return _collectives(row, case)
    if row.difference_s >= 0:
        return _RULES.get(row.name, _memory)(row, case)
    ratio = (row.measured_s or 0.0) / (row.predicted_s or 1.0)
    return (
        f"takes {ratio:.0%} of what the rates of {case.calibration.name!r} say: measure them again on a quiet machine "
        f"before you trust a comparison of plans that differ in it"
    )


def _collectives(row: TimeRow, case: AdviceCase) -> str:
    strategy = case.strategy
    axes = tuple(axis for axis in strategy.active_axes if axis in row.name.split())
    sizes_text = ", ".join(f"{axis}={strategy.mesh[axis]}" for axis in axes)
    op_costs = ((op, case.expected.get(op.step)) for op in case.times.ops if op.kind == "collective")
    axis_ops = [op for op, cost in op_costs if set(cost.axes if cost else ()) == set(axes)]
    exposed_s, own_s, waited_s = (sum(getattr(op, name) for op in axis_ops) for name in ("wall_s", "own_s", "waited_s"))
    text = f"{format_seconds(exposed_s)} of {format_seconds(own_s)} on a device exposed"
    if waited_s:
        text += f", {format_seconds(waited_s)} waits for other devices"
    if row.difference_s < 0:
        return f"{text}; faster than predicted"
    if not exposed_s:
        return f"{text}: it costs nothing until the compute beside it shrinks"
    change_texts = [f"more sequences per device (now {case.seqs_per_device:g})"]
    if sizes_text:
        change_texts.append(f"fewer devices in {sizes_text}")
    trains = case.job.trains
    if trains and strategy.gradient_sync == "naive":
        change_texts.insert(0, "strategy.gradient_sync=overlapped")
    gathers_s = sum(op.wall_s for op in axis_ops if op.step in case.expected and case.expected[op.step].gathers_weights)
    if trains and not strategy.prefetch and gathers_s > exposed_s / 2:
        change_texts.insert(0, "strategy.prefetch=true (weights are gathered ahead)")
    return f"{text}: try {' or '.join(change_texts)}"


def _products(row: TimeRow, case: AdviceCase) -> str:
    flops_per_s = _rate(row, case)
    expected_flops_per_s = float(case.rates.chip.matmul_flops_per_s)
    class_row = case.of_class(row.name)
    derived_flops = sum(cost.flops for cost in case.expected.values() if class_of_op(cost.step.op) == row.name)
    if class_row and flops_per_s >= expected_flops_per_s and class_row.flops > derived_flops:
        flops, derived = (format_flops(num_flops, unit="FLOP") for num_flops in (class_row.flops, derived_flops))
        return (
            f"the program does {flops} on a device where {derived} were derived, at no less than the rate that was "
            f"expected: {_fewer_flops(case)}"
        )
    text = f"products run at {format_flops(flops_per_s)} a device, the rates say {format_flops(expected_flops_per_s)}"
    worst_row = next((row for row in case.comparison.steps if row.kind == "contraction"), None)
    if worst_row:
        text += f"; the furthest off is {worst_row.name}"
    return f"{text}: {_larger(case)} makes products larger"


def _rate(row: TimeRow, case: AdviceCase) -> float:
    """Returns the measured FLOP/s per device of a row's kind of work; 0 if unknown."""
    class_row = case.of_class(row.name)
    return class_row.flops / row.measured_s if class_row and row.measured_s else 0.0


def _fewer_flops(case: AdviceCase) -> str:
    """Returns the change to advise against FLOPs of products beyond the derived ones."""
    if any(name.endswith("=dispatch") for name in case.expected):
        return "a bound on the slots of experts (strategy.capacity_factor) leaves fewer empty ones"
    if case.strategy.mesh.get("pipeline", 1) > 1:
        return "fewer stages or more microbatches leave fewer passes without a microbatch"
    return "look for padding in the operands of the longest ones"


def _larger(case: AdviceCase) -> str:
    """Returns the change to advise that gives each product more rows."""
    num_microbatches = case.strategy.num_microbatches
    if num_microbatches > 1:
        return f"fewer microbatches (num_microbatches={num_microbatches // 2}, now {num_microbatches})"
    return f"more sequences per device (now {case.seqs_per_device:g})"


def _attention(row: TimeRow, case: AdviceCase) -> str:
    rate = _rate(row, case)
    text = f"attention runs at {format_flops(rate)} a device" if rate else "the program does not say its FLOPs"
    expected_text = format_flops(float(case.rates.chip.attention_flops_per_s))
    return f"{text}, the rates say {expected_text}: {_larger(case)} gives it more rows, or measure the rates again"


def _copies(row: TimeRow, case: AdviceCase) -> str:
    worst_op = next((op for op in case.times.ops if op.kind == "copy"), None)
    if worst_op is None:
        return "no single copy stands out"
    size_text = format_bytes(worst_op.hbm_bytes / max(worst_op.count, 1))
    times_text = "once" if worst_op.count == 1 else f"{worst_op.count:g} times"
    text = f"no derived step copies; the longest is {worst_op.name} ({worst_op.step}), {size_text} {times_text}"
    is_kept = worst_op.step.startswith(OUTSIDE) or "update-slice" in worst_op.name
    if is_kept and case.job.trains and case.strategy.remat == "none":
        return f"{text}: strategy.remat=block keeps, and so copies, fewer results between the passes"
    mesh_text = ", ".join(f"{axis}={case.strategy.mesh[axis]}" for axis in case.strategy.active_axes)
    if "convert" in worst_op.name:
        return f"{text}: the program converts an array to another dtype there"
    split_text = f", which another split of its dims (now {mesh_text}) may not need" if mesh_text else ""
    return f"{text}: the compiler changes a layout there{split_text}"


def _memory(row: TimeRow, case: AdviceCase) -> str:
    class_row = case.of_class(row.name)
    traffic, measured_s = class_row.hbm_bytes if class_row else 0.0, row.measured_s or 0.0
    rate = float(case.rates.chip.hbm_bytes_per_s)
    measured_rate = traffic / measured_s if measured_s else 0.0
    text = (
        f"moves {format_bytes(traffic)} a device; {format_bytes((row.predicted_s or 0.0) * rate)} fit into the time "
        f"predicted; it ran at {format_bytes(measured_rate)}/s, the rates say {format_bytes(rate)}/s"
    )
    if measured_rate < rate / 2:
        return f"{text}: its kernels are small or strided; {_larger(case)} makes them larger"
    longest_op = next((op for op in case.times.ops if op.kind == row.name), None)
    longest_text = f"; the longest is {longest_op.name} ({longest_op.step})" if longest_op else ""
    if case.strategy.state == "fp32" and not case.comparison.shares_cores:
        return f"{text}{longest_text}: strategy.state=bf16-adam halves the bytes"
    return f"{text}{longest_text}: the compiler reads arrays more often than derived, once for each fusion"


def _overhead(row: TimeRow, case: AdviceCase) -> str:
    num_ops = sum(op.count for op in case.times.ops)
    per_op_s = (row.measured_s or 0.0) / max(num_ops, 1.0)
    text = f"{num_ops:,.0f} instructions a step, and {format_seconds(per_op_s)} without work for each"
    return f"{text}: {_larger(case)} makes each do more"


def _idle(row: TimeRow, case: AdviceCase) -> str:
    num_stages = case.strategy.mesh.get("pipeline", 1)
    if num_stages > 1:
        count = case.strategy.num_microbatches
        return f"{num_stages} stages with {count} microbatches: try num_microbatches={2 * count} or another schedule"
    idle = {device: part.idle_s for device, part in case.times.devices.items()}
    most, least = max(idle, key=lambda d: idle[d]), min(idle, key=lambda d: idle[d])
    return (
        f"device {most} idles {format_seconds(idle[most])}, device {least} {format_seconds(idle[least])}: gaps of more "
        f"than a launch, where the host or other work holds the device up; run it alone on the machine"
    )


_RULES: Mapping[OpClass | str, Callable[[TimeRow, AdviceCase], str]] = {
    "contraction": _products,
    "attention": _attention,
    "copy": _copies,
    "overhead": _overhead,
    NOTHING: _overhead,
    "idle": _idle,
}
