"""Queries that grow with their positions, so that attention stays as sharp among more keys; see `nn.ops.tempered`."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward
from meshwright.algebra.tape import Tape


def backward(tape: Tape) -> None:
    """Multiplies the cotangent by the same numbers."""
    _, positions = tape.inputs
    cotangent = tape.dinputs[0].like(tape.dout)
    tape.run("tempered", (tape.dout, positions.like(tape.dout)), cotangent)
    tape.contribute(tape.op.inputs[0], cotangent)


OP = OpKind(forward=forward, backward=backward, steps={"tempered": StepKind()})
