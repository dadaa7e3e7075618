"""Routing: each token's experts and their weights from the scores of all experts.

With a loss on the router, a bound on the slots, or a correction that follows the load, each device counts its choices.
One AllReduce in the backward pass sums the counts, for the gradients of the losses, the correction and the metrics.
"""

import msgspec

from meshwright.algebra.kinds import OpKind, StepKind
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.tape import Tape

ROUTING_ROWS: tuple[str, ...] = ("load", "kept", "importance", "z")
"""Rows of the counts routing[Er, E], described in `nn.experts.balance`."""

ROUTING = ShardedArray("routing", ("Er", "E"), ((), ()), dtype="fp32")
"""The counts of one layer and microbatch, summed over all devices."""


class Routing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Details: ``balance`` and ``z`` are weights of losses on the router (load balance, squared log-sum-exp of scores),
    ``capacity`` bounds an expert's slots relative to the mean load (0: no bound), losses are averaged over the step's
    ``microbatches``, and ``correction_rate`` is the change of the score correction per step."""

    balance: float = 0.0
    z: float = 0.0
    capacity: float = 0.0
    microbatches: int = 1
    correction_rate: float = 0.0


def chosen_of(gates: ShardedArray) -> ShardedArray:
    """Returns the int32 array with the numbers of each token's experts and of its slots there."""
    return gates.replace(name="chosen", dtype="int32")


def token_axes(tokens: ShardedArray) -> tuple[str, ...]:
    """Returns the mesh axes that split tokens."""
    return tuple(axis for dim in ("B", "T") for axis in tokens.axes_of(dim))


def _counts(tape: Tape) -> tuple[ShardedArray, ...]:
    """Returns the array of counts that a device makes from its own tokens; () if the op has no attributes."""
    return (ROUTING.replace(unreduced=token_axes(tape.out)),) if tape.op.attributes else ()


def forward(tape: Tape) -> None:
    """Adds the step that makes the weights of each token's chosen experts from the scores of all experts."""
    gates = tape.out
    scores = tape.move(tape.inputs[0], _scores(tape.inputs[0], gates))
    # the second input, if any, is a correction of each expert's score
    tape.run(
        "route", (scores, *tape.inputs[1:]), gates, chosen_of(gates), *_counts(tape), details=tape.details(Routing)
    )


def backward(tape: Tape) -> None:
    """Adds the step that makes the cotangent of the scores from that of the weights and from the losses that attributes
    name.

    The losses are means over the microbatches, whose number is in the details of the step."""
    gates, details = tape.out, tape.details(Routing)
    scores = _scores(tape.inputs[0], gates)
    tape.need(scores, chosen_of(gates))
    total_counts = [tape.move(counts, ROUTING) for counts in _counts(tape)]
    if tape.op.attributes:
        details = msgspec.structs.replace(details, microbatches=tape.shardings.strategy.num_microbatches)
    cotangents = [(tape.op.inputs[0], _scores(tape.dinputs[0], gates))]
    tape.run_backward((scores, chosen_of(gates), *total_counts), cotangents, details=details)


def _scores(scores: ShardedArray, gates: ShardedArray) -> ShardedArray:
    """Returns the scores of all experts, split over tokens as the weights are."""
    return scores.resharded({"E": (), **{dim: gates.axes_of(dim) for dim in ("B", "T")}})


OP = OpKind(forward=forward, backward=backward, steps={"route": StepKind(), "route_backward": StepKind()})
