"""Rotation of queries and keys by their positions."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.program import Op
from meshwright.algebra.trace import Trace, like, local, moved


def forward(op: Op, trace: Trace) -> None:
    """Each position rotated on the device that has it."""
    x, positions, out = (trace.declared(n) for n in (*op.inputs, op.out))
    trace.add(local(op.kind, (x, moved(trace, positions, like(positions, x))), out))


def backward(op: Op, trace: Trace) -> None:
    """The cotangent rotated back."""
    x, positions = (trace.declared(n) for n in op.inputs)
    trace.need(like(positions, x))
    inputs = (trace.cotangent(op.out), like(positions, x))
    trace.add(local("rope_backward", inputs, trace.cotangent(op.inputs[0])))
    trace.contribute(op.inputs[0], trace.cotangent(op.inputs[0]))


OP = OpKind(forward=forward, backward=backward, steps={"rope": StepKind(), "rope_backward": StepKind()})
