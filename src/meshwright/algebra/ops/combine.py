"""Combine: moves the results of experts back to their tokens' devices and sums them per token."""

from meshwright.algebra.kinds import OpKind, StepKind, stream
from meshwright.algebra.ops.dispatch import own_slots
from meshwright.algebra.ops.route import chosen_of
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Moves results back to their tokens' devices and sums them per token with the weights."""
    slots, gates = tape.inputs
    own, here = tape.move(slots, own_slots(slots, gates)), tape.out.like(gates)
    tape.run("combine", (own, gates, chosen_of(gates)), here)
    tape.move(here, tape.out)


def backward(tape: Tape) -> None:
    """Makes the cotangents of slots, which are moved to their experts' devices, and of the weights."""
    (slots, gates), (dslots, dgates) = tape.inputs, tape.dinputs
    dout = tape.move(tape.dout, tape.dout.like(gates))
    cotangents = zip(tape.op.inputs, (own_slots(dslots, gates), dgates), strict=True)
    tape.run_backward((own_slots(slots, gates), gates, chosen_of(gates)), cotangents, dout=dout)


def backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """Counts per slot two rows read, of dout and of the expert's result, and one written."""
    return sizes.bytes(step.result) + stream(step, sizes) - sizes.bytes(step.inputs[0])


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={
        "combine": StepKind(group="embedding"),
        "combine_backward": StepKind(hbm_bytes=backward_bytes, group="embedding"),
    },
)
