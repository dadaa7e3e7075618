"""An array times a number; the cotangent is multiplied by the same number."""

import msgspec

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.tape import Tape


class Scaled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details of the step: ``by`` is the factor."""

    by: float


def forward(tape: Tape) -> None:
    """Adds the product in the sharding of the result."""
    (array,) = tape.inputs
    tape.run("scaled", (tape.move(array, array.like(tape.out)),), tape.out, details=tape.details(Scaled))


def backward(tape: Tape) -> None:
    """Adds the product of the cotangent and the same number."""
    cotangent = tape.dinputs[0].like(tape.dout)
    tape.run("scaled", (tape.dout,), cotangent, details=tape.details(Scaled))
    tape.contribute(tape.op.inputs[0], cotangent)


OP = OpKind(forward=forward, backward=backward, steps={"scaled": StepKind()})
