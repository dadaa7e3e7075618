"""`meshwright shard --run`: steps executed on emulated devices and on NumPy blocks, against whole arrays."""

from collections.abc import Sequence
from typing import Any

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.steps import Step
from meshwright.calculators.verbs.shard_asked import ShardQuestion

MAX_RELATIVE_ERROR = 1e-5
"""Of float32 products against float64 ones, relative to the largest entry."""


def run_ways(asked: ShardQuestion, ways: Sequence[Sequence[Step]], dims: dict[str, int], mesh: dict[str, int]) -> Any:
    """Run each way on emulated devices and on NumPy blocks, in float32, against the unsharded result."""
    import numpy as np

    from meshwright.calculators.sharding.blocks import execute, join, num_devices, split
    from meshwright.calculators.sharding.run_steps import run_steps
    from meshwright.parallel.mesh import emulate_devices

    emulate_devices(num_devices(mesh))
    before, inputs, sizes = _inputs(asked, dims, mesh)
    values, expected = _reference(inputs, asked.result, sizes)
    scale = float(np.max(np.abs(expected)))
    blocks = {a: split(v, a, mesh) for a, v in values.items()}
    errors, in_numpy = [], []
    for way in ways:
        steps = (*before, *way)
        held = execute(steps, blocks, mesh)[steps[-1].result]
        joined = join(held, steps[-1].result, mesh, rel_tol=1e-4)
        errors.append(float(np.max(np.abs(run_steps(steps, values, mesh) - expected))) / scale)
        in_numpy.append(float(np.max(np.abs(joined - expected))) / scale)
    return {
        "devices": num_devices(mesh),
        "ways": len(ways),
        "largest_error": max(errors),
        "largest_error_numpy": max(in_numpy),
        "equal": max(*errors, *in_numpy) < MAX_RELATIVE_ERROR,
    }


def _inputs(
    asked: ShardQuestion, dims: dict[str, int], mesh: dict[str, int]
) -> tuple[tuple[Step, ...], tuple[ShardedArray, ...], dict[str, int]]:
    """Steps that make what is asked about, the arrays that they begin with, and the sizes of all dims.

    Addends of an unreduced array come from a product: each device of {U_Z} multiplies its own terms of a dim
    over Z, so that a sum that is left out shows.
    """
    if asked.factors:
        return (), asked.factors, dims
    array = asked.arrays[0]
    if not array.unreduced:
        return (), (array,), dims
    terms = "terms"
    number = 1
    for axis in array.unreduced:
        number *= mesh[axis]
    split = ShardedArray(f"{array.name}_terms", (*array.dims, terms), (*array.axes, array.unreduced), (), array.dtype)
    ones = ShardedArray(f"{array.name}_factors", (terms,), (array.unreduced,), (), array.dtype)
    return (Step(op="einsum", inputs=(split, ones), result=array),), (split, ones), dims | {terms: number}


def _reference(
    inputs: Sequence[ShardedArray], result: ShardedArray, dims: dict[str, int]
) -> tuple[dict[ShardedArray, Any], Any]:
    """Random whole inputs in float32, and their product in float64 by NumPy."""
    import numpy as np

    rng = np.random.default_rng(0)
    values = {a: rng.standard_normal([dims[d] for d in a.dims], np.float32) for a in inputs}
    letters = {d: chr(ord("a") + i) for i, d in enumerate(dict.fromkeys(d for a in inputs for d in a.dims))}
    terms = ",".join("".join(letters[d] for d in a.dims) for a in inputs)
    out = "".join(letters[d] for d in result.dims)
    wide = [v.astype(np.float64) for v in values.values()]
    return values, np.einsum(f"{terms}->{out}", *wide, optimize=True)
