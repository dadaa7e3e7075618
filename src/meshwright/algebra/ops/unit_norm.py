"""Rows divided by their root mean square: an RMS norm without a scale, over the last dim."""

from meshwright.algebra.kinds import OpKind, StepKind, row_stream
from meshwright.algebra.tape import Tape, require_whole


def forward(tape: Tape) -> None:
    """Adds the norm in the sharding of the rows; raises InputError if rows are split."""
    (x,) = tape.inputs
    require_whole(x, x.dims[-1], tape.op.kind)
    local_out = tape.out.like(x)
    tape.run("unit_norm", (x,), local_out)
    tape.move(local_out, tape.out)


def backward(tape: Tape) -> None:
    """Adds the step that makes the cotangent of the rows in their sharding."""
    (x,) = tape.inputs
    dout = tape.move(tape.dout, tape.dout.like(x))
    tape.run_backward((x,), [(tape.op.inputs[0], tape.dinputs[0].like(x))], dout=dout)


_NORM = StepKind(hbm_bytes=row_stream, group="normalisation")

OP = OpKind(forward=forward, backward=backward, steps={"unit_norm": _NORM, "unit_norm_backward": _NORM})
