"""A product with an int8 weight, times the scale of each output channel."""

import msgspec

from meshwright.algebra.einsum import product_steps
from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.einsum import flops
from meshwright.algebra.program import Op
from meshwright.algebra.trace import Trace, like, moved


def forward(op: Op, trace: Trace) -> None:
    """``lhs * values`` by the rules of any product, times the scale of each output channel."""
    lhs, values, scale, out = (trace.declared(n) for n in (*op.inputs, op.out))
    *before, product = product_steps(lhs, values, out, slice_axes=trace.slice_axes)
    trace.add(*before)
    here = moved(trace, scale, like(scale, product.result))
    trace.add(msgspec.structs.replace(product, op=op.kind, inputs=(*product.inputs, here)))
    moved(trace, product.result, out)


OP = OpKind(forward=forward, steps={"quantised_einsum": StepKind(flops=flops, group="contraction", is_einsum=True)})
