"""Residual streams as a layer predicts them from each other, by coefficients of each token, and the rules of ops on
whole rows. Source: Baykal et al., Alternating Updates for Efficient Transformers (2023)."""

from functools import partial

from meshwright.algebra.kinds import OpKind, StepKind, row_stream
from meshwright.algebra.ops import add
from meshwright.algebra.ops.silu_mul import backward
from meshwright.algebra.tape import Tape, require_whole


def forward(tape: Tape) -> None:
    """Computes in the sharding of the result, whose rows are whole."""
    require_whole(tape.out, "D", tape.op.kind)
    add.forward(tape)


def of_rows(name: str) -> OpKind:
    """Returns the kind of an op that reduces over rows of D, under its name."""
    steps = {
        name: StepKind(hbm_bytes=row_stream, group="normalisation"),
        f"{name}_backward": StepKind(hbm_bytes=partial(row_stream, rows=2), group="normalisation"),
    }
    return OpKind(forward=forward, backward=backward, steps=steps)


OP = of_rows("mix_predict")
