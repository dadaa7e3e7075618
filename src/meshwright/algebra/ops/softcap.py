"""Logits bounded by a cap: cap x tanh(logits / cap)."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward

OP = OpKind(forward=forward, steps={"softcap": StepKind()})
