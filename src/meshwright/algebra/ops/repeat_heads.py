"""Repeats key and value heads K as Kt or Kct heads, of which a device keeps those of its own queries
(`rewrites.repeated_heads` puts the op into programs)."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.tape import Tape, axes_beside


def forward(tape: Tape) -> None:
    """Repeats heads that a device has whole, with the other dims split as the result's are."""
    (heads,), out = tape.inputs, tape.out
    tape.run(tape.op.kind, (tape.move(heads, heads.like(out)),), out)


def backward(tape: Tape) -> None:
    """Sums the cotangents of a head's repeats on one device; the sum is unreduced over the devices that split them."""
    (dheads,), dout = tape.dinputs, tape.dout
    own = dheads.like(dout).replace(unreduced=axes_beside(dout, dheads))
    tape.run_backward((), [(tape.op.inputs[0], own)])


OP = OpKind(forward=forward, backward=backward, steps={"repeat_heads": StepKind(), "repeat_heads_backward": StepKind()})
