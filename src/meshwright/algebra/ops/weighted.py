"""Rows times one number each, such as the weight of an expert's slot."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.bias_add import vector_bytes
from meshwright.algebra.ops.silu_mul import backward, forward

OP = OpKind(
    forward=forward,
    backward=backward,
    steps={"weighted": StepKind(hbm_bytes=vector_bytes, num_kernels=0), "weighted_backward": StepKind()},
)
