"""The scale of each token and head of keys or values that are kept as int8."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward

OP = OpKind(forward=forward, steps={"kv_scale": StepKind()})
