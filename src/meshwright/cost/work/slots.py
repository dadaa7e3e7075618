"""Slots of experts as programs compute and hold them: in blocks of rows, with or without those that nobody fills.

`nn.experts.slots` says which form they have; the sizes of a step count the slots that are filled.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.derived import Derived
from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.ops import kind_of
from meshwright.algebra.ops.dispatch import BLOCK_ROWS, FEW_SLOTS, blocks_at_once
from meshwright.algebra.ops.route import ROUTING_ROWS
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.core.dims import DTYPE_BYTES
from meshwright.spec.model import Model

CALLS_A_PRODUCT = 4
"""Kernels around a product of blocks."""


def expert_slots(model: Model, *, num_tokens: Number, imbalance: Number = 1.0) -> dict[str, Number]:
    """The dim C, slots of one expert for the tokens of a microbatch on all devices, and Er, rows of the router's
    counts; nothing for a dense model.

    tokens x experts per token / experts, times a bound on the slots or else the load of the busiest expert device over
    the mean: a step waits for that device, so each is counted with its load.
    """
    if not model.num_experts:
        return {}
    slots = num_tokens * model.experts_per_token / model.num_experts * imbalance
    return {"C": slots, "Er": len(ROUTING_ROWS)}


def slots_move(derived: Derived, mesh: Mapping[str, Any]) -> Any:
    """True where slots of experts are sent between devices; elsewhere only filled slots exist."""
    steps = (step for block in derived.blocks for step in block.forward)
    axes = {axis for step in steps if step.is_collective and "C" in step.result.dims for axis in step.axes}
    return product(mesh[axis] for axis in sorted(axes)) > 1


def slot_sizes(step: Step, sizes: OpSizes) -> OpSizes:
    """Sizes of the arrays that a local step reads and writes: every slot counts where slots are in arrays."""
    slots = _slots(step)
    if slots is None or np.all(np.asarray(sizes.spare_slots) == 1):
        return sizes
    return with_room(sizes, sizes.in_arrays | _few(slots, sizes))


def with_room(sizes: OpSizes, moving: Number) -> OpSizes:
    """The sizes with every slot of an expert counted, empty or not, where slots are ``moving``."""
    if "C" not in sizes.dims:
        return sizes
    room = np.where(moving, sizes.spare_slots, 1.0)
    return msgspec.structs.replace(sizes, dims={**sizes.dims, "C": sizes.dims["C"] * room}, cache={})


def computed_share(step: Step, sizes: OpSizes) -> Number:
    """FLOPs that products on slots compute for each that their filled slots need.

    Few slots are computed all at once. Of many, blocks that have one that is filled: from each device, and for each
    expert, half a block more than the filled slots are, in the mean; at most all slots. Where blocks are gathered for a
    product, half of what one takes is missing from the last product of each expert.
    """
    slots = _slots(step)
    if slots is None or not kind_of(step).is_einsum:
        return 1.0
    filled, at_once = _filled(slots, sizes), _at_once(slots, sizes)
    rows = np.minimum(filled + sizes.dims["E"] * BLOCK_ROWS / 2, filled * sizes.spare_slots)
    rows = rows + sizes.local(slots)["E"] * BLOCK_ROWS / 2 * (at_once - 1)
    return np.where(_few(slots, sizes), sizes.spare_slots, rows / filled)


def num_slot_products(step: Step, sizes: OpSizes) -> Number:
    """Products that a step on slots makes of its one, block by block or of several blocks."""
    slots = _slots(step)
    if slots is None:
        return 1.0
    rows = _filled(slots, sizes) * computed_share(step, sizes)
    return np.where(_few(slots, sizes), 1.0, np.ceil(rows / BLOCK_ROWS / _at_once(slots, sizes)))


def num_slot_calls(step: Step, sizes: OpSizes) -> Number:
    """Calls of kernels for a step's product: a block is taken out, multiplied, added to or chosen from what is there
    already, and put back."""
    products = num_slot_products(step, sizes)
    return np.where(products > 1, CALLS_A_PRODUCT * products, 1.0)


def block_bytes(step: Step, sizes: OpSizes) -> Number:
    """Bytes that a product of slots in blocks moves beside its operands and its result.

    Slots in arrays are read to find those that are filled. The result is cleared first, and a block of it read again
    for the rows that are not the block's; a weight's gradient is read and written in float32 for each block, and the
    block's part of it written and read. Where several blocks are gathered, their rows are written and read once more.
    """
    slots = _slots(step)
    if slots is None or not kind_of(step).is_einsum:
        return 0.0
    at = slot_sizes(step, sizes)
    moved = np.where(sizes.in_arrays, at.bytes(slots), 0.0)
    if "C" in step.result.dims:
        moved = moved + at.bytes(step.result) + sizes.bytes(step.result)
    else:
        sums = DTYPE_BYTES["fp32"] * sizes.elements(step.result) / sizes.local(slots)["E"]
        moved = moved + 4 * num_slot_products(step, sizes) * sums
    rows = sizes.total(*(array for array in (*step.inputs, step.result) if "C" in array.dims))
    gathered = np.where(_at_once(slots, sizes) > 1, 2 * rows, 0.0)
    return np.where(_few(slots, sizes), 0.0, moved + gathered)


def _slots(step: Step) -> ShardedArray | None:
    arrays = (*step.inputs, *step.results)
    return next((array for array in arrays if array.dims[:2] == ("E", "C")), None)


def _filled(slots: ShardedArray, sizes: OpSizes) -> Number:
    """Filled slots that one device has."""
    local = sizes.local(slots)
    return local["E"] * local["C"]


def _at_once(slots: ShardedArray, sizes: OpSizes) -> Number:
    """Blocks that are gathered for one product. Scores of attention are in memory on CPUs, which gather none."""
    if sizes.scores == "in_memory":
        return 1.0
    return blocks_at_once(_filled(slots, sizes) / sizes.local(slots)["E"])


def _few(slots: ShardedArray, sizes: OpSizes) -> Number:
    """Whether a device has few slots: without any to spare it has a bound, and computes them all at once as well."""
    return (_filled(slots, sizes) * sizes.spare_slots <= FEW_SLOTS) | (np.asarray(sizes.spare_slots) == 1)
