"""Residual streams as a layer predicts them from each other, by coefficients of each token, and the rules of ops on
whole rows. Source: Baykal et al., Alternating Updates for Efficient Transformers (2023)."""

from functools import partial

from meshwright.algebra.kinds import OpKind, StepKind, row_stream
from meshwright.algebra.ops import add
from meshwright.algebra.ops.silu_mul import backward
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape, require_whole


def forward(tape: Tape) -> None:
    """Adds the op in the sharding of the result, whose rows have to be whole."""
    require_whole(tape.out, "D", tape.op.kind)
    add.forward(tape)


def flops(step: Step, sizes: OpSizes, *, products: int = 1) -> Number:
    """Returns the local FLOPs of a token's coefficients: products with the weights that have the dim Am."""
    local_size, weights = sizes.local(step.inputs[0]), [array for array in step.inputs if "Am" in array.dims]
    return 2.0 * products * local_size["B"] * local_size["T"] * sum(map(sizes.elements, weights))


def of_rows(name: str) -> OpKind:
    """Returns the `OpKind` of an op called ``name`` that reduces over rows of D."""
    steps = {
        name: StepKind(flops=flops, hbm_bytes=row_stream, group="normalisation"),
        f"{name}_backward": StepKind(
            flops=partial(flops, products=2), hbm_bytes=partial(row_stream, rows=2), group="normalisation"
        ),
    }
    return OpKind(forward=forward, backward=backward, steps=steps)


OP = of_rows("mix_predict")
