"""A gated activation on rows or on slots of experts; its backward pass is the vjp of its forward function."""

from typing import Any

import jax
from jaxtyping import Array

from meshwright.algebra.steps import Step
from meshwright.nn.activations import gate
from meshwright.nn.attention.platform import default_platform
from meshwright.nn.context import Context
from meshwright.nn.experts.slots import Ragged
from meshwright.nn.ops import LocalStep, backward_of
from meshwright.nn.order import after


def over_slots(local: LocalStep) -> LocalStep:
    """Returns the elementwise step ``local`` as a step that also accepts packed tokens."""

    def run(context: Context, step: Step, *operands: Any) -> Any:
        packed_slots = next((array for array in operands if isinstance(array, Ragged)), None)
        results = local(context, step, *(array.rows if isinstance(array, Ragged) else array for array in operands))
        return results if packed_slots is None else jax.tree.map(packed_slots.with_rows, results)

    return run


def activation_steps(name: str, local: LocalStep) -> dict[str, LocalStep]:
    """Returns the forward and backward steps of an activation by name."""
    backward = backward_of(local)

    def again(context: Context, step: Step, dout: Array, *inputs: Array) -> Any:
        # else CPUs that run layers without a loop keep what both passes compute
        ordered_inputs = after(inputs, [dout]) if default_platform() == "cpu" else inputs
        return backward(context, step, dout, *ordered_inputs)

    return {name: over_slots(local), f"{name}_backward": over_slots(again)}


def gated(context: Context, step: Step, gates: Array, up: Array) -> Array:
    """Applies the model's gated activation."""
    return gate(context.model)(gates, up)


STEPS = activation_steps("silu_mul", gated)
