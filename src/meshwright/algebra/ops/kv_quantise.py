"""Quantises keys or values to int8 with a scale."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward

OP = OpKind(forward=forward, steps={"kv_quantise": StepKind()})
