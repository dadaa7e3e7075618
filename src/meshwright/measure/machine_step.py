"""Rates of emulated devices as they are inside a training step: small reference steps under the profiler.

What single calls reach says little of a step on a host: layers lie in loops, operands come from memory that other
devices fill as well, and the compiler joins ops as it likes. So the seconds of the reference steps are laid to the
derived steps that they come from (`profile_shared`), and compared with what `cost` counts for these.
"""

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

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
from meshwright.measure.profile_events import load_trace
from meshwright.measure.profile_hlo import load_module
from meshwright.measure.profile_run import record_steps
from meshwright.measure.profile_shared import shared_seconds
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.calibration import AttentionRate, Calibration, HostRates
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh

STEPS = 3
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
    """One reference step: its prices by `cost`, seconds by derived step, those of no step, and of the whole.

    All for one execution of the step, as the machine spends them for all devices together.
    """

    priced: PricedStrategy
    seconds: dict[str, float]
    outside_s: float
    step_s: float


def measure_references(calibration: Calibration, num_devices: int) -> list[Measured]:
    """Both reference steps run on all devices, sharded over them where there are several."""
    strategy = Strategy(mesh=make_mesh({"fsdp": num_devices}), remat="none", state="fp32")
    return [_measure(model, job, strategy, calibration) for model, job in REFERENCES]


def _measure(model: Model, job: Job, strategy: Strategy, calibration: Calibration) -> Measured:
    step = TrainStep(model, strategy, optimizer=optax.adamw(1e-4), max_grad_norm=1.0)
    cluster = parse_cluster(f"cpu:{strategy.num_chips}")
    with tempfile.TemporaryDirectory() as folder:
        recording = record_steps(step, job, folder=Path(folder), steps=STEPS)
        facts = Facts(load_module(recording.hlo), ridge=1.0)
        trace = load_trace(recording.trace, facts.module)
    priced = price_strategy(model, cluster, job, strategy, calibration=calibration)
    seconds: dict[str, float] = defaultdict(float)
    for op, spent in shared_seconds(trace, facts).items():
        seconds[facts.of(op).step] += spent
    outside_s = sum(spent for name, spent in seconds.items() if name.startswith(OUTSIDE))
    windows = [window.end_s - window.start_s for window in trace.windows]
    return Measured(priced=priced, seconds=dict(seconds), outside_s=outside_s, step_s=sum(windows) / len(windows))


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Executions of a derived step in one training step: two things that each take time by a rate, and the seconds."""

    step: Step
    first: float
    second: float
    seconds: float


def host_rates(references: Sequence[Measured]) -> HostRates:
    """The rates that the reference steps ran at."""
    spent = [one for reference in references for one in _spent(reference)]
    products = two_rates([one for one in spent if is_product(one.step)])
    attention = {}
    for op in ("attention", "attention_backward"):
        attention[op] = AttentionRate(*two_rates([one for one in spent if one.step.op == op]))
    streams: dict[str, list[Spent]] = defaultdict(list)
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
