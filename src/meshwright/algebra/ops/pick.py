"""Picks one position of each sequence, or of all rows those that are asked for: generation needs few logits."""

from meshwright.algebra.kinds import OpKind, StepKind, row_bytes
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Picks ``pick(x[B,T,D], number[B])``: the device that has the position returns it, the others return zeros.

    ``pick(x[B,T,D], number[O])``, of one position a row, picks rows in the same way.
    """
    (x, number), out = tape.inputs, tape.out
    if number.dims == ("O",):
        rows = tuple(axis for axis in x.axes_of("B") if axis in out.axes_of("O"))
        apart = tuple(axis for axis in x.axes_of("B") if axis not in rows)
        result = out.replace(axes=(rows, x.axes_of("D")), unreduced=apart)
        tape.run("pick", (x, tape.move(number, number.resharded({"O": rows}))), result)
    else:
        result = out.replace(axes=tuple(x.axes_of(dim) for dim in out.dims), unreduced=x.axes_of("T"))
        tape.run("pick", (x, tape.move(number, number.like(x))), result)
    tape.move(result, out)


OP = OpKind(forward=forward, steps={"pick": StepKind(hbm_bytes=row_bytes, group="embedding")})
