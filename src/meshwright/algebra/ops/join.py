"""Concatenates two arrays along their last dim."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import backward, forward

OP = OpKind(forward=forward, backward=backward, steps={"join": StepKind(), "join_backward": StepKind()})
