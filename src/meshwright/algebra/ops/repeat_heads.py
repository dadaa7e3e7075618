"""Repeats key and value heads K as Kt or Kct heads, of which a device keeps those of its own queries
(`rewrites.repeated_heads` puts the op into programs). The cotangent of a head is the sum of those of its repeats."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import backward, forward

OP = OpKind(forward=forward, backward=backward, steps={"repeat_heads": StepKind(), "repeat_heads_backward": StepKind()})
