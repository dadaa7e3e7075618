"""Activations of feed-forward layers by the names that configs give them."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshwright.spec.model import Model

SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


_gelu_tanh = partial(jax.nn.gelu, approximate=True)

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(SWIGLU_ALPHA * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""``hidden_act`` of a config -> the function. "gelu" is exact; the others on `_gelu_tanh` approximate it."""


def capped(logits: Array, softcap: float | None) -> Array:
    """Returns ``softcap * tanh(logits / softcap)``; the logits unchanged if ``softcap`` is None or 0."""
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def gate(model: Model) -> Callable[[Array, Array], Array]:
    """Returns the model's gated activation: a function (gate, up) -> input of the down projection."""
    if model.family == "gpt_oss":
        return clamped_swiglu
    function = ACTIVATIONS[model.activation]
    return lambda gated, up: function(gated) * up


def silu_mul(gated: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """Returns ``silu(gate) * up``."""
    return jax.nn.silu(gated) * up


def clamped_swiglu(gated: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """Returns ``(up + 1) gate sigmoid(1.702 gate)``, gate clipped to at most 7 and up to -7..7 (gpt-oss)."""
    gated = jnp.minimum(gated, jnp.asarray(SWIGLU_LIMIT, gated.dtype))
    up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gated * jax.nn.sigmoid(gated * SWIGLU_ALPHA))
