"""A sum of arrays of one shape, and the rules that linear ops share: inputs take the sharding of the result."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.tape import Tape, axes_beside


def forward(tape: Tape) -> None:
    """Reshards inputs to the sharding of the result; an input that lacks a dim is broadcast."""
    out = tape.out
    tape.run(tape.op.kind, [tape.move(array, array.like(out)) for array in tape.inputs], out)


def backward(tape: Tape) -> None:
    """Gives an input as wide as the result its cotangent, and a broadcast input a sum of it."""
    dout, narrow = tape.dout, list[tuple[str, ShardedArray]]()
    for name, cotangent in local_cotangents(tape, dout):
        if cotangent.dims != dout.dims:
            narrow.append((name, cotangent))
            continue
        tape.run("copy", (dout,), cotangent)
        tape.contribute(name, cotangent)
    if narrow:
        tape.run_backward((), narrow)


def local_cotangents(tape: Tape, out: ShardedArray) -> list[tuple[str, ShardedArray]]:
    """Returns each input with its cotangent as a device makes it: a sum over the axes on which the input is
    broadcast."""
    cotangents = [cotangent.like(out).replace(unreduced=axes_beside(out, cotangent)) for cotangent in tape.dinputs]
    return list(zip(tape.op.inputs, cotangents, strict=True))


OP = OpKind(forward=forward, backward=backward, steps={"add": StepKind()})
