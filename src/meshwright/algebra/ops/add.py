"""A sum of arrays, and the rules of ops that work in the sharding of their result."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.tape import Tape, axes_beside


def forward(tape: Tape) -> None:
    """Adds the op in the sharding of its result, after reshards; an input that lacks a dim is broadcast."""
    out = tape.out
    tape.run(tape.op.kind, [tape.move(array, array.like(out)) for array in tape.inputs], out)


def backward(tape: Tape) -> None:
    """Adds a copy of the cotangent for an input that has all dims; a sum of it for a broadcast input."""
    dout, broadcast_cotangents = tape.dout, list[tuple[str, ShardedArray]]()
    for name, cotangent in local_cotangents(tape, dout):
        if cotangent.dims != dout.dims:
            broadcast_cotangents.append((name, cotangent))
            continue
        tape.run("copy", (dout,), cotangent)
        tape.contribute(name, cotangent)
    if broadcast_cotangents:
        tape.run_backward((), broadcast_cotangents)


def local_cotangents(tape: Tape, out: ShardedArray) -> list[tuple[str, ShardedArray]]:
    """Returns each input's name and its local cotangent, unreduced over the axes on which the input is broadcast."""
    cotangents = [cotangent.like(out).replace(unreduced=axes_beside(out, cotangent)) for cotangent in tape.dinputs]
    return list(zip(tape.op.inputs, cotangents, strict=True))


OP = OpKind(forward=forward, backward=backward, steps={"add": StepKind()})
