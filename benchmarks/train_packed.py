"""Training steps on a CPU with packed documents and without, of this tree and, with --beside, of another.

python -m benchmarks.train_packed                       rows of 512 and of 2,048 tokens, this tree alone
python -m benchmarks.train_packed --beside ../earlier   the tree in that folder takes turns with this one

The model and the tokens of a step are those of `train_cpu.py` (26.7M parameters, 4,096 tokens). Documents have the
lengths of a geometric distribution with a mean of --mean tokens, packed with no gap; both trees get the same. Each
contestant is a process of its own; ratios are of the same round, a round is the median of --steps steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.train_cpu import CONFIG, Contestant

TOKENS = 4096


def packed(length: int, mean: int, step: int) -> dict[str, np.ndarray]:
    """A batch of TOKENS tokens in rows of documents, and without documents where ``mean`` is 0."""
    rng = np.random.default_rng(step)
    shape = TOKENS // length, length
    tokens = rng.integers(0, 16384, (shape[0], length + 1)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    if mean:
        starts = rng.random(shape) < 1 / mean
        starts[:, 0] = True
        rows = np.arange(length, dtype=np.int32)
        last = np.maximum.accumulate(np.where(starts, rows, 0), axis=1)
        batch |= {"documents": np.cumsum(starts, axis=1).astype(np.int32), "positions": (rows - last).astype(np.int32)}
    return batch


def serve(length: int, mean: int, layers: int) -> None:
    """Answers each line "<steps>" with the losses and seconds of so many further steps, as JSON."""
    import jax

    from meshwright.algebra.layers import ProgramOptions
    from meshwright.core.host_memory import keep_freed_memory
    from meshwright.parallel.train_step import TrainStep
    from meshwright.spec.hf.read import model_from_config
    from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment

    keep_freed_memory()
    config = {**CONFIG, "num_hidden_layers": layers, "model_type": "llama", "max_position_embeddings": length}
    strategy = Strategy(mesh=make_mesh({}), remat="none", state="fp32", assignment=standard_assignment(zero=2))
    options = ProgramOptions(documents=bool(mean))
    step = TrainStep(model_from_config(config, "packed"), strategy, options=options)
    state = step.init(0)
    count = 0
    for line in sys.stdin:
        losses, seconds = [], []
        for _ in range(int(line)):
            batch = packed(length, mean, count)
            started = time.perf_counter()
            state, metrics = step.step(state, step.place(batch))
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - started)
            losses.append(float(metrics.loss))
            count += 1
        print(json.dumps({"losses": losses, "seconds": seconds}), flush=True)


class Packed(Contestant):
    """A process that runs steps of one tree when asked."""

    def __init__(self, tree: Path, length: int, mean: int, layers: int) -> None:
        code = f"from benchmarks.train_packed import serve; serve({length}, {mean}, {layers})"
        here = Path(__file__).resolve().parent.parent
        env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{here}", "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=here
        )


def main() -> None:
    """Prints a line for each length, with documents and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="the folder of another tree")
    parser.add_argument("--lengths", default="512,2048")
    parser.add_argument("--mean", type=int, default=128, help="tokens of a document, in the mean")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    trees: dict[str, Path] = {"this": Path(__file__).resolve().parent.parent}
    if given.beside:
        trees["beside"] = given.beside.resolve()
    print(f"{given.layers} layers, {TOKENS} tokens a step, documents of {given.mean} tokens; seconds a step")
    for length in map(int, given.lengths.split(",")):
        cases = {(name, mean): tree for name, tree in trees.items() for mean in (0, given.mean)}
        running = {case: Packed(tree, length, case[1], given.layers) for case, tree in cases.items()}
        first = {case: one.run(3)["losses"] for case, one in running.items()}
        for mean in (0, given.mean):
            if given.beside and not np.allclose(first["this", mean], first["beside", mean], rtol=1e-5):
                raise SystemExit(f"losses differ: {first}. Nothing is timed.")
        times: dict[Any, list[float]] = {case: [] for case in cases}
        for _ in range(given.rounds):
            for case, one in running.items():
                times[case].append(statistics.median(one.run(1 + given.steps)["seconds"][1:]))
        for (name, mean), found in times.items():
            ratios = [x / y for x, y in zip(times["this", 0], found, strict=True)]
            text = f"{length:5} {name:>7} {'documents' if mean else 'plain':>9} {statistics.median(found):7.3f} s"
            text += f"  {statistics.median(ratios):.3f} x the speed of this, plain"
            if given.beside and name == "this":
                pairs = zip(times["beside", mean], found, strict=True)
                text += f"; {statistics.median(x / y for x, y in pairs):.3f} x that of the other tree"
            print(text, flush=True)
        for one in running.values():
            one.process.terminate()


if __name__ == "__main__":
    main()
