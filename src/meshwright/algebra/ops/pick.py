"""Picks one position of each sequence: generation needs the logits of one position only."""

from meshwright.algebra.kinds import OpKind, StepKind, row_bytes
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Picks ``pick(x[B,T,D], number[B])``: the device that has the position returns it, the others return zeros."""
    (x, number), out = tape.inputs, tape.out
    result = out.replace(axes=tuple(x.axes_of(dim) for dim in out.dims), unreduced=x.axes_of("T"))
    tape.run("pick", (x, tape.move(number, number.like(x))), result)
    tape.move(result, out)


OP = OpKind(forward=forward, steps={"pick": StepKind(hbm_bytes=row_bytes, group="embedding")})
