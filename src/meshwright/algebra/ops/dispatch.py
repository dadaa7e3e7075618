"""Dispatch: sorts tokens and their weights into slots of their experts, and moves the slots to expert devices.

Each device sorts its own tokens into slots of every expert, xe[E, C_{axes of its tokens}, D]; the declared sharding has
experts on devices, xe[E_expert, C, D], and moving the axis from C to E is the AllToAll.
"""

from collections.abc import Iterable

import numpy as np

from meshwright.algebra.kinds import OpKind, StepKind, row_bytes
from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.ops.route import Routing, chosen_of, token_axes
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.algebra.tape import Tape, require_whole
from meshwright.core.errors import InputError

BLOCK_ROWS = 128
"""Rows of slots that one product of an expert takes. Measured on two CPU cores between 32 and 256: smaller blocks read
weights more often, larger ones waste padded rows."""

MOST_AT_ONCE = 64
"""Most blocks that an accelerator gathers for one product: 8192 rows."""

FEW_SLOTS = 1024
"""Slots on a device, of all its experts, up to which one batched product is as good as blocks."""

ROOM = 1.5
"""Rows that a device of experts can receive in the first round of an exchange, over the mean rows of a device."""

FURTHER_ROOM = 0.25
"""`ROOM` of each further round, for rows that found no room before: few, so that their buffers take little memory."""


def blocks_at_once(mean_rows: Number) -> Number:
    """Returns the blocks that an accelerator gathers for one product of an expert with ``mean_rows`` rows on average.

    One product takes all blocks of most experts: each reads the expert's weight, or reads and writes the sum of its
    gradient in float32, which takes as long as the product of a few hundred to two thousand rows.
    """
    return np.clip(np.ceil(mean_rows / BLOCK_ROWS), 1, MOST_AT_ONCE)


def is_at_experts(step: Step) -> bool:
    """True for every step on slots of experts, exchanges included, except dispatch and combine."""
    return any(map(has_slots, (*step.inputs, *step.results))) and not step.op.startswith(("dispatch", "combine"))


def rounds_begin_with(backward: Iterable[Step]) -> tuple[ShardedArray, ...]:
    """Returns the arrays from which further rounds of an exchange compute gradients: tokens, their slots and weights,
    and the cotangents of results; () if slots have a bound or are not exchanged."""
    step_by_op = {step.op: step for step in backward}
    tokens, gates = (step_by_op[op].inputs[1:] for op in ("dispatch_backward", "dispatch_gates_backward"))
    return (*tokens, *gates[1:], step_by_op["combine_backward"].result) if tokens[1:] else ()


def own_slots(slots: ShardedArray, tokens: ShardedArray) -> ShardedArray:
    """Returns ``slots`` sharded as each device fills them from its own tokens: all experts, and C split as the tokens
    are.

    The axes that the declared sharding has on E are minor in C, so that a single AllToAll moves them."""
    own_axes = token_axes(tokens)
    expert_axes = tuple(axis for axis in slots.axes_of("E") if axis in own_axes)
    slot_axes = tuple(axis for axis in slots.axes_of("C") if axis in own_axes)
    further_axes = tuple(axis for axis in own_axes if axis not in (*expert_axes, *slot_axes))
    return slots.resharded({"E": (), "C": slot_axes + further_axes + expert_axes} | dict.fromkeys(slots.dims[2:], ()))


def has_slots(array: ShardedArray) -> bool:
    """True for an array of slots of experts, or of hidden units of slots."""
    return array.dims[:2] == ("E", "C")


def is_bounded(steps: Iterable[Step]) -> bool:
    """True if every dispatch among the steps bounds the slots of an expert."""
    return all(step.details.capacity for step in steps if step.op == "dispatch")


def exchanges_slots(step: Step) -> bool:
    """True for an AllToAll that moves slots between token devices and expert devices."""
    return step.op == "all_to_all" and has_slots(step.full)


def moves_of_slots(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Returns the collectives and slices among the steps whose result is slots."""
    return tuple(step for step in steps if step.only_moves and has_slots(step.result))


def packs(moves: Iterable[Step]) -> bool:
    """True if all moves have a form that packed tokens support: AllToAll between C and E, gather, scatter or sum."""
    forms = {("all_to_all", "C", "E"), ("all_to_all", "E", "C"), ("all_gather", "C", ""), ("reduce_scatter", "C", "")}
    return all(step.op == "all_reduce" or (step.op, step.dim, step.to_dim) in forms for step in moves)


def forward(tape: Tape) -> None:
    """Adds the steps that sort tokens into slots and move the slots to expert devices. Raises InputError if tokens and
    gates are split differently."""
    x, gates, weights = tape.inputs
    require_whole(x, "D", "dispatch")
    for dim in ("B", "T"):
        # a device fills slots from its own tokens, and has the routing weights of only these
        if x.axes_of(dim) != gates.axes_of(dim):
            raise InputError(f"dispatch needs {x} and {gates} split alike. Give {dim} the same axes in both.")
    slots = own_slots(tape.out, x)
    # the weights' slots say how tokens are packed
    tape.run("dispatch", (x, chosen_of(gates), own_slots(weights, x)), slots, details=tape.details(Routing))
    tape.move(slots, tape.out)


def backward(tape: Tape) -> None:
    """Adds the steps that move cotangents of slots back and sum them per token; further rounds read tokens too."""
    x, gates, _ = tape.inputs
    slots_backward(tape, x, chosen_of(gates))


def slots_backward(tape: Tape, given: ShardedArray, chosen: ShardedArray) -> None:
    """Adds the steps that move cotangents of slots back and make the cotangent of ``given``; slots that are exchanged
    without a bound need ``given`` as an input too, for further rounds."""
    dslots = tape.move(tape.dout, own_slots(tape.dout, given))
    has_rounds = dslots != tape.dout and not tape.details(Routing).capacity
    inputs = (chosen, given) if has_rounds else (chosen,)
    tape.run_backward(inputs, [(tape.op.inputs[0], tape.dinputs[0])], dout=dslots)


def backward_bytes(step: Step, sizes: OpSizes) -> Number:
    """Returns the bytes of the slots' cotangents and the indices, read, and of the tokens' cotangent, written."""
    return sizes.total(*step.inputs[:2], step.result)


OP = OpKind(
    forward=forward,
    backward=backward,
    steps={
        "dispatch": StepKind(hbm_bytes=row_bytes, group="embedding"),
        "dispatch_backward": StepKind(hbm_bytes=backward_bytes, group="embedding"),
    },
)
