"""Steps of one sharded product run on devices: what `shard --run` does."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.nn.collectives import communicate
from meshwright.nn.ops.einsum import contract_step as einsum
from meshwright.parallel.mesh import device_mesh, named_sharding, partition_spec


def run_steps(
    steps: Sequence[Step], values: Mapping[ShardedArray, np.ndarray], mesh_axes: Mapping[str, int]
) -> np.ndarray:
    """The global result of the last step, from global input values, on the first devices of this machine."""
    mesh = device_mesh(mesh_axes)
    arrays = list(values)
    result = steps[-1].result

    def body(*blocks: jax.Array) -> jax.Array:
        env = dict(zip(arrays, blocks, strict=True))
        for step in steps:
            inputs = [env[a] for a in step.inputs]
            env[step.result] = communicate(step, inputs[0]) if step.only_moves else einsum(step, *inputs)
        return env[result]

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(partition_spec(a) for a in arrays),
        out_specs=partition_spec(result),
        check_vma=False,
    )
    placed = [jax.device_put(jnp.asarray(v), named_sharding(mesh, a)) for a, v in values.items()]
    return np.asarray(jax.jit(mapped)(*placed))
