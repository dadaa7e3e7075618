"""Rates of emulated devices as they are inside a training step: small reference steps under the profiler.

What single calls reach says little of a step on a host: layers lie in loops, operands come from memory that other
devices fill as well, and the compiler joins ops as it likes. So the seconds of the reference steps are laid to the
derived steps that they come from (`profile_shared`), and compared with what `cost` counts for these.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import jax
import msgspec
import optax

from meshwright.algebra.steps import Step
from meshwright.cost.kernels import attended, is_product, num_kernels, tiled_share
from meshwright.cost.ops import is_attention
from meshwright.cost.pass_times import loop_bytes
from meshwright.cost.step_costs import StepCost
from meshwright.cost.train_step import PricedStrategy, price_strategy
from meshwright.measure.profile_classes import OUTSIDE, Facts
from meshwright.measure.profile_compare import label_text
from meshwright.measure.profile_events import STEP, load_trace, newest_trace
from meshwright.measure.profile_hlo import parse_module
from meshwright.measure.profile_run import random_rows, traced
from meshwright.measure.profile_shared import shared_seconds
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.calibration import AttentionRate, Calibration, HostRates
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh

ROUNDS, STEPS_A_ROUND, WARMUP_STEPS = 4, 2, 3
"""Both steps are profiled in turns, so that other work on the machine meets them alike; medians of all that count."""
NARROW = Model(
    name="narrow", family="llama", num_layers=2, d_model=256, d_ff=704, num_heads=8, num_kv_heads=4, head_dim=32,
    vocab_size=1536,
)  # fmt: skip
WIDE = Model(
    name="wide", family="llama", num_layers=2, d_model=512, d_ff=1280, num_heads=8, num_kv_heads=2, head_dim=64,
    vocab_size=3072,
)  # fmt: skip
REFERENCES = ((NARROW, Job(batch_seqs=16, seq_len=128)), (WIDE, Job(batch_seqs=8, seq_len=256)))
"""Steps of two widths, of heads too, with products of many shapes: enough for the two rates of each kind."""


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
        return frozenset(label_text(cost.step) for cost in self.priced.costs if cost.step.is_collective)

    @property
    def left_s(self) -> float:
        """What is left of the step beside the work of single devices: collectives and gaps."""
        return self.gaps_s + sum(self.seconds.get(name, 0.0) for name in self.moving)


def measure_references(calibration: Calibration, num_devices: int) -> list[Measured]:
    """Both reference steps run on all devices, their batch and where possible their weights split over these."""
    strategy = Strategy(mesh=make_mesh({_axis(num_devices): num_devices}), remat="none", state="fp32")
    with tempfile.TemporaryDirectory() as folder:
        running = [
            _Reference(model, _rows_for(job, num_devices), strategy, Path(folder) / model.name)
            for model, job in REFERENCES
        ]
        for number in range(ROUNDS):
            for one in running:
                one.profile(number)
    return [one.measured(calibration) for one in running]


def _axis(num_devices: int) -> str:
    """Weights are sharded where their widths are multiples of the devices."""
    return "data" if any(model.d_model % num_devices for model, _ in REFERENCES) else "fsdp"


def _rows_for(job: Job, num_devices: int) -> Job:
    """The job with as many sequences for each device as for any other."""
    return msgspec.structs.replace(job, batch_seqs=-(-job.batch_seqs // num_devices) * num_devices)


class _Reference:
    """A reference step that is compiled and warm, and what its rounds under the profiler showed."""

    def __init__(self, model: Model, job: Job, strategy: Strategy, folder: Path) -> None:
        self.model, self.job, self.strategy, self.folder = model, job, strategy, folder
        step = TrainStep(model, strategy, optimizer=optax.adamw(1e-4), max_grad_norm=1.0)
        self.state = step.init(0)
        self.batch = step.place(random_rows(step, job, seed=0))
        self.compiled = step.compile.lower(self.state, self.batch).compile()
        self.facts = Facts(parse_module(self.compiled.as_text() or ""), ridge=1.0)
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
        trace = load_trace(newest_trace(folder), self.facts.module)
        for window in trace.windows:
            spent = shared_seconds(msgspec.structs.replace(trace, windows=(window,)), self.facts)
            self.traced_s.append(window.end_s - window.start_s)
            self.gaps_s.append(self.traced_s[-1] - sum(spent.values()))
            self.steps.append(defaultdict(float))
            for op, seconds in spent.items():
                self.steps[-1][self.facts.of(op).step] += seconds

    def measured(self, calibration: Calibration) -> Measured:
        """The medians over all steps, at the pace of those that ran without the profiler."""
        pace = median(self.plain_s) / median(self.traced_s)
        names = {name for step in self.steps for name in step}
        cluster = parse_cluster(f"cpu:{self.strategy.num_chips}")
        return Measured(
            priced=price_strategy(self.model, cluster, self.job, self.strategy, calibration=calibration),
            seconds={name: pace * median(step[name] for step in self.steps) for name in names},
            gaps_s=pace * median(self.gaps_s),
        )


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Two things that each take time by a rate, and the seconds of both."""

    first: float
    second: float
    seconds: float


class StepSpent(Spent, frozen=True, kw_only=True):
    """All executions of a derived step: FLOPs and bytes, of attention FLOPs and scores that are computed."""

    step: Step


def host_rates(references: Sequence[Measured]) -> HostRates:
    """The rates that the reference steps ran at."""
    spent = [one for reference in references for one in _spent(reference)]
    products = two_rates([one for one in spent if is_product(one.step)])
    attention = {}
    for op in ("attention", "attention_backward"):
        flops_per_s, scores_per_s = two_rates([one for one in spent if one.step.op == op])
        attention[op] = AttentionRate(flops_per_s=flops_per_s, scores_per_s=scores_per_s)
    streams: dict[str, list[StepSpent]] = defaultdict(list)
    for one in spent:
        if not is_product(one.step) and not is_attention(one.step) and one.second:
            streams[one.step.op].append(one)
    rest = [one for found in streams.values() for one in found if one.step.op != "adamw"]
    loops = sum(_loop_bytes(reference) for reference in references)
    return HostRates(
        product_flops_per_s=products[0],
        product_bytes_per_s=products[1],
        attention=attention,
        op_bytes_per_s={op: _rate(found) for op, found in streams.items()},
        stream_bytes_per_s=_rate(rest),
        loop_bytes_per_s=loops / sum(reference.outside_s for reference in references),
        **_gaps(references),
    )


def _spent(reference: Measured) -> list[StepSpent]:
    """Every derived step of one device with its seconds; steps of one label are one."""
    found: dict[str, list[StepCost]] = defaultdict(list)
    for cost in reference.priced.costs:
        if not cost.step.is_collective:
            found[label_text(cost.step)].append(cost)
    return [_together(costs, reference, reference.seconds.get(label, 0.0)) for label, costs in found.items()]


def _together(costs: Sequence[StepCost], reference: Measured, seconds: float) -> StepSpent:
    step, sizes = costs[0].step, reference.priced.sizes
    first = sum(float(cost.flops * cost.count) for cost in costs)
    second = sum(float(cost.hbm_bytes * cost.count) for cost in costs)
    if is_attention(step):
        share = float(tiled_share(step, sizes))
        first, second = first * share, float(attended(step, sizes) * costs[0].count) * share
    return StepSpent(step=step, first=first, second=second, seconds=seconds)


def two_rates(spent: Sequence[Spent]) -> tuple[float, float]:
    """Rates of the two things, of the least squares of the seconds' relative deviations weighted with the seconds."""
    rows = [one for one in spent if one.seconds > 0]
    ff, fs, ss = (
        sum(_entry(one, a) * _entry(one, b) / one.seconds for one in rows)
        for a, b in (("first", "first"), ("first", "second"), ("second", "second"))
    )
    f, s = sum(one.first for one in rows), sum(one.second for one in rows)
    if not rows:
        return FASTEST, FASTEST
    determinant = ff * ss - fs * fs
    if determinant <= 1e-9 * ff * ss:  # all of one shape: nothing tells the two apart
        return (ff / f if f else FASTEST), FASTEST
    slow, slower = (f * ss - s * fs) / determinant, (s * ff - f * fs) / determinant
    if slow <= 0:
        return FASTEST, ss / s
    return (1 / slow, 1 / slower) if slower > 0 else (ff / f, FASTEST)


FASTEST = 1e15
"""Per second: for what no time can be seen to be spent on."""


def _entry(one: Spent, name: str) -> float:
    return float(getattr(one, name))


def _rate(spent: Sequence[Spent]) -> float:
    """Bytes per second of some steps together."""
    seconds = sum(one.seconds for one in spent)
    return min(sum(one.second for one in spent) / seconds, FASTEST) if seconds else FASTEST


def _loop_bytes(reference: Measured) -> float:
    priced = reference.priced
    layers = [block for block in priced.derived.blocks if block.block.carry]
    return float(sum(block.repeat * sum(loop_bytes(block, priced.derived, priced.sizes)) for block in layers))


def _gaps(references: Sequence[Measured]) -> Mapping[str, float]:
    """What is left beside the work of devices: for several by their collectives, for one by its ops.

    The devices of a collective wait for each other: as many times its latency, and the time of its bytes, in a row.
    """
    left = sum(reference.left_s for reference in references)
    moves = [_moves(reference) for reference in references]
    if sum(one.first for one in moves):
        meets, waits = two_rates(moves)
        return {"meets": 1 / meets, "waits": 1 / waits}
    sizes = references[0].priced.sizes
    costs = [cost for reference in references for cost in reference.priced.costs]
    return {"kernel_s": left / sum(float(num_kernels(cost.step, sizes) * cost.count) for cost in costs)}


def _moves(reference: Measured) -> Spent:
    """The collectives of a step: their latency and the time of their bytes in a row, and what is left for them."""
    costs = [cost for cost in reference.priced.costs if cost.step.is_collective]
    return Spent(
        first=sum(float(cost.latency_s * cost.count) for cost in costs),
        second=sum(float((cost.network_s - cost.latency_s) * cost.count) for cost in costs),
        seconds=reference.left_s,
    )
