"""Takes one of the residual streams, or all but the first."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape


def backward(tape: Tape) -> None:
    """Adds the step that makes the cotangent of all streams, zero for streams that the op did not take."""
    tape.run_backward((), [(tape.op.inputs[0], tape.dinputs[0].like(tape.dout))])


def taken_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of the streams that the op takes, read and written."""
    return 2 * sizes.bytes(step.result)


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={"stream": StepKind(hbm_bytes=taken_bytes), "stream_backward": StepKind()},
)
