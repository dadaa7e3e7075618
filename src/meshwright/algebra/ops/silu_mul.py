"""A gated activation, silu(gate) x up, and the rules that elementwise ops share."""

from meshwright.algebra.kinds import CountRule, OpKind, StepKind, nothing
from meshwright.algebra.ops.add import forward, local_cotangents
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape


def backward(tape: Tape) -> None:
    """Adds the step that makes cotangents from the inputs of the forward pass, in the sharding of the result."""
    out = tape.out
    tape.run_backward([array.like(out) for array in tape.inputs], local_cotangents(tape, out))


def slope_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of the activation's slope, which CPUs hold besides both cotangents; 0 on other devices."""
    return sizes.bytes(step.inputs[1]) if sizes.on_cpus else 0.0


def elementwise(name: str, scratch_bytes: CountRule = nothing) -> OpKind:
    """Returns the `OpKind` of an elementwise op called ``name``."""
    steps = {name: StepKind(), f"{name}_backward": StepKind(scratch_bytes=scratch_bytes)}
    return OpKind(forward=forward, backward=backward, steps=steps)


OP = elementwise("silu_mul", slope_bytes)
