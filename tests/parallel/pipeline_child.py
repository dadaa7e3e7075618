"""One process of several that run pipelines together: ``python -m tests.parallel.pipeline_child 1f1b gpipe``.

Prints, for each schedule, the largest error of this process's blocks of loss and gradients.
"""

import sys

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshwright.algebra.schedules.registry import build, default_chunks
from meshwright.parallel.mesh import device_mesh
from meshwright.parallel.pipeline.stages import layer_rows
from meshwright.parallel.processes import start_processes
from tests.parallel.pipeline_toy import SPECS, data, lowered, plain_loss, reordered


def placed(tree, specs, mesh):
    """Every process has the whole arrays, and gives its devices their blocks."""
    return jax.tree.map(
        lambda a, spec: jax.make_array_from_callback(a.shape, NamedSharding(mesh, spec), lambda index: a[index]),
        jax.tree.map(np.asarray, tree),
        specs,
    )


def error_of(name: str) -> float:
    mesh = device_mesh({"pipeline": jax.device_count()})
    schedule = build(name, stages=jax.device_count(), microbatches=8, chunks=default_chunks(name))
    weights, inputs = data(schedule.num_virtual_stages, 8)
    loss, wanted = jax.value_and_grad(plain_loss)(weights, inputs)
    order = layer_rows(schedule, ("layer",) * schedule.num_virtual_stages)["layer"]
    stored = placed(reordered(weights, order), SPECS, mesh)
    everywhere = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), inputs)
    rows = placed(inputs, everywhere, mesh)
    sums, grads = lowered(schedule, mesh, stored, rows).compile()(stored, rows)
    errors = [abs(float(sums["loss"].addressable_data(0)) / float(loss) - 1)]
    for found, right in zip(jax.tree.leaves(grads), jax.tree.leaves(reordered(wanted, order)), strict=True):
        whole = np.asarray(right)
        errors += [
            np.abs(np.asarray(shard.data) - whole[shard.index]).max() / np.abs(whole).max()
            for shard in found.addressable_shards
        ]
    return float(max(errors))


def main(*names: str) -> None:
    start_processes()
    for name in names:
        print(f"error {name} {error_of(name):.3e}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
