"""The activation of a feed-forward without a gate."""

import jax

from meshwright.algebra.steps import Step
from meshwright.nn import activations
from meshwright.nn.context import Context
from meshwright.nn.ops.silu_mul import backward_of, over_slots


def plain(context: Context, step: Step, up: jax.Array) -> jax.Array:
    return activations.activation(context.model)(up)


STEPS = {"gelu": over_slots(plain), "gelu_backward": over_slots(backward_of(plain))}
