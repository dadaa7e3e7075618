"""The scale of each token, and head if there are any, of keys, values or latents that are kept as int8."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward

OP = OpKind(forward=forward, steps={"kv_scale": StepKind()})
