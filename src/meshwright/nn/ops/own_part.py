"""The part of a query that is not rotated."""

import jax

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context


def own_part(context: Context, step: Step, q: jax.Array) -> jax.Array:
    """The part of a query that is not rotated."""
    return q[..., : context.model.qk_nope_head_dim]


STEPS = {"own_part": own_part}
