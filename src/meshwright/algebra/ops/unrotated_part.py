"""The unrotated first part of a query, in latent attention that generates."""

from meshwright.algebra.kinds import OpKind, StepKind, nothing
from meshwright.algebra.ops.add import forward

OP = OpKind(forward=forward, steps={"unrotated_part": StepKind(hbm_bytes=nothing, group="copy", num_kernels=0)})
