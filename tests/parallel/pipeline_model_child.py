"""One process of several that train one step in stages: ``python -m tests.parallel.pipeline_model_child WANTED CASES``.

``WANTED`` is a file with loss and gradients of one device, ``CASES`` are JSON: (axes, schedule, chunks, model) each.
Prints, for each case, the largest error of this process's blocks of loss and gradients.
"""

import json
import sys

import jax
import numpy as np

from meshwright.parallel.processes import start_processes
from meshwright.parallel.train_step import TrainStep
from tests.parallel.cases import DEEP, DEEP_MOE, keep_gradients, strategy_of
from tests.parallel.small import batch

MODELS = {model.name: model for model in (DEEP, DEEP_MOE)}
NUM_MICROBATCHES = 4


def error_of(wanted: dict, axes: dict[str, int], schedule: str, chunks: int, model: str) -> float:
    strategy = strategy_of(axes, schedule=schedule, chunks=chunks, num_microbatches=NUM_MICROBATCHES)
    step = TrainStep(MODELS[model], strategy, optimizer=keep_gradients())
    state, metrics = step.step(step.init(0), jax.tree.map(np.asarray, batch()))
    errors = [abs(float(metrics.loss.addressable_data(0)) / float(wanted[f"{model}/loss"]) - 1)]
    right = {name: wanted[f"{model}/{name}"] for name in state.opt_state}
    for name, whole in step.from_canonical(right).items():
        errors += [
            np.abs(np.asarray(shard.data) - whole[shard.index]).max() / np.abs(whole).max()
            for shard in state.opt_state[name].addressable_shards
        ]
    return float(max(errors))


def main(wanted: str, cases: str) -> None:
    start_processes()
    with np.load(wanted) as arrays:
        found = dict(arrays)
    for number, case in enumerate(json.loads(cases)):
        print(f"error {number} {error_of(found, *case):.3e}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
