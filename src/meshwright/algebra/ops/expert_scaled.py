"""Weights of each token's experts times a learnt scale of each expert."""

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.ops.route import Routing, chosen_of, token_axes
from meshwright.algebra.tape import Tape


def forward(tape: Tape) -> None:
    """Adds the product in the sharding of the weights; every device has the numbers of all experts."""
    gates, scale = tape.inputs
    inputs = (gates, chosen_of(gates), tape.move(scale, scale.resharded({"E": ()})))
    tape.run("expert_scaled", inputs, tape.out, details=tape.details(Routing))


def backward(tape: Tape) -> None:
    """Adds the step for the cotangents of the weights, and of the numbers, which are sums over the device's tokens."""
    gates, scale = tape.inputs
    dgates, dscale = tape.dinputs
    sums = dscale.resharded({"E": ()}).replace(unreduced=token_axes(gates))
    cotangents = zip(tape.op.inputs, (dgates, sums), strict=True)
    inputs = (gates, chosen_of(gates), scale.resharded({"E": ()}))
    tape.run_backward(inputs, cotangents, details=tape.details(Routing))


OP = OpKind(
    forward=forward, backward=backward, steps={"expert_scaled": StepKind(), "expert_scaled_backward": StepKind()}
)
