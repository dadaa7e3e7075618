"""Joins each position, or every other one, with its two neighbours: the operand of a convolution over three positions.

Zeros pad both ends. Neighbours may be on other devices, so positions are gathered."""

import msgspec

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.tape import Tape

FRAMES = "Sf"
"""The dim of positions before they are unfolded."""


class Unfold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details: the result has every ``stride``-th position."""

    stride: int = 1


def _whole(tape: Tape, array: ShardedArray) -> ShardedArray:
    """Returns the result, or its cotangent, with positions unsplit."""
    return array.resharded({array.dims[1]: ()})


def forward(tape: Tape) -> None:
    """Adds the steps that gather positions, unfold them, and keep the device's part of the result."""
    (array,) = tape.inputs
    whole = _whole(tape, tape.out)
    inputs = (tape.move(array, array.like(whole).resharded({FRAMES: ()})),)
    tape.run("unfold", inputs, whole, details=tape.details(Unfold))
    tape.move(whole, tape.out)


def backward(tape: Tape) -> None:
    """Adds the step that sums each position's cotangent over the rows it is joined into; features get no cotangent."""
    (name,) = tape.op.inputs
    if tape.shardings.program.variables[name].role == "input":
        return
    whole = _whole(tape, tape.dout)
    cotangent = tape.dinputs[0].like(whole).resharded({FRAMES: ()})
    tape.run("unfold_backward", (tape.move(tape.dout, whole),), cotangent, details=tape.details(Unfold))
    tape.contribute(name, cotangent)


OP = OpKind(forward=forward, backward=backward, steps={"unfold": StepKind(), "unfold_backward": StepKind()})
