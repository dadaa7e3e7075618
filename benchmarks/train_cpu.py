"""Training a llama of 26.7M parameters on CPU: meshwright beside PyTorch (transformers), eager and compiled.

python benchmarks/train_cpu.py            losses of 5 steps compared, then 5 rounds of 3 timed steps each
python benchmarks/train_cpu.py --quick    2 layers, 2 rounds of 2
python benchmarks/train_cpu.py --json     the figures alone, as JSON

Every contestant is a process of its own with the same weights, batches, AdamW, threads and environment. They take
turns, and ratios are of the same round, because a shared machine is now faster, now slower; a turn begins with a step
that is not timed, which brings memory back that was given up while others ran. Compiling is timed by itself.
torch.compile wants a C++ compiler.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
BATCH_SEQS, SEQ_LEN = 8, 512
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
"""AdamW; the decay is of matrices only."""

CONTESTANTS = ("meshwright", "eager", "compiled")
RELATIVE = 1e-5
"""Losses of the same step may differ by so much: they are sums in another order."""

HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""What GLIBC_TUNABLES says with --huge-pages: large blocks come in pages of 2 MiB, not 4 KiB."""

Step = Callable[[np.ndarray], float]
"""Tokens [B, T + 1] -> the loss before the update."""


def batches() -> Iterator[np.ndarray]:
    """Random rows of tokens, the same for everyone."""
    rng = np.random.default_rng(0)
    while True:
        yield rng.integers(0, CONFIG["vocab_size"], (BATCH_SEQS, SEQ_LEN + 1)).astype(np.int32)


# -- the contestants: each makes its step in a process of its own -----------------------------------------


def torch_step(kind: str, layers: int, weights: Path) -> Step:
    """LlamaForCausalLM with torch.optim.AdamW; the loss of transformers in its own words."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "num_hidden_layers": layers}, use_cache=False))
    if not weights.exists():
        save_file({n: p.contiguous() for n, p in model.state_dict().items()}, weights)
    model.load_state_dict(load_file(weights))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON)

    def loss_of(tokens: Any) -> Any:
        logits = model(input_ids=tokens[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    run = torch.compile(loss_of) if kind == "compiled" else loss_of

    def step(tokens: np.ndarray) -> float:
        loss = run(torch.from_numpy(tokens.astype(np.int64)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def meshwright_step(layers: int, weights: Path, remat: str | tuple[str, ...], axes: str = "") -> Step:
    """`TrainStep`, with memory kept as `meshwright train` keeps it: on one CPU device, or on those of ``axes``."""
    import jax
    from safetensors.numpy import load_file

    from meshwright.cli.fields import parse_mesh
    from meshwright.core.host_memory import keep_freed_memory
    from meshwright.nn.hf.weights import read_params
    from meshwright.parallel.mesh import emulate_devices
    from meshwright.parallel.train_step import State, TrainStep
    from meshwright.spec.hf.read import model_from_config
    from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment
    from meshwright.train.optimizers.table import make_optimizer
    from meshwright.train.settings import TrainSettings

    keep_freed_memory()
    model = model_from_config({**CONFIG, "num_hidden_layers": layers, "model_type": "llama"}, "train-cpu")
    settings = TrainSettings(
        learning_rate=LEARNING_RATE,
        schedule="constant",
        warmup_steps=0,
        beta1=BETAS[0],
        beta2=BETAS[1],
        epsilon=EPSILON,
        weight_decay=WEIGHT_DECAY,
    )
    mesh = make_mesh(parse_mesh(axes, "--axes") if axes else {})
    emulate_devices(math.prod(mesh.values()))
    strategy = Strategy(mesh=mesh, remat=remat, state="fp32", assignment=standard_assignment(zero=2))
    step = TrainStep(model, strategy, optimizer=make_optimizer(model, settings))
    params = jax.device_put(read_params(model, load_file(weights)), step.state_shardings.params)
    states = [State(params, step.init_optimizer(params))]

    def run(tokens: np.ndarray) -> float:
        batch = step.place({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        states[0], metrics = step.step(states[0], batch)
        jax.block_until_ready(states[0])
        return float(metrics.loss)

    return run


def serve(arguments: argparse.Namespace) -> None:
    """Answers each line "<steps>" with the losses and seconds of so many further steps, as JSON."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    kind, layers, weights = arguments.serve, arguments.layers, arguments.weights
    if kind == "meshwright":
        remat = tuple(arguments.remat) if arguments.remat[1:] else arguments.remat[0]
        step = meshwright_step(layers, weights, remat, arguments.axes)
    else:
        step = torch_step(kind, layers, weights)
    data = batches()
    for line in sys.stdin:
        losses, seconds = [], []
        for _ in range(int(line)):
            tokens = next(data)
            started = time.perf_counter()
            losses.append(step(tokens))
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"losses": losses, "seconds": seconds}), flush=True)


class Contestant:
    """A process that runs steps when asked."""

    def __init__(self, kind: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--serve", kind, "--weights", str(arguments.weights)]
        command += ["--layers", str(arguments.layers), "--threads", str(arguments.threads), "--remat", *arguments.remat]
        command += ["--axes", arguments.axes]
        threads = {"OMP_NUM_THREADS": str(arguments.threads), "JAX_PLATFORMS": "cpu"}
        tunables = {"GLIBC_TUNABLES": HUGE_PAGES} if arguments.huge_pages else {}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **threads, **tunables}
        )

    def run(self, steps: int) -> dict[str, list[float]]:
        """Losses and seconds of the next steps."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


# -- the comparison -----------------------------------------------------------------------------------


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every figure of a run. Raises SystemExit where losses differ."""
    found: dict[str, Any] = {"losses": {}, "first_step_s": {}, "tokens_per_s": {}}
    contestants: dict[str, Contestant] = {}
    # PyTorch makes the weights that the others read.
    for kind in ("eager", "compiled", "meshwright"):
        contestants[kind] = Contestant(kind, arguments)
        first = contestants[kind].run(arguments.loss_steps)
        found["losses"][kind] = first["losses"]
        found["first_step_s"][kind] = first["seconds"][0] - statistics.median(first["seconds"][1:])
    require_equal(found["losses"])
    turns: dict[str, list[float]] = {kind: [] for kind in CONTESTANTS}
    for _ in range(arguments.rounds):
        for kind in CONTESTANTS:
            turns[kind].append(statistics.median(contestants[kind].run(1 + arguments.steps)["seconds"][1:]))
    tokens = BATCH_SEQS * SEQ_LEN
    found["tokens_per_s"] = {kind: [tokens / seconds for seconds in turn] for kind, turn in turns.items()}
    found["ratio"] = {
        kind: statistics.median(other / own for other, own in zip(turns[kind], turns["meshwright"], strict=True))
        for kind in CONTESTANTS[1:]
    }
    return found


def require_equal(losses: dict[str, list[float]]) -> None:
    """Every contestant's losses are those of PyTorch eager."""
    for kind, found in losses.items():
        for number, (loss, expected) in enumerate(zip(found, losses["eager"], strict=True)):
            if abs(loss - expected) > RELATIVE * abs(expected):
                raise SystemExit(
                    f"step {number}: loss {loss:.6f} of {kind}, {expected:.6f} of eager. Nothing is timed."
                )


def show(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """The figures as text."""
    print(
        f"{arguments.layers} layers, {BATCH_SEQS} rows of {SEQ_LEN} tokens, {arguments.threads} threads, remat", end=" "
    )
    print(" ".join(arguments.remat), end=", ")
    print(f"{'huge' if arguments.huge_pages else 'ordinary'} pages; losses of the first steps:")
    for kind in CONTESTANTS:
        print(f"{kind:>12}  " + "  ".join(f"{loss:.6f}" for loss in found["losses"][kind]))
    print(f"{'':>12}  {'tokens/s':>9}  {'lowest':>9}  {'highest':>9}  {'compiling':>9}  meshwright is")
    for kind in CONTESTANTS:
        rates, ratio = found["tokens_per_s"][kind], found["ratio"].get(kind)
        print(f"{kind:>12}  {statistics.median(rates):9.0f}  {min(rates):9.0f}  {max(rates):9.0f}", end="  ")
        print(f"{found['first_step_s'][kind]:7.1f} s  {f'{ratio:.2f} x as fast' if ratio else ''}")
    print(f"against the better of the two: {min(found['ratio'].values()):.2f}")


def main() -> None:
    """Runs a contestant or the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 layers, 2 rounds of 2 steps")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--loss-steps", type=int, default=5, help="steps whose losses are compared")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--remat", nargs="+", default=["none"], help="a policy of meshwright, or names of results")
    parser.add_argument("--axes", default="", help="mesh axes of meshwright's devices on these threads, such as fsdp=2")
    parser.add_argument("--huge-pages", action="store_true", help="every contestant with pages of 2 MiB")
    parser.add_argument("--serve", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    if arguments.quick:
        arguments.layers, arguments.rounds, arguments.steps, arguments.loss_steps = 2, 2, 2, 3
    with tempfile.TemporaryDirectory() as folder:
        arguments.weights = Path(folder) / "weights.safetensors"
        found = compare(arguments)
    print(json.dumps(found)) if arguments.json else show(found, arguments)


if __name__ == "__main__":
    main()
