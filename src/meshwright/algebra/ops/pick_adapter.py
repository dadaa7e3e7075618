"""Keeps, of the columns of several adapters side by side in the rank, the columns of each row's own adapter."""

import msgspec

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.tape import Tape


class PickAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details: ``count`` adapters own equal runs of columns; a row keeps its adapter's run, scaled by ``by``."""

    count: int
    by: float


def forward(tape: Tape) -> None:
    """Adds the op ``pick_adapter(x[B,T,Ra], adapters[B,T])`` in the sharding of the result; no axis splits Ra."""
    inputs = [tape.move(array, array.like(tape.out)) for array in tape.inputs]
    tape.run("pick_adapter", inputs, tape.out, details=tape.details(PickAdapter))


OP = OpKind(forward=forward, steps={"pick_adapter": StepKind()})
