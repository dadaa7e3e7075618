"""Adds a bias along the dims that it has."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import backward, forward
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step


def vector_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of the vector, read: compilers add or multiply it in the epilogue of the op before."""
    return sizes.total(*step.inputs[1:])


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={"bias_add": StepKind(hbm_bytes=vector_bytes, num_kernels=0), "bias_add_backward": StepKind()},
)
