"""A product with a quantised weight, summed in float32, times the weight's scales."""

from functools import partial
from typing import Any

from jaxtyping import Array
from msgspec.structs import replace

from meshwright.algebra.steps import Step
from meshwright.nn.context import Context
from meshwright.nn.ops.einsum import einsum
from meshwright.nn.quantisation import scaled_product


def quantised_einsum(context: Context, step: Step, lhs: Any, values: Array, scale: Array) -> Any:
    """Returns the product of ``lhs`` and the weight ``values * scale``; see `scaled_product`."""
    wide_step = replace(step, op="einsum", inputs=step.inputs[:2], result=step.result.replace(dtype="fp32"))
    return scaled_product(step, lhs, values, scale, partial(einsum, context, wide_step))


STEPS = {"quantised_einsum": quantised_einsum}
