"""A gated activation on rows or on slots of experts; its backward pass is the vjp of its forward function."""

from collections.abc import Callable
from typing import Any

import jax

from meshwright.algebra.steps import Step
from meshwright.nn import activations
from meshwright.nn.context import Context
from meshwright.nn.experts import ragged

LocalStep = Callable[..., Any]


def backward_of(forward: LocalStep) -> LocalStep:
    """Cotangents of the inputs from that of the result and the inputs: the vjp of the forward function."""

    def backward(context: Context, step: Step, dout: jax.Array, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        _, vjp = jax.vjp(lambda *given: forward(context, step, *given), *inputs)
        return tuple(vjp(dout))

    return backward


def over_slots(local: LocalStep) -> LocalStep:
    """An elementwise step that also takes tokens packed by expert."""

    def run(context: Context, step: Step, *given: Any) -> Any:
        return ragged.over_rows(lambda *blocks: local(context, step, *blocks))(*given)

    return run


def gated(context: Context, step: Step, gate: jax.Array, up: jax.Array) -> jax.Array:
    return activations.gate(context.model)(gate, up)


STEPS = {"silu_mul": over_slots(gated), "silu_mul_backward": over_slots(backward_of(gated))}
