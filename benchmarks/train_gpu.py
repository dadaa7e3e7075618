"""Training steps of llamas of 1B and of 8B dims on one GPU: tokens/s and MFU against the datasheet's dense bf16 peak.

python benchmarks/train_gpu.py                 every case that fits, 10 timed steps each
python benchmarks/train_gpu.py --case 8b-4096  one case
python benchmarks/train_gpu.py --tiny          the same program at toy size on any backend, to see that it runs
python benchmarks/train_gpu.py --json          the figures alone, as JSON

Weights and gradients are bf16, Adam's moments float32, attention is the platform's fused kernel. MFU counts 6 FLOPs per
matrix parameter and token and 12 B T T N H per layer, the masked half of attention included (How to Scale Your Model,
section 4); "causal" is the same with half of attention. A case that runs out of memory says so and the others go on.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from typing import Any

import jax
import msgspec
import numpy as np

from meshwright.cost.work.ops import model_flops
from meshwright.nn.attention.platform import default_platform
from meshwright.parallel.train_step import TrainStep
from meshwright.spec import catalogue
from meshwright.spec.chip import chip
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh
from meshwright.train.optimizers.table import make_optimizer
from meshwright.train.settings import TrainSettings

CHIPS = ("a100", "h100", "h200", "b200")
"""Chips of the catalogue whose name is a part of the device's; the peak is the datasheet's, as the catalogue has it."""

STATE = "bf16-adam"


class Case(msgspec.Struct, frozen=True):
    """A model by its dims, how many layers of it, rows of a batch, and what is kept for the backward pass."""

    name: str
    model: str
    layers: int
    batch_seqs: int
    seq_len: int
    remat: str


CASES = (
    Case("1b-4096", "llama3.2-1b", 16, 8, 4096, "none"),
    Case("1b-8192", "llama3.2-1b", 16, 4, 8192, "none"),
    Case("8b-4096", "llama3-8b", 8, 8, 4096, "none"),
    Case("8b-8192", "llama3-8b", 8, 4, 8192, "none"),
)
TINY = tuple(Case(c.name, c.model, 2, 2, 64, c.remat) for c in CASES if c.seq_len == 4096)


def model_of(case: Case, *, tiny: bool) -> Model:
    """The catalogue's model with fewer layers; toy widths with ``tiny``."""
    model = catalogue.load_model(case.model)
    narrow: dict[str, Any] = {"d_model": 64, "d_ff": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return msgspec.structs.replace(model, num_layers=case.layers, **(narrow | {"vocab_size": 512} if tiny else {}))


def measure(case: Case, *, steps: int, tiny: bool) -> dict[str, Any]:
    """Compile time, seconds of each timed step, the losses, and the most memory in use."""
    model = model_of(case, tiny=tiny)
    settings = TrainSettings(learning_rate=3e-4, schedule="constant", warmup_steps=0)
    strategy = Strategy(mesh=make_mesh({}), remat=case.remat, state=STATE)
    step = TrainStep(model, strategy, optimizer=make_optimizer(model, settings, STATE))
    state = step.init(0)
    rng = np.random.default_rng(0)

    def batch() -> Any:
        rows = rng.integers(0, model.vocab_size, (case.batch_seqs, case.seq_len + 1), dtype=np.int32)
        return step.place({"tokens": rows[:, :-1], "labels": rows[:, 1:]})

    batches = [batch() for _ in range(4)]
    started = time.perf_counter()
    state, metrics = step.step(state, batches[0])
    losses = [float(metrics.loss)]
    first = time.perf_counter() - started
    seconds = []
    for number in range(2 + steps):
        started = time.perf_counter()
        state, metrics = step.step(state, batches[number % len(batches)])
        losses.append(float(metrics.loss))
        seconds.append(time.perf_counter() - started)
    in_use = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {"first_step_s": first, "seconds": seconds[2:], "losses": losses, "peak_bytes": in_use}


def figures(case: Case, found: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """What is printed of a case."""
    model = model_of(case, tiny=tiny)
    job = Job(batch_seqs=case.batch_seqs, seq_len=case.seq_len)
    step_s = statistics.median(found["seconds"])
    name = next((name for name in CHIPS if name in jax.devices()[0].device_kind.lower()), None)
    peak = chip(name).peak_flops["bf16"] if name else None
    shares = {
        name: model_flops(model, job, causal=causal) / step_s / peak if peak else None
        for name, causal in (("mfu", False), ("mfu_causal", True))
    }
    rate = job.tokens_per_step / step_s
    return {"case": case.name, "step_s": step_s, "tokens_per_s": rate, **shares, **found}


def main() -> None:
    """Runs the cases one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[c.name for c in CASES])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--remat", help="a policy in place of each case's own")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if default_platform() != "cuda" and not arguments.tiny:
        raise SystemExit(
            f"JAX runs on {default_platform()}: an NVIDIA GPU is needed, or --tiny to see the program run."
        )
    device = jax.devices()[0]
    cases = [c for c in (TINY if arguments.tiny else CASES) if not arguments.case or c.name in arguments.case]
    results = []
    if not arguments.json:
        print(f"{datetime.date.today()}, one {device.device_kind}, jax {jax.__version__}, state {STATE}")
        print(
            f"{'case':>9} {'layers':>6} {'batch':>11} {'remat':>10} {'step':>9} {'tokens/s':>9} {'MFU':>6} "
            f"{'causal':>6} {'first':>7} {'peak':>9}"
        )
    for case in cases:
        case = msgspec.structs.replace(case, remat=arguments.remat) if arguments.remat else case
        try:
            found = figures(case, measure(case, steps=arguments.steps, tiny=arguments.tiny), tiny=arguments.tiny)
        except jax.errors.JaxRuntimeError as error:
            results.append({"case": case.name, "error": str(error).splitlines()[0]})
            print(f"{case.name:>9}  {results[-1]['error'][:100]}", file=sys.stderr)
            continue
        results.append(found)
        if not arguments.json:
            show(case, found)
    if arguments.json:
        print(json.dumps({"device": device.device_kind, "jax": jax.__version__, "state": STATE, "cases": results}))


def show(case: Case, found: dict[str, Any]) -> None:
    """One line of the table."""
    share = ["-" if found[name] is None else f"{found[name]:.1%}" for name in ("mfu", "mfu_causal")]
    size = f"{case.batch_seqs} x {case.seq_len}"
    print(f"{case.name:>9} {case.layers:6} {size:>11} {case.remat:>10} {found['step_s'] * 1e3:6.1f} ms", end="")
    print(f" {found['tokens_per_s']:9,.0f} {share[0]:>6} {share[1]:>6} {found['first_step_s']:5.1f} s", end="")
    print(f" {found['peak_bytes'] / 1e9:6.1f} GB", flush=True)


if __name__ == "__main__":
    main()
