"""Combine: weighted sums of the experts' results per token."""

import jax

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.experts import ragged
from meshwright.nn.experts import rows as experts
from meshwright.nn.experts.ragged import Ragged


def combine(context: Context, step: Step, slots: jax.Array | Ragged, gates: jax.Array, chosen: jax.Array) -> jax.Array:
    """Weighted sums per token."""
    if isinstance(slots, Ragged):
        return ragged.ragged_combine(slots, gates, chosen)
    return experts.combine(slots, gates, chosen)


def combine_backward(
    context: Context, step: Step, dout: jax.Array, slots: jax.Array | Ragged, gates: jax.Array, chosen: jax.Array
) -> tuple[jax.Array | Ragged, jax.Array]:
    """Cotangents of slots and weights."""
    if isinstance(slots, Ragged):
        return ragged.ragged_combine_backward(dout, slots, gates, chosen)
    return experts.combine_backward(dout, slots, gates, chosen)


STEPS = {"combine": combine, "combine_backward": combine_backward}
