"""Muon orthogonalises the momentum of each matrix of a layer, on devices that have whole matrices of some layers.

One AllToAll per split dim turns the shards of all layers into whole matrices of some layers, and as many bring the
results back. AdamW updates all other weights.
"""

import msgspec
import numpy as np

from meshwright.algebra.einsum import reshard
from meshwright.algebra.kinds import OpKind, StepKind, Updated
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.ops import adamw
from meshwright.algebra.ops.adafactor import apply_bytes, stacked
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.core.dims import DTYPE_BYTES

ITERATIONS = 5
"""Newton-Schulz iterations, which bring singular values near 1."""


class Dealt(msgspec.Struct, frozen=True, kw_only=True):
    """Details of steps on whole matrices that are distributed over the devices of ``axes``.

    The dim ``over`` counts the matrices; before the distribution the axes ``among`` split it, and zeros pad it to a
    multiple of the devices. The next ``num_inputs`` dims are the inputs of a matrix.
    """

    over: str
    among: tuple[str, ...]
    axes: tuple[str, ...]
    num_inputs: int


def padding_factor(step: Step, sizes: OpSizes) -> Number:
    """Returns the number of matrices with padding over the number without; 1 for steps without `Dealt`."""
    details = step.details
    if not isinstance(details, Dealt):
        return 1
    num_matrices = sizes.dims[details.over] / product(sizes.mesh[axis] for axis in details.among)
    num_devices = product(sizes.mesh[axis] for axis in details.axes)
    return np.ceil(num_matrices / num_devices) * num_devices / num_matrices


def orthogonalises(weight: Updated) -> bool:
    """True for matrices of layers; False for vectors, the embedding and the head."""
    return bool(weight.inputs and weight.layers)


def update(weight: Updated) -> tuple[Step, ...]:
    """Returns Muon's steps for a matrix of layers: mix the momentum, gather, orthogonalise, scatter, apply.

    Returns AdamW's for any other weight.
    """
    if not orthogonalises(weight):
        return adamw.elementwise_update("adamw", adamw.MEANS, weight)
    shard, name = weight.shard, weight.shard.name
    gradient = stacked(weight, f"d{name}").replace(dtype="")
    blend = _joined(weight, f"{name}.momentum")
    count_dim, *matrix_dims = blend.dims
    axes = tuple(axis for dim in matrix_dims for axis in blend.axes_of(dim))
    details = Dealt(over=count_dim, among=blend.axes_of(count_dim), axes=axes, num_inputs=len(weight.inputs))
    gathered_blend = blend.resharded({**dict.fromkeys(matrix_dims, ()), count_dim: (*blend.axes_of(count_dim), *axes)})
    update_name, change = f"{name}.update", shard.replace(name=f"{name}.update", dtype="fp32")
    momentum = stacked(weight, f"{name}.momentum.state")
    steps = (
        Step(op="muon_momentum", inputs=(gradient, momentum), result=blend, more=(momentum,)),
        *reshard(blend, gathered_blend),
        Step(op="muon", inputs=(gathered_blend,), result=gathered_blend.replace(name=update_name)),
        *reshard(gathered_blend.replace(name=update_name), blend.replace(name=update_name)),
        Step(op="muon_apply", inputs=(change, shard), result=shard),
    )
    return tuple(msgspec.structs.replace(step, details=details) for step in steps)


def _joined(weight: Updated, name: str) -> ShardedArray:
    """Returns the array of all layers with the dims of layers and experts joined as its first dim."""
    array = stacked(weight, name)
    lead_dims = (weight.layers, *weight.batch)
    axes = tuple(axis for dim in lead_dims for axis in array.axes_of(dim))
    dims = [dim for dim in array.dims if dim not in lead_dims]
    return ShardedArray(name, ("".join(lead_dims), *dims), (axes, *(array.axes_of(dim) for dim in dims)), dtype="fp32")


# -- counts -----------------------------------------------------------------------------------------------


def _matrices(step: Step, sizes: OpSizes) -> tuple[Number, Number, Number]:
    """Returns the number of matrices on a device, padding included, and their smaller and larger side."""
    array = step.inputs[0]
    local, in_dims = sizes.local(array), array.dims[1 : 1 + step.details.num_inputs]
    num_rows, num_columns = (product(local[dim] for dim in dims) for dims in (in_dims, array.dims[1 + len(in_dims) :]))
    num_matrices = local[array.dims[0]] * padding_factor(step, sizes)
    return num_matrices, np.minimum(num_rows, num_columns), np.maximum(num_rows, num_columns)


def flops(step: Step, sizes: OpSizes) -> Number:
    """Returns the FLOPs of all iterations (X X^T, its square, mix x X): 4 n^2 m + 2 n^3 each for n x m, n <= m."""
    num_matrices, min_side, max_side = _matrices(step, sizes)
    return ITERATIONS * num_matrices * (4 * min_side**2 * max_side + 2 * min_side**3)


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of all iterations, each in float32: X read three times and written, X X^T written and read
    three times, and its mix with its square written and read."""
    num_matrices, min_side, max_side = _matrices(step, sizes)
    return DTYPE_BYTES["fp32"] * ITERATIONS * num_matrices * (4 * min_side * max_side + 6 * min_side**2)


OP = OpKind(
    update=update,
    steps={
        # two reads of the gradient (for its norm and its use), the momentum read and written, their mix written
        "muon_momentum": StepKind(
            hbm_bytes=lambda step, of: 2 * adamw.gradient_bytes(step.inputs[0], of) + 3 * of.bytes(step.result),
            group="optimizer",
        ),
        "muon": StepKind(flops=flops, hbm_bytes=hbm_bytes, group="optimizer"),
        "muon_apply": StepKind(hbm_bytes=apply_bytes, group="optimizer"),
    },
)
