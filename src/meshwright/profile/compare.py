"""Compares measured and predicted seconds: of the whole step, by part, by kind of work, and by derived step."""

from collections import defaultdict
from collections.abc import Callable, Mapping

import msgspec

from meshwright.cost.breakdown import Breakdown, Partition
from meshwright.hlo.products import precision, product_flops
from meshwright.profile.classes import CLASSES, OpClass, class_of_op, part_of_step
from meshwright.profile.events import DeviceTrace
from meshwright.profile.hlo import TracedProgram
from meshwright.profile.times import StepTimes, shared_seconds

NOTHING = "nothing runs"
"""Name of the term for time in which no device works."""


class TimeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a part, term or derived step in one step, predicted and measured; None if one side lacks it."""

    name: str
    kind: OpClass | str
    predicted_s: float | None
    measured_s: float | None

    @property
    def difference_s(self) -> float:
        """Measured less predicted seconds; None counts as 0."""
        return (self.measured_s or 0.0) - (self.predicted_s or 0.0)


class ClassRow(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over instructions of one kind of work, means per step and device; seconds as in `OpTime`."""

    kind: OpClass
    own_s: float
    wall_s: float
    flops: float
    hbm_bytes: float


class ProductRow(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix product of float32 operands: shapes, executions, FLOPs and seconds per step and device."""

    name: str
    step: str
    operands: str
    precision: str
    count: float
    flops: float
    seconds: float


class ProfileComparison(msgspec.Struct, frozen=True, kw_only=True):
    """All tables of a profile; rows are sorted by absolute difference, largest first.

    ``terms`` are kinds of work, with collectives by mesh axes. If ``shares_cores``, measured seconds are the whole
    machine's (`shared_seconds`) and terms sum to the step; otherwise they are sums of the instructions' durations, mean
    per device, which may overlap.
    """

    predicted: Partition
    parts: tuple[TimeRow, ...]
    terms: tuple[TimeRow, ...]
    steps: tuple[TimeRow, ...]
    classes: tuple[ClassRow, ...]
    float32: tuple[ProductRow, ...]
    shares_cores: bool


def compare_times(
    trace: DeviceTrace, program: TracedProgram, times: StepTimes, predicted: Breakdown
) -> ProfileComparison:
    """Returns all tables of a profile from its trace, program, measured times and predicted breakdown."""
    shares_cores = trace.platform == "cpu"
    seconds_by_op = shared_seconds(trace, program) if shares_cores else {op.name: op.own_s for op in times.ops}
    cost_by_step = predicted.steps
    step_s, part_s, term_s, predicted_part_s, predicted_term_s = (defaultdict[str, float](float) for _ in range(5))
    for op, seconds in seconds_by_op.items():
        op_fact = program.fact(op)
        expected_cost = cost_by_step.get(op_fact.step) if op_fact.kind == "collective" else None
        step_s[op_fact.step] += seconds
        part_s[op_fact.part] += seconds
        term_s[term_of(op_fact.kind, expected_cost.axes if expected_cost else ())] += seconds
    for cost in cost_by_step.values():
        predicted_part_s[part_of_step(cost.step)] += cost.seconds
        predicted_term_s[term_of(class_of_op(cost.step.op), cost.axes)] += cost.seconds
    # sends between pipeline stages are in no block, and their permutes carry no derived label
    predicted_term_s[term_of("collective")] += float(predicted.priced.estimate.terms.get("pipeline", 0.0))
    priced, mean = predicted.partition, times.mean
    rows = _rows(predicted_term_s, term_s, lambda name: name)
    # the time without work: of a mean device, or of the machine if its devices share cores
    rests = [("overhead", "overhead", mean.overhead_s, priced.overhead_s), ("idle", "idle", mean.idle_s, priced.idle_s)]
    if shares_cores:
        rest_s = max(0.0, mean.total_s - sum(seconds_by_op.values()))
        rests = [(NOTHING, "overhead", rest_s, priced.overhead_s + priced.idle_s)]
    rows += [TimeRow(name=name, kind=kind, predicted_s=est_s, measured_s=run_s) for name, kind, run_s, est_s in rests]
    predicted_step_s = {name: cost.seconds for name, cost in cost_by_step.items()}
    kind_by_step = {name: class_of_op(cost.step.op) for name, cost in cost_by_step.items()}
    return ProfileComparison(
        predicted=priced,
        parts=tuple(_rows(predicted_part_s, part_s, lambda name: "part")),
        terms=tuple(_worst(rows)),
        steps=tuple(_rows(predicted_step_s, step_s, lambda name: kind_by_step.get(name, "not derived"))),
        classes=_classes(times),
        float32=_float32(times, program),
        shares_cores=shares_cores,
    )


def term_of(kind: OpClass, axes: tuple[str, ...] = ()) -> str:
    """Returns a term's name: the kind of work, or ``collectives over fsdp``, ``collectives besides`` without axes."""
    if kind != "collective":
        return kind
    return f"collectives over {' and '.join(axes)}" if axes else "collectives besides"


def _rows(predicted: Mapping[str, float], measured: Mapping[str, float], kind: Callable[[str], str]) -> list[TimeRow]:
    names = dict.fromkeys([*predicted, *measured])
    rows = (TimeRow(name=n, kind=kind(n), predicted_s=predicted.get(n), measured_s=measured.get(n)) for n in names)
    return _worst([row for row in rows if row.predicted_s or row.measured_s])


def _worst(rows: list[TimeRow]) -> list[TimeRow]:
    return sorted(rows, key=lambda row: -abs(row.difference_s))


def _classes(times: StepTimes) -> tuple[ClassRow, ...]:
    """Sums instructions by kind of work, most wall time first."""
    class_rows = []
    for kind in CLASSES:
        ops = [op for op in times.ops if op.kind == kind]
        if ops:
            fields = ("own_s", "wall_s", "flops", "hbm_bytes")
            class_rows.append(ClassRow(kind=kind, **{name: sum(getattr(op, name) for op in ops) for name in fields}))
    return tuple(sorted(class_rows, key=lambda row: -row.wall_s))


def _float32(times: StepTimes, program: TracedProgram) -> tuple[ProductRow, ...]:
    """Returns the products of float32 operands, longest first. Each product in a fusion gets all of its seconds."""
    product_rows = []
    for op in times.ops:
        for product in program.products.get(op.name, ()):
            operands = (program.instructions.get(name) for name in product.operands[:2])
            shapes = [operand.shapes[0] if operand and operand.shapes else None for operand in operands]
            if not shapes or any(shape is None or shape.dtype != "f32" for shape in shapes):
                continue
            product_rows.append(
                ProductRow(
                    name=op.name,
                    step=op.step,
                    operands=" x ".join(str(shape).removeprefix("f32") for shape in shapes),
                    precision=precision(product),
                    count=op.count,
                    flops=float(op.count * product_flops(product, program.instructions)),
                    seconds=op.own_s,
                )
            )
    return tuple(sorted(product_rows, key=lambda row: -row.seconds))
