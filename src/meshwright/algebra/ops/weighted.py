"""Rows times one number each, such as the weight of an expert's slot."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward, local_cotangents
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape


def backward(tape: Tape) -> None:
    """Makes cotangents of the rows, and of their numbers as sums over each row."""
    out = tape.out
    tape.run_backward([array.like(out) for array in tape.inputs], local_cotangents(tape, out))


def vector_bytes(step: Step, sizes: OpSizes) -> Number:
    """Counts only the numbers, read: compilers multiply in the activation before."""
    return sizes.total(*step.inputs[1:])


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={"weighted": StepKind(hbm_bytes=vector_bytes, num_kernels=0), "weighted_backward": StepKind()},
)
