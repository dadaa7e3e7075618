"""What weights in fewer bits cost in accuracy, and what they save: a small llama on the text of this documentation.

    python -m benchmarks.quantised_accuracy [--steps 600]

A llama over bytes trains on docs/*.md, without the last tenth of each file. Then a `SlotEngine` goes
through rows of what was held out, one token at a time, with its weights in each dtype and a cache in fp32. Printed are
the loss in nats a byte, the mean divergence KL(fp32 || dtype) of the next byte's probabilities, how often the likeliest
byte is the same, and the bytes of weights on the device and of a step of one sequence, as derived.
"""

import argparse
import os
import platform
import time
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshwright.algebra.generation.program import Storage, WeightStorage, weight_dtype
from meshwright.cost.setting import Setting
from meshwright.cost.work.ops import op_hbm_bytes
from meshwright.nn.weights import Params
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.parallel.train_step import TrainStep
from meshwright.serve.offline.slots import SlotEngine
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh

SIZES = {"d_model": 128, "d_ff": 384, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "vocab_size": 256}
MODEL = Model(name="bytes", family="llama", num_layers=4, max_positions=256, **SIZES)  # type: ignore[arg-type]
LENGTH, BATCH, ROWS = 128, 8, 64
PROMPT = 8
ONE = Strategy(mesh=make_mesh({}), state="fp32", remat="none")


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and bytes held out."""
    files = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    whole = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
    parts = [np.split(text, [len(text) * 9 // 10]) for text in whole]
    return tuple(np.concatenate(part).astype(np.int32) for part in zip(*parts, strict=True))  # type: ignore[return-value]


def rows(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return text[starts[:, None] + np.arange(LENGTH + 1)]


def trained(text: np.ndarray, steps: int) -> Params:
    """Returns the weights after so many steps."""
    rate = optax.warmup_cosine_decay_schedule(0, 4e-3, 30, steps, 1e-4)
    step = TrainStep(MODEL, ONE, optimizer=optax.adamw(rate, weight_decay=0.1), max_grad_norm=1.0)
    state, rng = step.init(0), np.random.default_rng(0)
    for count in range(1, steps + 1):
        found = rows(text, rng.integers(0, len(text) - LENGTH, BATCH))
        state, metrics = step.step(state, {"tokens": found[:, :-1], "labels": found[:, 1:]})
        if count % 100 == 0:
            print(f"step {count}: loss {float(metrics.loss):.3f}", flush=True)
    return state.params


def log_probabilities(step: PackedStep, params: Params, found: np.ndarray) -> np.ndarray:
    """Returns the log-probabilities [rows, positions, V] of the byte after each position from PROMPT on."""
    engine, first = SlotEngine(step), []
    state = engine.init_decode_state()
    for slot, row in enumerate(found):
        prefix = engine.prefill(params, row[:PROMPT])
        first.append(np.asarray(prefix.logits))
        state = engine.insert(prefix, state, slot)
    every = [np.stack(first)]
    for at in range(PROMPT, LENGTH):
        state, logits = engine.generate(params, state._replace(tokens=found[:, at]))
        every.append(np.asarray(logits))
    return np.asarray(jax.nn.log_softmax(jnp.asarray(np.stack(every, 1)), axis=-1))


def step_bytes(step: PackedStep) -> float:
    """Returns the bytes that a step of one sequence in the middle of its positions moves, as derived."""
    job = Job(kind="decode", batch_seqs=1, seq_len=LENGTH // 2)
    sizes = Setting(MODEL, parse_cluster("cpu"), job, None, storage=step.storage).sizes(ONE)
    local = ((block.block.repeat, s) for block in step.derived.blocks for s in block.forward)
    return sum(repeat * op_hbm_bytes(s, sizes) for repeat, s in local if not s.is_collective)


def main() -> None:
    """Trains, measures each dtype, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    asked = parser.parse_args()
    text, held_out = texts()
    params = trained(text, asked.steps)
    found = rows(held_out, np.linspace(0, len(held_out) - LENGTH - 1, ROWS).astype(int))
    labels = found[:, PROMPT:, None]
    where = f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}, load {os.getloadavg()[0]:.0f}"
    print(f"{time.strftime('%Y-%m-%d')}, {where}")
    print(f"{MODEL.num_layers} layers of {SIZES}, {asked.steps} steps of {BATCH} x {LENGTH} bytes of docs/*.md")
    print(f"{labels.size:,} bytes held out, after {PROMPT} to {LENGTH} before them")
    print(
        f"{'weights':10} {'nats a byte':>12} {'more':>9} {'KL':>9} {'same byte':>10} {'weights MB':>11} {'step MB':>8}"
    )
    exact = None
    for weights in get_args(WeightStorage):
        storage = Storage(page_len=LENGTH, cache_dtype="fp32", weights=weight_dtype(weights))
        step = PackedStep(MODEL, ONE, max_len=LENGTH, max_seqs=ROWS, storage=storage)
        placed = step.place(params)
        logs = log_probabilities(step, placed, found)
        loss = -float(np.take_along_axis(logs, labels, -1).mean())
        exact = (logs, loss) if exact is None else exact
        divergence = float((np.exp(exact[0]) * (exact[0] - logs)).sum(-1).mean())
        same = float((logs.argmax(-1) == exact[0].argmax(-1)).mean())
        held = sum(array.nbytes for array in jax.tree.leaves(placed))
        name = "fp32" if weights == "as they are" else weights
        print(
            f"{name:10} {loss:12.4f} {loss - exact[1]:+9.4f} {divergence:9.5f} {same:10.1%} {held / 1e6:11.2f} "
            f"{step_bytes(step) / 1e6:8.2f}"
        )


if __name__ == "__main__":
    main()
