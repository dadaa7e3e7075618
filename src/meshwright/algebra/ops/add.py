"""A sum of arrays of one shape, and the rules that linear ops share: inputs take the sharding of the result."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.trace import Trace, axes_beside


def forward(trace: Trace) -> None:
    """Reshards inputs to the sharding of the result; an input that lacks a dim is broadcast."""
    out = trace.out
    trace.run(trace.op.kind, [trace.move(array, array.like(out)) for array in trace.inputs], out)


def backward(trace: Trace) -> None:
    """Gives an input as wide as the result its cotangent, and a broadcast input a sum of it."""
    dout, narrow = trace.dout, list[tuple[str, ShardedArray]]()
    for name, cotangent in local_cotangents(trace, dout):
        if cotangent.dims != dout.dims:
            narrow.append((name, cotangent))
            continue
        trace.run("copy", (dout,), cotangent)
        trace.contribute(name, cotangent)
    if narrow:
        trace.run_backward((), narrow)


def local_cotangents(trace: Trace, out: ShardedArray) -> list[tuple[str, ShardedArray]]:
    """Each input with its cotangent as a device makes it: a sum over the axes on which the input is broadcast."""
    cotangents = [cotangent.like(out).replace(unreduced=axes_beside(out, cotangent)) for cotangent in trace.dinputs]
    return list(zip(trace.op.inputs, cotangents, strict=True))


OP = OpKind(forward=forward, backward=backward, steps={"add": StepKind()})
