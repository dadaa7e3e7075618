"""A gated activation, silu(gate) x up, and the rules that elementwise ops share."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.add import forward, local_cotangents
from meshwright.algebra.tape import Tape


def backward(tape: Tape) -> None:
    """Makes cotangents from the inputs of the forward pass, in the sharding of the result."""
    out = tape.out
    tape.run_backward([array.like(out) for array in tape.inputs], local_cotangents(tape, out))


def elementwise(name: str) -> OpKind:
    """Returns the kind of an elementwise op under its name."""
    return OpKind(forward=forward, backward=backward, steps={name: StepKind(), f"{name}_backward": StepKind()})


OP = elementwise("silu_mul")
