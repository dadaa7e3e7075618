"""Rotation of queries and keys by their positions."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.trace import Trace


def forward(trace: Trace) -> None:
    """Rotates each position on the device that has it."""
    x, positions = trace.inputs
    trace.run("rope", (x, trace.move(positions, positions.like(x))), trace.out)


def backward(trace: Trace) -> None:
    """Rotates the cotangent back."""
    x, positions = trace.inputs
    trace.run_backward((positions.like(x),), [(trace.op.inputs[0], trace.dinputs[0])])


OP = OpKind(forward=forward, backward=backward, steps={"rope": StepKind(), "rope_backward": StepKind()})
