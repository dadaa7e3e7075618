"""A gated activation, silu(gate) x up, and the rules that elementwise ops share."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward, local_cotangent
from meshwright.algebra.program import Op
from meshwright.algebra.trace import Trace, like, local


def backward(op: Op, trace: Trace) -> None:
    """Cotangents from the inputs of the forward pass, in the sharding of the result."""
    out = trace.declared(op.out)
    inputs = tuple(like(trace.declared(n), out) for n in op.inputs)
    trace.need(*inputs)
    cotangents = tuple(local_cotangent(trace, n, out) for n in op.inputs)
    trace.add(local(f"{op.kind}_backward", (trace.cotangent(op.out), *inputs), *cotangents))
    for name, cotangent in zip(op.inputs, cotangents, strict=True):
        trace.contribute(name, cotangent)


def elementwise(name: str) -> OpKind:
    """The kind of an elementwise op under its name."""
    return OpKind(forward=forward, backward=backward, steps={name: StepKind(), f"{name}_backward": StepKind()})


OP = elementwise("silu_mul")
