"""Look-up of rows in a table: the product of one-hot rows and the table."""

from functools import partial

from meshwright.algebra.einsum import align, local_product
from meshwright.algebra.kinds import OpKind, StepKind, row_bytes
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape
from meshwright.core.dims import DTYPE_BYTES


def one_hot(numbers: ShardedArray, table: ShardedArray) -> ShardedArray:
    """Returns row numbers as one-hot rows over the table's first dim, split as that dim is."""
    row_dim = table.dims[0]
    return ShardedArray(numbers.name, (*numbers.dims, row_dim), (*numbers.axes, table.axes_of(row_dim)))


def forward(tape: Tape) -> None:
    """Adds the look-up in each device's part of the table; further inputs (scales of rows) are sharded as the table."""
    row_numbers, table, *scales = tape.inputs
    left, right = align(one_hot(row_numbers, table), table, tape.out)
    inputs = [tape.move(row_numbers, row_numbers.like(left)), tape.move(table, right)]
    inputs += [tape.move(scale, scale.like(right)) for scale in scales]
    result = local_product(left, right, tape.out)
    tape.run(tape.op.kind, inputs, result)
    tape.move(result, tape.out)


def backward(tape: Tape) -> None:
    """Adds the steps that sum cotangents per row of the table."""
    row_numbers, table = tape.inputs
    dtable = tape.dinputs[1]
    left, right = align(one_hot(row_numbers, table), tape.dout, dtable)
    local_row_numbers, dout = tape.move(row_numbers, row_numbers.like(left)), tape.move(tape.dout, right)
    result = local_product(left, right, dtable)
    tape.run("embed_backward", (local_row_numbers, dout), result)
    tape.contribute(tape.op.inputs[1], result)


def backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes that clear the gradient and, per token, read a cotangent row and add it to a gradient row."""
    return sizes.total(*step.inputs, step.result) + 2 * sizes.bytes(step.inputs[1])


def scratch_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of the sum over rows, in float32 before it is rounded to a narrower gradient."""
    return DTYPE_BYTES["fp32"] * sizes.elements(step.result) * (sizes.width < DTYPE_BYTES["fp32"])


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={
        "embed": StepKind(hbm_bytes=partial(row_bytes, numbers=0), group="embedding"),
        "embed_backward": StepKind(hbm_bytes=backward_bytes, group="embedding", scratch_bytes=scratch_bytes),
    },
)
