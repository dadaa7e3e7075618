"""The derived training step beside what XLA makes of the same model and shardings (GSPMD), on 8 emulated devices.

python -m benchmarks.gspmd [rounds]

For each strategy three programs with the same inputs and outputs, laid out alike, first shown to give equal losses:

- derived: `TrainStep`, the derived collectives written out inside `shard_map`
- constrained: `TrainStep(form="gspmd")`, the derived local ops under `jit`, each result constrained to its sharding
- plain: `jax.grad` of the logits and the loss under `jit`, with nothing said but where inputs and outputs lie

Collectives are counted in the compiled HLO, loops included, and their bytes as what a device sends round rings.
Times are ratios of the same round, since machines are shared; emulated devices share their memory, so that times say
little of links and much of what is computed twice.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import datetime
import math
import platform
import statistics
import sys
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from tests.logits import logits_fn

from meshwright.hlo.collectives import CompiledCollective, collectives
from meshwright.parallel.train_step import Batch, State, TrainStep
from meshwright.report.answer import Table, as_markdown
from meshwright.spec.catalogue import load_model
from meshwright.spec.strategy import Strategy, make_mesh

MODEL = msgspec.structs.replace(load_model("tiny"), num_layers=4)
BATCH_SEQS, SEQ_LEN = 8, 128
STRATEGIES = ({"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2})
SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A", "permute": "CP"}
RELATIVE = 1e-5


def plain_step(step: TrainStep) -> Any:
    """The same step by JAX alone: gradients of the mean loss, then the optimizer, jitted with the same shardings."""
    logits = logits_fn(step.model)

    def loss(params: Any, batch: Batch) -> jax.Array:
        each = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["tokens"]), batch["labels"])
        return jnp.sum(each) / batch["num_labels"]

    def run(state: State, batch: Batch) -> tuple[State, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return State(*step.optimizer.update(grads, state.opt_state, state.params)), value

    shardings = (step.state_shardings, step.batch_shardings)
    return jax.jit(run, in_shardings=shardings, out_shardings=(step.state_shardings, None), donate_argnums=0)


def sent_bytes(found: CompiledCollective, mesh: dict[str, int]) -> float:
    """What each device sends of one collective round a ring, all its runs together."""
    size = math.prod(mesh[axis] for axis in found.axes)
    share = {"all_reduce": 2 * (size - 1) / size, "all_to_all": (size - 1) / size**2, "permute": 1.0}
    return found.total_bytes * share.get(found.kind, (size - 1) / size)


class Contestant:
    """One compiled program and its state."""

    def __init__(self, step: TrainStep, program: Any, batch: Batch) -> None:
        self.state, self.batch = step.init(0), batch
        self.program = program.lower(self.state, batch).compile()

    def run(self) -> tuple[float, float]:
        """The loss before the update, and seconds."""
        start = time.perf_counter()
        self.state, found = self.program(self.state, self.batch)
        loss = float(getattr(found, "loss", found))
        jax.block_until_ready(self.state)
        return loss, time.perf_counter() - start

    def temporary_bytes(self) -> int:
        return int(self.program.memory_analysis().temp_size_in_bytes)

    def traffic(self, mesh: dict[str, int]) -> tuple[str, float]:
        """``34 AG, 16 RS``, and the bytes that a device sends."""
        found = collectives(self.program.as_text(), mesh)
        counts = Counter[str]()
        for one in found:
            counts[one.kind] += one.trips * one.num_arrays
        words = ", ".join(f"{counts[kind]} {short}" for kind, short in SHORT.items() if counts[kind])
        return words, sum(sent_bytes(one, mesh) for one in found)


def contestants(axes: dict[str, int]) -> dict[str, Contestant]:
    """The three programs of a strategy. Raises AssertionError unless their first losses are equal."""
    strategy = Strategy(mesh=make_mesh(axes), state="fp32", remat="none")
    derived, constrained = TrainStep(MODEL, strategy), TrainStep(MODEL, strategy, form="gspmd")
    rows = np.random.default_rng(0).integers(0, MODEL.vocab_size, (BATCH_SEQS, SEQ_LEN + 1)).astype(np.int32)
    batch = derived.place({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
    programs = {"derived": derived.compile, "constrained": constrained.compile, "plain": plain_step(derived)}
    found = {name: Contestant(derived, program, batch) for name, program in programs.items()}
    losses = [one.run()[0] for one in found.values()]
    assert max(losses) - min(losses) <= RELATIVE * losses[0], f"losses differ: {losses}"
    return found


def rows_of(axes: dict[str, int], rounds: int) -> list[list[Any]]:
    """A row of the table for each program."""
    found = contestants(axes)
    seconds = [{name: one.run()[1] for name, one in found.items()} for _ in range(rounds)]
    mesh, table = make_mesh(axes), list[list[Any]]()
    words = " ".join(f"{axis} {size}" for axis, size in axes.items())
    for name, one in found.items():
        counts, sent = one.traffic(mesh)
        ratio = statistics.median(turn[name] / turn["derived"] for turn in seconds)
        memory = one.temporary_bytes()
        table.append([words, name, counts, round(sent / 1e6, 2), round(memory / 1e6, 1), round(ratio, 2)])
    return table


def main(rounds: int) -> None:
    """The table of all strategies."""
    where = f"{platform.machine()}, {os.cpu_count()} cores, jax {jax.__version__}"
    tokens = f"{BATCH_SEQS} sequences of {SEQ_LEN}"
    print(f"{datetime.date.today()} {MODEL.name} of {MODEL.num_layers} layers, {tokens}, fp32, remat none; {where}")
    print(f"MB: sent by a device, and its temporaries; time: over the derived step's, median of {rounds} rounds")
    header = ["strategy", "program", "collectives", "sent MB", "temp MB", "time"]
    print(as_markdown(Table(header, [row for axes in STRATEGIES for row in rows_of(axes, rounds)])), end="")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
