"""Rotation of queries and keys by their positions."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward
from meshwright.algebra.tape import Tape


def backward(tape: Tape) -> None:
    """Adds the step that rotates the cotangent back."""
    x, positions = tape.inputs
    tape.run_backward((positions.like(x),), [(tape.op.inputs[0], tape.dinputs[0])])


OP = OpKind(forward=forward, backward=backward, steps={"rope": StepKind(), "rope_backward": StepKind()})
