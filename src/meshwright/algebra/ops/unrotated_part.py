"""The first part of each query, which rope does not rotate, in generation with latent attention."""

from meshwright.algebra.kinds import OpKind, StepKind, nothing
from meshwright.algebra.ops.add import forward

OP = OpKind(forward=forward, steps={"unrotated_part": StepKind(hbm_bytes=nothing, group="copy", num_kernels=0)})
