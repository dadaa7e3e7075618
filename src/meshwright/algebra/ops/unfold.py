"""Each position beside its two neighbours, or every other position: what a convolution over three positions multiplies.

Zeros stand before the first and after the last position. Neighbours may be on other devices, so positions are whole."""

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
    """Returns the result, or its cotangent, with all positions on each device."""
    return array.resharded({array.dims[1]: ()})


def forward(tape: Tape) -> None:
    """Gathers positions, and keeps a device's part of the result."""
    (array,) = tape.inputs
    whole = _whole(tape, tape.out)
    inputs = (tape.move(array, array.like(whole).resharded({FRAMES: ()})),)
    tape.run("unfold", inputs, whole, details=tape.details(Unfold))
    tape.move(whole, tape.out)


def backward(tape: Tape) -> None:
    """Adds what the neighbours of a position give it; features have no cotangent."""
    (name,) = tape.op.inputs
    if tape.shardings.program.variables[name].role == "input":
        return
    whole = _whole(tape, tape.dout)
    cotangent = tape.dinputs[0].like(whole).resharded({FRAMES: ()})
    tape.run("unfold_backward", (tape.move(tape.dout, whole),), cotangent, details=tape.details(Unfold))
    tape.contribute(name, cotangent)


OP = OpKind(forward=forward, backward=backward, steps={"unfold": StepKind(), "unfold_backward": StepKind()})
