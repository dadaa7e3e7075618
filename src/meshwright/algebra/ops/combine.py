"""Combine: moves the weighted results of experts back to their tokens' devices and sums them per token."""

from meshwright.algebra.kinds import OpKind, StepKind, row_bytes
from meshwright.algebra.ops.dispatch import own_slots
from meshwright.algebra.ops.route import chosen_of
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Adds the steps that move results back to their tokens' devices and sum them per token."""
    slots, gates, _ = tape.inputs
    moved_slots, local_out = tape.move(slots, own_slots(slots, gates)), tape.out.like(gates)
    tape.run("combine", (moved_slots, chosen_of(gates)), local_out)
    tape.move(local_out, tape.out)


def backward(tape: Tape) -> None:
    """Adds the steps that copy each token's cotangent to its slots and move these to their experts' devices."""
    _, gates, weights = tape.inputs
    dout, dslots = tape.move(tape.dout, tape.dout.like(gates)), own_slots(tape.dinputs[0], gates)
    tape.run_backward((chosen_of(gates), own_slots(weights, gates)), [(tape.op.inputs[0], dslots)], dout=dout)


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={
        "combine": StepKind(group="embedding"),
        "combine_backward": StepKind(hbm_bytes=row_bytes, group="embedding"),
    },
)
