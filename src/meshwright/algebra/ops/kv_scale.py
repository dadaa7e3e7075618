"""The scales of keys, values or latents that are kept as int8: one per token, and per head if the array has heads."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward

OP = OpKind(forward=forward, steps={"kv_scale": StepKind()})
