"""A product with an int8 weight, times the scale of each output channel."""

from meshwright.algebra.einsum import product_steps
from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.einsum import flops
from meshwright.algebra.trace import Trace


def forward(trace: Trace) -> None:
    """``lhs * values`` by the rules of any product, times the scale of each output channel."""
    lhs, values, scale = trace.inputs
    *before, product = product_steps(lhs, values, trace.out, slice_axes=trace.slice_axes)
    trace.add(*before)
    here = trace.move(scale, scale.like(product.result))
    trace.run("quantised_einsum", (*product.inputs, here), product.result)
    trace.move(product.result, trace.out)


OP = OpKind(forward=forward, steps={"quantised_einsum": StepKind(flops=flops, group="contraction", is_einsum=True)})
