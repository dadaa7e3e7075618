"""Rules of routed experts, forward and backward: choose, send tokens to their experts, bring results back.

Each device sorts its own tokens into slots of every expert, xe[E, C_{axes of its tokens}, D]; the declared sharding
has experts on devices, xe[E_expert, C, D], and moving the axis from C to E is the AllToAll.

Attributes of ``route``: ``balance`` and ``z``, the weights of the losses on how the router spreads its tokens, and
``capacity``, the bound on an expert's slots over the mean load (of ``dispatch`` too). With any of them each device
counts its choices, and one AllReduce in the backward pass sums the counts: the losses' gradients need them.
"""

from typing import Any

import numpy as np

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.program import Op
from meshwright.algebra.trace import Trace, like, local, moved, require_whole
from meshwright.core.errors import InputError

ROUTING_ROWS: tuple[str, ...] = ("load", "kept", "importance", "z")
"""Rows of the counts routing[Er, E]; what each holds is said in `nn.experts.balance`."""

BLOCK_ROWS = 128
"""Rows of slots that one product of an expert takes. Measured on two CPU cores between 32 and 256: fewer pay for
reading weights more often, more for rows that are filled up."""

MOST_AT_ONCE = 64
"""Blocks that an accelerator gathers for one product, at most: 8192 rows."""

FEW_SLOTS = 1024
"""Slots of a device, over its experts, up to which one batched product is as good as blocks."""

ROUTING = ShardedArray("routing", ("Er", "E"), ((), ()), dtype="fp32")
"""The counts of a microbatch over all devices, as a layer's backward pass has them."""


def blocks_at_once(mean_rows: Any) -> Any:
    """Blocks that an accelerator gathers for one product of an expert that has so many rows in the mean, or arrays.

    As many as most experts have: each product reads the expert's weight, or reads and writes the sum of its gradient in
    float32, which takes as long as the product of a few hundred to two thousand rows.
    """
    return np.clip(np.ceil(mean_rows / BLOCK_ROWS), 1, MOST_AT_ONCE)


def _chosen(gates: ShardedArray) -> ShardedArray:
    """Numbers of the experts that each token goes to, and its slots there."""
    return gates.replace(name="chosen", dtype="int32")


def _counts(op: Op, gates: ShardedArray) -> tuple[ShardedArray, ...]:
    """What a device counts of its own tokens; nothing where the op has no attribute that needs it."""
    return (ROUTING.replace(unreduced=_token_axes(gates)),) if op.attributes else ()


def _token_axes(tokens: ShardedArray) -> tuple[str, ...]:
    return tuple(axis for dim in ("B", "T") for axis in tokens.axes_of(dim))


def _own_slots(slots: ShardedArray, tokens: ShardedArray) -> ShardedArray:
    """``slots`` as one device fills them from its own tokens: every expert, and C split as the tokens are.

    What the declared sharding has on E is minor in C, so that a single AllToAll moves it.
    """
    axes = _token_axes(tokens)
    experts = tuple(axis for axis in slots.axes_of("E") if axis in axes)
    kept = tuple(axis for axis in slots.axes_of("C") if axis in axes)
    others = tuple(axis for axis in axes if axis not in (*experts, *kept))
    return slots.resharded({"E": (), "C": kept + others + experts, "D": ()})


def route_forward(op: Op, trace: Trace) -> None:
    """Weights of the chosen experts of each token, from the scores of all experts."""
    gates = trace.declared(op.out)
    scores = _scores(trace.declared(op.inputs[0]), gates)
    moved(trace, trace.declared(op.inputs[0]), scores)
    results = (gates, _chosen(gates), *_counts(op, gates))
    trace.add(local(op.kind, (scores,), *results, attributes=op.attributes))


def route_backward(op: Op, trace: Trace) -> None:
    """Cotangent of the scores from that of the weights, and from the losses that the attributes ask for.

    The losses are means over the microbatches, whose number the step says.
    """
    gates = trace.declared(op.out)
    scores = _scores(trace.declared(op.inputs[0]), gates)
    trace.need(scores, _chosen(gates))
    dscores = _scores(trace.cotangent(op.inputs[0]), gates)
    attributes, totals = op.attributes, tuple(moved(trace, counts, ROUTING) for counts in _counts(op, gates))
    if attributes:
        attributes = (*attributes, ("microbatches", str(trace.shardings.strategy.num_microbatches)))
    inputs = (trace.cotangent(op.out), scores, _chosen(gates), *totals)
    trace.add(local("route_backward", inputs, dscores, attributes=attributes))
    trace.contribute(op.inputs[0], dscores)


def _scores(scores: ShardedArray, gates: ShardedArray) -> ShardedArray:
    """Scores of all experts, split over tokens as the weights are."""
    return scores.resharded({"E": (), **{dim: gates.axes_of(dim) for dim in ("B", "T")}})


def dispatch_forward(op: Op, trace: Trace) -> None:
    """Tokens into slots, then slots to the devices of their experts."""
    x, gates, out = (trace.declared(n) for n in (*op.inputs, op.out))
    require_whole(x, "D", op.kind)
    _require_alike(x, gates)
    slots = _own_slots(out, x)
    trace.add(local(op.kind, (x, _chosen(gates)), slots, attributes=op.attributes))
    moved(trace, slots, out)


def _require_alike(x: ShardedArray, gates: ShardedArray) -> None:
    """Raise InputError unless a device has the weights of just the tokens that it has: slots are its own tokens'."""
    for dim in ("B", "T"):
        if x.axes_of(dim) != gates.axes_of(dim):
            raise InputError(f"dispatch needs {x} and {gates} split alike. Give {dim} the same axes in both.")


def dispatch_backward(op: Op, trace: Trace) -> None:
    """Cotangents of slots brought back, then summed per token."""
    x, gates = (trace.declared(n) for n in op.inputs)
    dslots = moved(trace, trace.cotangent(op.out), _own_slots(trace.cotangent(op.out), x))
    dx = trace.cotangent(op.inputs[0])
    trace.need(_chosen(gates))
    trace.add(local("dispatch_backward", (dslots, _chosen(gates)), dx))
    trace.contribute(op.inputs[0], dx)


def combine_forward(op: Op, trace: Trace) -> None:
    """Results brought back to their tokens' devices, then summed per token with the weights."""
    slots, gates, out = (trace.declared(n) for n in (*op.inputs, op.out))
    own = moved(trace, slots, _own_slots(slots, gates))
    trace.add(local(op.kind, (own, gates, _chosen(gates)), like(out, gates)))
    moved(trace, like(out, gates), out)


def combine_backward(op: Op, trace: Trace) -> None:
    """Cotangents of slots, which go to their experts' devices, and of the weights."""
    slots, gates = (trace.declared(n) for n in op.inputs)
    own, chosen = _own_slots(slots, gates), _chosen(gates)
    dout = trace.cotangent(op.out)
    dout = moved(trace, dout, like(dout, gates))
    trace.need(own, gates, chosen)
    dslots, dgates = _own_slots(trace.cotangent(op.inputs[0]), gates), trace.cotangent(op.inputs[1])
    trace.add(local("combine_backward", (dout, own, gates, chosen), dslots, dgates))
    trace.contribute(op.inputs[0], dslots)
    trace.contribute(op.inputs[1], dgates)
