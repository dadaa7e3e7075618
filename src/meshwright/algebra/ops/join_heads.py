"""Concatenates the keys of each head with the rotated part that all heads share (latent attention)."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import backward, forward

OP = OpKind(forward=forward, backward=backward, steps={"join_heads": StepKind(), "join_heads_backward": StepKind()})
