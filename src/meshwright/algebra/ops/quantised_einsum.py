"""A product with a quantised weight, times its scales: over dims of outputs, or of groups of inputs.

A scale of groups has the dim Dg of groups in place of the summed dim D (see `spec.model.GROUPED`). A quantised weight
is frozen: the backward pass makes only the cotangent of the other factor.
"""

from meshwright.algebra.einsum import product_steps
from meshwright.algebra.kinds import OpKind, StepKind, stream
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.einsum import flops
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape


def has_groups(scale: ShardedArray) -> bool:
    """True if each group of inputs has a scale."""
    return any(dim.endswith("g") for dim in scale.dims)


def forward(tape: Tape) -> None:
    """Adds the product ``lhs * values`` like any product, times the scale of each output channel or group."""
    lhs, values, scale = tape.inputs
    tape.complete(_multiply(tape, lhs, values, scale, tape.out))


def backward(tape: Tape) -> None:
    """Adds the product dA = dC * B, from the values and scales of B."""
    _, values, scale = tape.inputs
    name = tape.op.inputs[0]
    tape.contribute(name, _multiply(tape, tape.dout, values, scale, tape.cotangent(name)))


def _multiply(
    tape: Tape, lhs: ShardedArray, values: ShardedArray, scale: ShardedArray, out: ShardedArray
) -> ShardedArray:
    """Adds the reshards and the local product of a quantised einsum; returns the local, unreduced result."""
    *reshards, step = product_steps(lhs, values, out, slice_axes=tape.slice_axes)
    tape.add(*reshards)
    local_scale = scale.like(step.result)
    if has_groups(scale):
        local_scale = scale.resharded({dim: step.inputs[1].axes_of(dim.removesuffix("g")) for dim in scale.dims})
    tape.run("quantised_einsum", (*step.inputs, tape.move(scale, local_scale)), step.result)
    return step.result


def hbm_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of factors, scales and result. On GPUs XLA also writes and reads a widened copy of a matrix
    with groups of inputs; TPUs keep it on chip."""
    is_widened = sizes.on_gpus and has_groups(step.inputs[2])
    return stream(step, sizes) + 2 * is_widened * sizes.width * sizes.elements(step.inputs[1])


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={"quantised_einsum": StepKind(flops=flops, hbm_bytes=hbm_bytes, group="contraction", is_einsum=True)},
)
