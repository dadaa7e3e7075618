"""An array under another name: nothing is computed or moved."""

from meshwright.algebra.kinds import OpKind, StepKind, nothing
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Adds the steps that reshard the array to the sharding of the result, and the copy."""
    (array,) = tape.inputs
    tape.run("copy", (tape.move(array, array.like(tape.out)),), tape.out)


def backward(tape: Tape) -> None:
    """Adds a copy of the cotangent."""
    cotangent = tape.dinputs[0].like(tape.dout)
    tape.run("copy", (tape.dout,), cotangent)
    tape.contribute(tape.op.inputs[0], cotangent)


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={"copy": StepKind(hbm_bytes=nothing, group="copy", num_kernels=0, reads_sum=False)},
)
