"""Queries times a factor that grows with position: attention to more keys stays sharp (`nn.ops.tempered`)."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward
from meshwright.algebra.tape import Tape


def backward(tape: Tape) -> None:
    """Adds the step that multiplies the cotangent by the same factors."""
    _, positions = tape.inputs
    cotangent = tape.dinputs[0].like(tape.dout)
    tape.run("tempered", (tape.dout, positions.like(tape.dout)), cotangent)
    tape.contribute(tape.op.inputs[0], cotangent)


OP = OpKind(forward=forward, backward=backward, steps={"tempered": StepKind()})
