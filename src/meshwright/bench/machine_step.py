"""Rates of emulated devices as they are inside a training step: small reference steps under the profiler.

What single calls reach says little of a step on a host: layers lie in loops, operands come from memory that other
devices fill as well, and the compiler joins ops as it likes. So the seconds of the reference steps are laid to the
derived steps that they come from (`shared_seconds`), and compared with what `cost` counts for these.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import jax
import msgspec
import numpy as np
import optax
from scipy.optimize import nnls

from meshwright.algebra.steps import Step
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
from meshwright.profile.subjects import random_rows
from meshwright.profile.times import shared_seconds
from meshwright.spec.calibration import Calibration, HostRates, Pace
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh

ROUNDS, STEPS_A_ROUND, WARMUP_STEPS = 3, 2, 3
"""The steps are profiled in turns, so that other work on the machine meets them alike; medians of all that count."""


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A step that the machine is measured with: its batch split over the devices, and where possible its weights."""

    model: Model
    job: Job
    remat: str

    def strategy(self, num_devices: int) -> Strategy:
        """Weights are sharded where their widths are multiples of the devices."""
        sharded = all(one.model.d_model % num_devices == 0 for one in REFERENCES)
        return Strategy(mesh=make_mesh({"fsdp" if sharded else "data": num_devices}), remat=self.remat, state="fp32")

    def job_for(self, num_devices: int) -> Job:
        """The job with as many sequences for each device as for any other."""
        rows = -(-self.job.batch_seqs // num_devices) * num_devices
        return msgspec.structs.replace(self.job, batch_seqs=rows)


def _model(name: str, d_model: int, d_ff: int, num_kv_heads: int, head_dim: int, vocab_size: int) -> Model:
    return Model(
        name=name,
        family="llama",
        num_layers=2,
        num_heads=8,
        d_model=d_model,
        d_ff=d_ff,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
    )


NARROW = Reference(model=_model("narrow", 256, 704, 4, 32, 1536), job=Job(batch_seqs=16, seq_len=128), remat="none")
WIDE = Reference(model=_model("wide", 512, 1280, 2, 64, 3072), job=Job(batch_seqs=8, seq_len=256), remat="none")
LONG = Reference(model=_model("long", 176, 480, 2, 32, 1024), job=Job(batch_seqs=8, seq_len=512), remat="block")
REFERENCES = (NARROW, WIDE, LONG)
"""Two widths, of heads too, products of many shapes, attention on few and on many keys at a time, results that are
kept and results that are not: enough to tell the parts of every pace from each other."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One reference step: its prices by `cost`, seconds by derived step, and those in which no device works.

    All for one execution of the step, as the machine spends them for all devices together.
    """

    priced: PricedStrategy
    seconds: dict[str, float]
    gaps_s: float

    @property
    def outside_s(self) -> float:
        """Seconds of instructions that come from no derived step."""
        return sum(spent for name, spent in self.seconds.items() if name.startswith(OUTSIDE))

    @property
    def moving(self) -> frozenset[str]:
        """Labels of the collectives."""
        return frozenset(label_text(cost.step) for cost in self.priced.costs.all if cost.step.is_collective)

    @property
    def left_s(self) -> float:
        """What is left of the step beside the work of single devices: collectives and gaps."""
        return self.gaps_s + sum(self.seconds.get(name, 0.0) for name in self.moving)


def measure_references(calibration: Calibration, num_devices: int) -> list[Measured]:
    """The reference steps run on all devices."""
    with tempfile.TemporaryDirectory() as folder:
        running = [
            Running(one.model, one.job_for(num_devices), one.strategy(num_devices), Path(folder) / one.model.name)
            for one in REFERENCES
        ]
        for number in range(ROUNDS):
            for step in running:
                step.profile(number)
    return [step.measured(calibration) for step in running]


class Running:
    """A step that is compiled and warm, and what its rounds under the profiler showed."""

    def __init__(self, model: Model, job: Job, strategy: Strategy, folder: Path) -> None:
        self.model, self.job, self.strategy, self.folder = model, job, strategy, folder
        step = TrainStep(model, strategy, optimizer=optax.adamw(1e-4), max_grad_norm=1.0)
        self.state = step.init(0)
        self.batch = step.place(random_rows(step, job, seed=0))
        self.compiled = step.compile.lower(self.state, self.batch).compile()
        self.program = parse_program(self.compiled.as_text() or "")
        self.steps: list[dict[str, float]] = []
        self.gaps_s: list[float] = []
        self.traced_s: list[float] = []
        self.plain_s: list[float] = []
        for _ in range(WARMUP_STEPS):
            self._run()

    def _run(self) -> None:
        self.state, metrics = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))

    def profile(self, number: int) -> None:
        """So many steps by the clock, after one that is not counted, and as many under the profiler."""
        folder = self.folder / str(number)
        self._run()
        for _ in range(STEPS_A_ROUND):
            start = time.perf_counter()
            self._run()
            self.plain_s.append(time.perf_counter() - start)
        with traced(folder):
            for one in range(STEPS_A_ROUND):
                with jax.profiler.TraceAnnotation(STEP, step=one):
                    self._run()
        trace = load_trace(newest_trace(folder), self.program)
        for window in trace.windows:
            spent = shared_seconds(msgspec.structs.replace(trace, windows=(window,)), self.program)
            self.traced_s.append(window.end_s - window.start_s)
            self.gaps_s.append(self.traced_s[-1] - sum(spent.values()))
            self.steps.append(defaultdict(float))
            for op, seconds in spent.items():
                self.steps[-1][self.program.fact(op).step] += seconds

    def measured(self, calibration: Calibration) -> Measured:
        """The medians over all steps, at the pace of those that ran without the profiler."""
        pace = median(self.plain_s) / median(self.traced_s)
        names = {name for step in self.steps for name in step}
        cluster = parse_cluster(f"cpu:{self.strategy.num_chips}")
        return Measured(
            priced=price_strategy(Setting(self.model, cluster, self.job, calibration), self.strategy),
            seconds={name: pace * median(step[name] for step in self.steps) for name in names},
            gaps_s=pace * median(self.gaps_s),
        )


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What took some seconds: amounts of things, each of which takes time."""

    amounts: Amounts
    seconds: float


class StepSpent(Spent, frozen=True, kw_only=True):
    """All executions of a derived step on one device."""

    step: Step


def host_rates(references: Sequence[Measured]) -> HostRates:
    """The rates that the reference steps ran at."""
    spent = [one for reference in references for one in _spent(reference)]
    kinds: dict[str, list[StepSpent]] = defaultdict(list)
    for one in spent:
        if not is_product(one.step) and (one.amounts.byte or one.amounts.score):
            kinds[one.step.op].append(one)
    rest = [one for op, found in kinds.items() for one in found if op != "adamw" and one.amounts.byte]
    ops = {op: pace(found) for op, found in kinds.items()}
    outside = pace([_outside(reference, kinds["adamw"]) for reference in references])
    ops["adamw"] = msgspec.structs.replace(ops["adamw"], byte=ops["adamw"].byte + outside.call)
    return HostRates(
        product=pace([one for one in spent if is_product(one.step)]),
        ops=ops,
        stream=pace(rest),
        loop_byte=outside.byte,
        **_gaps(references),
    )


def _spent(reference: Measured) -> list[StepSpent]:
    """Every derived step of one device with its seconds; steps of one label are one."""
    found: dict[str, list[StepSpent]] = defaultdict(list)
    derived, sizes = reference.priced.derived, reference.priced.sizes
    kept = kept_results(derived)
    for cost in reference.priced.costs.all:
        if not cost.step.is_collective:
            amounts = amounts_of(cost.step, sizes, kept=kept.get((cost.step.block, cost.step.phase), frozenset()))
            each = {name: float(getattr(amounts, name) * cost.count) for name in Amounts.__struct_fields__}
            found[label_text(cost.step)].append(StepSpent(step=cost.step, amounts=Amounts(**each), seconds=0.0))
    return [
        StepSpent(step=steps[0].step, amounts=_total(steps), seconds=reference.seconds.get(label, 0.0))
        for label, steps in found.items()
    ]


def _total(spent: Sequence[Spent]) -> Amounts:
    return Amounts(**{name: sum(getattr(one.amounts, name) for one in spent) for name in Amounts.__struct_fields__})


def pace(spent: Sequence[Spent]) -> Pace:
    """Seconds of a unit of each amount: the least squares of the seconds' relative deviations, weighted with the
    seconds, none of them negative. Amounts of which there are none take no time."""
    rows = [one for one in spent if one.seconds > 0]
    names = [name for name in Amounts.__struct_fields__ if any(getattr(one.amounts, name) for one in rows)]
    if not names:
        return Pace()
    matrix = np.array([[getattr(one.amounts, name) for name in names] for one in rows], float)
    seconds = np.array([one.seconds for one in rows])
    scale, weights = matrix.max(axis=0), 1 / np.sqrt(seconds)
    found, _ = nnls(matrix / scale * weights[:, None], seconds * weights)
    return Pace(**{name: float(each) for name, each in zip(names, found / scale, strict=True)})


def _outside(reference: Measured, updates: Sequence[StepSpent]) -> Spent:
    """What instructions of no derived step do: as ``byte`` the copies of loops, as ``call`` the bytes of the update,
    whose norms, copies and counters they are as well."""
    mine = [one for one in updates if any(one.step is cost.step for cost in reference.priced.costs.all)]
    amounts = Amounts(byte=_loop_bytes(reference), call=sum(one.amounts.byte for one in mine))
    return Spent(amounts=amounts, seconds=reference.outside_s)


def _loop_bytes(reference: Measured) -> float:
    priced = reference.priced
    layers = [block for block in priced.derived.blocks if block.block.carry]
    return float(sum(block.repeat * sum(loop_bytes(block, priced.derived, priced.sizes)) for block in layers))


def _gaps(references: Sequence[Measured]) -> Mapping[str, float]:
    """What is left beside the work of devices: for several by their collectives, for one by its ops.

    The devices of a collective wait for each other: as many times its latency, and the time of its bytes, in a row.
    """
    moves = [_moves(reference) for reference in references]
    if any(one.amounts.call for one in moves):
        found = pace(moves)
        return {"meets": found.call, "waits": found.byte}
    left = sum(reference.left_s for reference in references)
    sizes = references[0].priced.sizes
    costs = [cost for reference in references for cost in reference.priced.costs.all]
    return {"kernel_s": left / sum(float(num_kernels(cost.step, sizes) * cost.count) for cost in costs)}


def _moves(reference: Measured) -> Spent:
    """The collectives of a step: as ``call`` their latency and as ``byte`` the time of their bytes, in a row, and what
    is left for them."""
    costs = [cost for cost in reference.priced.costs.all if cost.step.is_collective]
    in_a_row = Amounts(
        call=sum(float(cost.latency_s * cost.count) for cost in costs),
        byte=sum(float((cost.network_s - cost.latency_s) * cost.count) for cost in costs),
    )
    return Spent(amounts=in_a_row, seconds=reference.left_s)
