"""Weights of the chosen experts as slots, which move to the devices of the experts as the tokens do."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.dispatch import own_slots, slots_backward
from meshwright.algebra.ops.route import Routing, chosen_of
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Adds the steps that sort weights into slots and move the slots to the devices of their experts."""
    (gates,) = tape.inputs
    slots = own_slots(tape.out, gates)
    tape.run("dispatch_gates", (gates, chosen_of(gates)), slots, details=tape.details(Routing))
    tape.move(slots, tape.out)


def backward(tape: Tape) -> None:
    """Adds the steps that move cotangents of slots back to the weights of their tokens."""
    (gates,) = tape.inputs
    slots_backward(tape, gates, chosen_of(gates))


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={"dispatch_gates": StepKind(group="embedding"), "dispatch_gates_backward": StepKind(group="embedding")},
)
