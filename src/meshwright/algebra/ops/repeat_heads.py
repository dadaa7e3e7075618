"""Repeats key and value heads K as Kt or Kct heads, so that each device has the heads of its queries
(`rewrites.repeated_heads` puts the op into programs). A head's cotangent is the sum of its repeats' cotangents."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import backward, forward

OP = OpKind(forward=forward, backward=backward, steps={"repeat_heads": StepKind(), "repeat_heads_backward": StepKind()})
