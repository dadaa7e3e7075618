"""Measures the rates of emulated devices inside training steps: small reference steps under the profiler.

Rates of single calls say little about a step on a host: layers run in loops, all devices share caches and memory, and
the compiler fuses ops. So the seconds of reference steps are attributed to derived steps (`profile.times`), and fitted
to the amounts of work (FLOPs, bytes, calls) that `cost` counts for these.
"""

import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import msgspec
import numpy as np
import optax
from scipy.optimize import nnls

from meshwright.core.progress import tracked
from meshwright.cost.breakdown import label_text
from meshwright.cost.pass_times import loop_bytes
from meshwright.cost.setting import Setting
from meshwright.cost.step_costs import kept_results
from meshwright.cost.train_step import PricedStrategy, price_strategy
from meshwright.cost.work.host_work import Amounts, amounts_of, is_product
from meshwright.cost.work.kernels import num_kernels
from meshwright.parallel.train_step import TrainStep
from meshwright.profile.classes import OUTSIDE
from meshwright.profile.events import STEP, load_trace, newest_trace
from meshwright.profile.hlo import parse_program
from meshwright.profile.run import traced
from meshwright.profile.subjects import Training
from meshwright.profile.times import shared_seconds
from meshwright.spec.calibration import Calibration, HostRates, Pace
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh

ROUNDS, STEPS_A_ROUND, WARMUP_STEPS = 5, 2, 3
"""Reference steps are profiled in alternation, so that other load affects all alike; rates use medians over the faster
half of the executions, because other work often slows several rounds in a row."""
PRODUCTS = "products"
"""The kind of all matrix products, which share one `Pace`."""
GAPS = "gaps"
"""Key of the seconds in which no device works."""


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A small training step whose profile measures the machine."""

    model: Model
    job: Job
    remat: str

    def strategy(self, num_devices: int) -> Strategy:
        """Returns FSDP if the number of devices divides the width of every reference, else data parallelism."""
        is_sharded = all(reference.model.d_model % num_devices == 0 for reference in REFERENCES)
        return Strategy(mesh=make_mesh({"fsdp" if is_sharded else "data": num_devices}), remat=self.remat, state="fp32")

    def job_for(self, num_devices: int) -> Job:
        """Returns the job with its batch rounded up to a multiple of the devices."""
        batch_seqs = -(-self.job.batch_seqs // num_devices) * num_devices
        return msgspec.structs.replace(self.job, batch_seqs=batch_seqs)


def _model(**sizes: Any) -> Model:
    return Model(family="llama", num_layers=2, num_heads=8, **sizes)


REFERENCES = (
    Reference(
        model=_model(name="narrow", d_model=256, d_ff=704, num_kv_heads=4, head_dim=32, vocab_size=1536),
        job=Job(batch_seqs=16, seq_len=128),
        remat="none",
    ),
    Reference(
        model=_model(name="wide", d_model=512, d_ff=1280, num_kv_heads=2, head_dim=64, vocab_size=3072),
        job=Job(batch_seqs=8, seq_len=256),
        remat="none",
    ),
    Reference(
        model=_model(name="long", d_model=176, d_ff=480, num_kv_heads=2, head_dim=32, vocab_size=1024),
        job=Job(batch_seqs=8, seq_len=512),
        remat="block",
    ),
)
"""The references differ in widths, sequence lengths and remat, enough for the fit to separate the terms of `Pace`."""


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True):
    """One reference step: its price by `cost`, and measured seconds by derived step, with ``GAPS`` as one more key.

    Seconds are wall time of one execution, divided among the instructions of all devices.
    """

    priced: PricedStrategy
    seconds: dict[str, float]

    @property
    def left_s(self) -> float:
        """Seconds in which no device computes: collectives and gaps."""
        collective_labels = {label_text(cost.step) for cost in self.priced.costs.all if cost.step.is_collective}
        return sum(self.seconds.get(name, 0.0) for name in (GAPS, *collective_labels))


def measure_references(calibration: Calibration, num_devices: int) -> list[MeasuredStep]:
    """Runs and profiles the reference steps on all devices."""
    with tempfile.TemporaryDirectory() as folder:
        references = tracked(REFERENCES, "compiling reference steps")
        steps = [RunningStep(reference, num_devices, Path(folder) / reference.model.name) for reference in references]
        for round_index in tracked(range(ROUNDS), "profiling reference steps, rounds"):
            for step in steps:
                step.profile(round_index)
    return [step.measured(calibration) for step in steps]


class RunningStep:
    """A reference step, compiled and warm, with the times of its profiled rounds."""

    def __init__(self, reference: Reference, num_devices: int, folder: Path) -> None:
        self.model, self.job = reference.model, reference.job_for(num_devices)
        self.strategy, self.folder = reference.strategy(num_devices), folder
        step = TrainStep(self.model, self.strategy, optimizer=optax.adamw(1e-4), max_grad_norm=1.0)
        self.subject = Training(step, self.job)
        self.subject.begin(0)
        self.compiled = self.subject.compile()
        self.program = parse_program(self.compiled.as_text() or "")
        self.steps: list[dict[str, float]] = []
        self.plain_s: list[float] = []
        for _ in range(WARMUP_STEPS):
            self.subject.advance(self.compiled)

    def profile(self, number: int) -> None:
        """Runs one uncounted step, times `STEPS_A_ROUND` steps, and profiles as many, into a folder ``number``."""
        trace_folder = self.folder / str(number)
        self.subject.advance(self.compiled)
        for _ in range(STEPS_A_ROUND):
            start_s = time.perf_counter()
            self.subject.advance(self.compiled)
            self.plain_s.append(time.perf_counter() - start_s)
        with traced(trace_folder):
            for step_index in range(STEPS_A_ROUND):
                with jax.profiler.TraceAnnotation(STEP, step=step_index):
                    self.subject.advance(self.compiled)
        trace = load_trace(newest_trace(trace_folder), self.program)
        for window in trace.windows:
            seconds_by_op = shared_seconds(msgspec.structs.replace(trace, windows=(window,)), self.program)
            seconds_by_step = defaultdict(float, {GAPS: window.end_s - window.start_s - sum(seconds_by_op.values())})
            for op, seconds in seconds_by_op.items():
                seconds_by_step[self.program.fact(op).step] += seconds
            self.steps.append(seconds_by_step)

    def measured(self, calibration: Calibration) -> MeasuredStep:
        """Returns medians over the faster half of the profiled steps, scaled to the time without the profiler."""
        num_fastest = -(-len(self.steps) // 2)
        fastest_steps = sorted(self.steps, key=lambda step: sum(step.values()))[:num_fastest]
        plain_ratio = median(sorted(self.plain_s)[:num_fastest]) / median(sum(step.values()) for step in fastest_steps)
        step_names = {name for step in fastest_steps for name in step}
        cluster = parse_cluster(f"cpu:{self.strategy.num_chips}")
        return MeasuredStep(
            priced=price_strategy(Setting(self.model, cluster, self.job, calibration), self.strategy),
            seconds={name: plain_ratio * median(step[name] for step in fastest_steps) for name in step_names},
        )


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Measured seconds of a derived step, and its amounts of work; ``kind`` is its op, or ``PRODUCTS``."""

    amounts: Amounts
    seconds: float
    kind: str = ""


def host_rates(references: Sequence[MeasuredStep]) -> HostRates:
    """Returns seconds per unit of work inside a training step, fitted to the reference steps."""
    work_lists = [_spent(reference) for reference in references]
    work_by_kind: dict[str, list[Spent]] = defaultdict(list)
    for row in itertools.chain(*work_lists):
        if row.kind == PRODUCTS or row.amounts.byte or row.amounts.score:
            work_by_kind[row.kind].append(row)
    product = pace(work_by_kind.pop(PRODUCTS, []))
    stream_rows = [row for op, rows in work_by_kind.items() for row in rows if op != "adamw" and row.amounts.byte]
    paces = {op: pace(rows) for op, rows in work_by_kind.items()}
    out_pace = pace([_outside(reference, work) for reference, work in zip(references, work_lists, strict=True)])
    paces["adamw"] = msgspec.structs.replace(paces["adamw"], byte=paces["adamw"].byte + out_pace.call)
    return HostRates(product=product, ops=paces, stream=pace(stream_rows), loop_byte=out_pace.byte, **_gaps(references))


def _spent(reference: MeasuredStep) -> list[Spent]:
    """Returns amounts of work and seconds of the local derived steps; steps with equal labels are added up."""
    amounts_by_label: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(Amounts.__struct_fields__)))
    kind_by_label: dict[str, str] = {}
    derived, sizes = reference.priced.derived, reference.priced.sizes
    kept_by_block = kept_results(derived)
    for cost in reference.priced.costs.all:
        step, label = cost.step, label_text(cost.step)
        if not step.is_collective:
            amounts = amounts_of(step, sizes, kept=kept_by_block.get((step.block, step.phase), frozenset()))
            amounts_by_label[label] += np.array(msgspec.structs.astuple(amounts), float) * float(cost.count)
            kind_by_label.setdefault(label, PRODUCTS if is_product(step) else step.op)
    return [
        Spent(amounts=Amounts(**_named(amounts_by_label[label])), seconds=reference.seconds.get(label, 0.0), kind=kind)
        for label, kind in kind_by_label.items()
    ]


def _named(values: np.ndarray) -> dict[str, float]:
    return dict(zip(Amounts.__struct_fields__, values.tolist(), strict=True))


def pace(spent: Sequence[Spent]) -> Pace:
    """Returns seconds per unit of each amount of work, none negative; 0 for amounts that are 0 everywhere.

    The fit is least squares of relative deviations, weighted by seconds.
    """
    spent_rows = [spent_row for spent_row in spent if spent_row.seconds > 0]
    if not spent_rows:
        return Pace()
    amount_matrix = np.array([msgspec.structs.astuple(spent_row.amounts) for spent_row in spent_rows], float)
    spent_s = np.array([spent_row.seconds for spent_row in spent_rows])
    column_scale, weights = amount_matrix.max(axis=0), 1 / np.sqrt(spent_s)
    column_scale[column_scale == 0] = 1
    scaled_pace, _ = nnls(amount_matrix / column_scale * weights[:, None], spent_s * weights)
    return Pace(**_named(scaled_pace / column_scale))


def _outside(reference: MeasuredStep, spent_rows: Sequence[Spent]) -> Spent:
    """Returns the seconds of instructions without a derived step, and two amounts that explain them: in ``byte`` the
    bytes that loops over layers copy, in ``call`` the optimizer's bytes, whose norms and counters have no step."""
    derived, sizes = reference.priced.derived, reference.priced.sizes
    num_bytes = [block.repeat * sum(loop_bytes(block, derived, sizes)) for block in derived.blocks if block.block.carry]
    updated_bytes = sum(row.amounts.byte for row in spent_rows if row.kind == "adamw")
    seconds = sum(seconds for op_name, seconds in reference.seconds.items() if op_name.startswith(OUTSIDE))
    return Spent(amounts=Amounts(byte=float(sum(num_bytes)), call=updated_bytes), seconds=seconds)


def _gaps(references: Sequence[MeasuredStep]) -> dict[str, float]:
    """Attributes the time in which no device computes to collectives, or on a single device to gaps between kernels.

    Devices wait for each other in a collective: the fit gives multiples of its measured latency (``call``) and of the
    measured time of its bytes (``byte``). Returns these as fields of `HostRates`.
    """
    work_of_collectives = []
    for reference in references:
        collective_costs = [cost for cost in reference.priced.costs.all if cost.step.is_collective]
        serial_amounts = Amounts(
            call=sum(float(cost.latency_s * cost.count) for cost in collective_costs),
            byte=sum(float((cost.network_s - cost.latency_s) * cost.count) for cost in collective_costs),
        )
        work_of_collectives.append(Spent(amounts=serial_amounts, seconds=reference.left_s))
    if any(collective_work.amounts.call for collective_work in work_of_collectives):
        gap_pace = pace(work_of_collectives)
        return {"meets": gap_pace.call, "waits": gap_pace.byte}
    sizes = references[0].priced.sizes
    all_costs = itertools.chain(*(reference.priced.costs.all for reference in references))
    kernel_count = sum(float(num_kernels(cost.step, sizes) * cost.count) for cost in all_costs)
    return {"kernel_s": sum(collective_work.seconds for collective_work in work_of_collectives) / kernel_count}
