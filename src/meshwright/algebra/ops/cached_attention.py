"""Attention of new positions on the keys and values of a cache."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import product
from meshwright.algebra.ops.attention import Attention
from meshwright.algebra.program import Op
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.trace import Trace, details_of, like, local, moved
from meshwright.core.errors import InputError


def forward(op: Op, trace: Trace) -> None:
    """Queries beside the heads of their cache; the result in the sharding that the product after it wants."""
    first, *others = (trace.declared(n) for n in op.inputs)
    for array in others:
        if array.axes_of("K") != first.axes_of("N") and "K" in array.dims:
            raise InputError(f"attention of {first} with {array}: heads must be split alike.")
    inputs = (first, *(moved(trace, array, like(array, first)) for array in others))
    out = trace.declared(op.out)
    result = like(out, first)
    trace.add(local(op.kind, inputs, result, details=details_of(op, Attention)))
    moved(trace, result, out)


def flops(step: Step, sizes: OpSizes) -> Number:
    """2 B T N S (H + Hv), S the slots of the cache: every slot is multiplied, whether it is visible or not."""
    queries, keys, values = step.inputs[:3]
    slots = sizes.local(keys)["S"]
    rows = product(sizes.local(queries)[dim] for dim in queries.dims[:-1])
    return 2.0 * rows * slots * (sizes.dims[queries.dims[-1]] + sizes.dims[values.dims[-1]])


OP = OpKind(forward=forward, steps={"cached_attention": StepKind(flops=flops, group="attention")})
