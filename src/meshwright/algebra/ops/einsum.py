"""A product of two arrays by the rules of one sharded einsum; its gradients are products too."""

from meshwright.algebra.einsum import product_steps
from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import product
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Adds the steps of the product by the rules of one sharded einsum, and the reshard of its result."""
    lhs, rhs = tape.inputs
    steps = product_steps(lhs, rhs, tape.out, slice_axes=tape.slice_axes)
    tape.add(*steps)
    tape.complete(steps[-1].result)


def backward(tape: Tape) -> None:
    """Adds the products dB = A * dC, then dA = dC * B, each with its primal's sharding."""
    lhs, rhs = tape.op.inputs
    for left, right, name in ((tape.declared(lhs), tape.dout, rhs), (tape.dout, tape.declared(rhs), lhs)):
        steps = product_steps(left, right, tape.cotangent(name), slice_axes=tape.slice_axes)
        tape.add(*steps)
        tape.contribute(name, steps[-1].result)


def flops(step: Step, sizes: OpSizes) -> Number:
    """Returns 2 times the product of the local sizes of all dims of both operands."""
    return 2.0 * product(sizes.local(*step.inputs[:2]).values())


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={"einsum": StepKind(flops=flops, group="contraction", is_einsum=True)},
)
