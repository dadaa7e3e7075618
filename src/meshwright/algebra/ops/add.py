"""A sum of arrays of one shape, and the rules that linear ops share: inputs take the sharding of the result."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Op
from meshwright.algebra.trace import Trace, axes_beside, like, local, moved


def forward(op: Op, trace: Trace) -> None:
    """Inputs brought to the sharding of the result; one that lacks a dim is broadcast."""
    out = trace.declared(op.out)
    inputs = tuple(moved(trace, trace.declared(n), like(trace.declared(n), out)) for n in op.inputs)
    trace.add(local(op.kind, inputs, out))


def backward(op: Op, trace: Trace) -> None:
    """An input as wide as the result gets its cotangent, a broadcast one a sum of it."""
    dout = trace.cotangent(op.out)
    narrow = []
    for name in op.inputs:
        cotangent = local_cotangent(trace, name, dout)
        if cotangent.dims != dout.dims:
            narrow.append((name, cotangent))
            continue
        trace.add(local("copy", (dout,), cotangent))
        trace.contribute(name, cotangent)
    if narrow:
        trace.add(local(f"{op.kind}_backward", (dout,), *(array for _, array in narrow)))
    for name, cotangent in narrow:
        trace.contribute(name, cotangent)


def local_cotangent(trace: Trace, name: str, out: ShardedArray) -> ShardedArray:
    """The cotangent of an input as a device makes it: a sum over the axes on which the input is broadcast."""
    cotangent = like(trace.cotangent(name), out)
    return cotangent.replace(unreduced=axes_beside(out, cotangent))


OP = OpKind(forward=forward, backward=backward, steps={"add": StepKind()})
