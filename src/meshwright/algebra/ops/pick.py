"""Picks one position of each sequence, or the rows whose logits a step returns: generation needs few logits."""

from meshwright.algebra.kinds import OpKind, StepKind, row_bytes
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Adds ``pick(x[B,T,D], number[B])``: the device that has the position returns it, all other devices zeros, and the
    sum follows.

    ``pick(x[B,T,D], number[O])``, of one position a row, picks rows in the same way."""
    (x, row_numbers), out = tape.inputs, tape.out
    if row_numbers.dims == ("O",):
        row_axes = tuple(axis for axis in x.axes_of("B") if axis in out.axes_of("O"))
        summed_axes = tuple(axis for axis in x.axes_of("B") if axis not in row_axes)
        result = out.replace(axes=(row_axes, x.axes_of("D")), unreduced=summed_axes)
        tape.run("pick", (x, tape.move(row_numbers, row_numbers.resharded({"O": row_axes}))), result)
    else:
        result = out.replace(axes=tuple(x.axes_of(dim) for dim in out.dims), unreduced=x.axes_of("T"))
        tape.run("pick", (x, tape.move(row_numbers, row_numbers.like(x))), result)
    tape.move(result, out)


OP = OpKind(forward=forward, steps={"pick": StepKind(hbm_bytes=row_bytes, group="embedding")})
