"""`meshwright shard --run`: runs steps on emulated devices and on NumPy blocks, and compares with whole arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.steps import Step
from meshwright.calculators.sharding.blocks import execute, join, num_devices, split
from meshwright.calculators.sharding.parsing import ShardQuestion

MAX_RELATIVE_ERROR = 1e-5
"""Largest error of float32 products against float64 ones, relative to the largest entry."""


def run_ways(
    asked: ShardQuestion, ways: Sequence[Sequence[Step]], dims: dict[str, int], mesh: dict[str, int]
) -> dict[str, Any]:
    """Runs each way on emulated devices and on NumPy blocks, in float32; returns errors against float64, unsharded."""
    from meshwright.parallel.mesh import emulate_devices

    emulate_devices(num_devices(mesh))
    before, inputs, sizes = _inputs(asked, dims, mesh)
    rng = np.random.default_rng(0)
    values = {a: rng.standard_normal([sizes[d] for d in a.dims], np.float32) for a in inputs}
    blocks = {a: split(v, a, mesh) for a, v in values.items()}
    whole = Step(op="einsum", inputs=inputs, result=asked.result)
    expected = execute([whole], {a: [v.astype(np.float64)] for a, v in values.items()}, {})[asked.result][0]
    errors, in_numpy = [], []
    for way in ways:
        steps = (*before, *way)
        result = steps[-1].result
        joined = join(execute(steps, blocks, mesh)[result], result, mesh, rel_tol=1e-4)
        errors.append(_error(run_steps(steps, values, mesh), expected))
        in_numpy.append(_error(joined, expected))
    return {
        "devices": num_devices(mesh),
        "ways": len(ways),
        "largest_error": max(errors),
        "largest_error_numpy": max(in_numpy),
        "equal": max(*errors, *in_numpy) < MAX_RELATIVE_ERROR,
    }


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(found - expected))) / float(np.max(np.abs(expected)))


def _inputs(
    asked: ShardQuestion, dims: dict[str, int], mesh: dict[str, int]
) -> tuple[tuple[Step, ...], tuple[ShardedArray, ...], dict[str, int]]:
    """Returns steps that make the arrays asked about, the arrays that these begin with, and the sizes of all dims.

    Addends of an unreduced array come from a product: each device of {U_Z} multiplies its own terms of a dim
    over Z, so that a missing sum shows.
    """
    if asked.factors:
        return (), asked.factors, dims
    array = asked.arrays[0]
    if not array.unreduced:
        return (), (array,), dims
    terms = "terms"
    split_terms = array.replace(
        name=f"{array.name}_terms", dims=(*array.dims, terms), axes=(*array.axes, array.unreduced), unreduced=()
    )
    ones = ShardedArray(f"{array.name}_factors", (terms,), (array.unreduced,), (), array.dtype)
    made = Step(op="einsum", inputs=(split_terms, ones), result=array)
    return (made,), made.inputs, dims | {terms: product(mesh[axis] for axis in array.unreduced)}


def run_steps(
    steps: Sequence[Step], values: Mapping[ShardedArray, np.ndarray], mesh_axes: Mapping[str, int]
) -> np.ndarray:
    """Returns the global result of the last step, from global input values, on the first devices of this machine."""
    import jax

    from meshwright.nn.interpreter import run_update
    from meshwright.parallel.mesh import device_mesh, named_sharding, partition_spec

    mesh, result = device_mesh(mesh_axes), steps[-1].result
    mapped = jax.shard_map(
        lambda *blocks: run_update(steps, dict(zip(values, blocks, strict=True)))[result],
        mesh=mesh,
        in_specs=tuple(map(partition_spec, values)),
        out_specs=partition_spec(result),
        check_vma=False,
    )
    placed = [jax.device_put(value, named_sharding(mesh, array)) for array, value in values.items()]
    return np.asarray(jax.jit(mapped)(*placed))
