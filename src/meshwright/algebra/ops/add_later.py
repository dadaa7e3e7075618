"""An array added to all residual streams but the first."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward, local_cotangents
from meshwright.algebra.tape import Tape


def backward(tape: Tape) -> None:
    """Copies the cotangent of the streams, and sums it over those that the array was added to."""
    (streams, dstreams), added = local_cotangents(tape, tape.dout)
    tape.run("copy", (tape.dout,), dstreams)
    tape.contribute(streams, dstreams)
    tape.run_backward((), [added])


OP = OpKind(forward=forward, backward=backward, steps={"add_later": StepKind(), "add_later_backward": StepKind()})
