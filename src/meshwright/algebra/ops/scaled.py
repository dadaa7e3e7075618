"""An array times a number."""

import msgspec

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import local_cotangents
from meshwright.algebra.tape import Tape


class ScaledBy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details: the number."""

    by: float


def forward(tape: Tape) -> None:
    """Multiplies in the sharding of the result."""
    inputs = [tape.move(array, array.like(tape.out)) for array in tape.inputs]
    tape.run("scaled", inputs, tape.out, details=tape.details(ScaledBy))


def backward(tape: Tape) -> None:
    """Multiplies the cotangent by the same number."""
    tape.run_backward((), local_cotangents(tape, tape.dout), details=tape.details(ScaledBy))


OP = OpKind(forward=forward, backward=backward, steps={"scaled": StepKind(), "scaled_backward": StepKind()})
