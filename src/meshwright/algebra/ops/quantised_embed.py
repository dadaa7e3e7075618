"""Looks up rows of a quantised table and multiplies each by its scale."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.embed import forward
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step


def row_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes per token of its number, table row and scale, read, and of the result's row, written."""
    row_numbers, table, scale = step.inputs
    table_row, row_scale = step.result.replace(dtype=table.dtype), row_numbers.replace(dtype=scale.dtype)
    return sizes.total(row_numbers, table_row, row_scale, step.result)


OP = OpKind(forward=forward, steps={"quantised_embed": StepKind(hbm_bytes=row_bytes, group="embedding")})
