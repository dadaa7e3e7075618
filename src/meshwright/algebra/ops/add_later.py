"""An array added to all residual streams but the first."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward, local_cotangents
from meshwright.algebra.tape import Tape


def backward(tape: Tape) -> None:
    """Adds a copy of the cotangent for the streams; for the added array, its sum over all streams but the first."""
    (streams, dstreams), added = local_cotangents(tape, tape.dout)
    tape.run("copy", (tape.dout,), dstreams)
    tape.contribute(streams, dstreams)
    tape.run_backward((), [added])


OP = OpKind(forward=forward, backward=backward, steps={"add_later": StepKind(), "add_later_backward": StepKind()})
