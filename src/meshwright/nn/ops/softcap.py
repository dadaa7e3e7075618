"""Logits bounded by the model's cap."""

import jax
import jax.numpy as jnp

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context


def softcap(context: Context, step: Step, logits: jax.Array) -> jax.Array:
    """Logits drawn into the model's cap."""
    cap = context.model.logit_softcap
    assert cap is not None
    return cap * jnp.tanh(logits / cap)


STEPS = {"softcap": softcap}
