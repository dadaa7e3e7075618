"""Slots of experts as programs compute and store them: few in arrays of all slots, many as packed tokens in blocks.

`nn.experts.slots` describes both forms; the sizes of a step count filled slots.
"""

import msgspec
import numpy as np

from meshwright.algebra.notation import ShardedArray, product
from meshwright.algebra.ops import kind_of
from meshwright.algebra.ops.dispatch import BLOCK_ROWS, FEW_SLOTS, blocks_at_once, has_slots
from meshwright.algebra.ops.route import ROUTING_ROWS
from meshwright.algebra.sizes import Number, OpSizes
from meshwright.algebra.steps import Step
from meshwright.core.dims import DTYPE_BYTES
from meshwright.cost.formulas.serving import experts_read
from meshwright.spec.model import Model

GROUP_TILE = 128
"""Rows of a tile of a kernel for grouped products; the widths that such a kernel takes are multiples of it."""

CALLS_A_PRODUCT = 4
"""Kernels of one product of blocks (`num_slot_calls`)."""


class SlotSizes(OpSizes, frozen=True, kw_only=True):
    """Sizes of a step that may be on slots of experts. C counts the mean filled slots of an expert.

    Arrays of all slots have ``spare_slots`` times as many, the busiest expert device fills ``load`` times as many, and
    every expert device has buffers for ``room`` times as many. A token chooses within ``groups`` (all, its own) of
    experts. ``grouped``: the chip has kernels for grouped products. With ``by_device`` a token's row is sent once to
    each device or node; on its way to experts an element has ``sent_bytes``.
    """

    spare_slots: Number = 1.0
    load: Number = 1.0
    room: Number = 1.0
    groups: tuple[int, int] = (0, 0)
    grouped: bool = False
    by_device: bool = False
    sent_bytes: float = 2.0

    def elements(self, array: ShardedArray) -> Number:
        """Returns the elements of one device's block; slots on expert devices times ``room``."""
        return super().elements(array) * self._at_experts(array, self.room)

    def local(self, *arrays: ShardedArray) -> dict[str, Number]:
        """Returns the local size of every dim of the arrays; C is that of the busiest expert device."""
        size_of = super().local(*arrays)
        slots = next(filter(has_slots, reversed(arrays)), None)
        return size_of if slots is None else size_of | {"C": size_of["C"] * self._at_experts(slots, self.load)}

    def _at_experts(self, array: ShardedArray, factor: Number) -> Number:
        """Returns ``factor`` for slots whose experts are split over several devices, else 1."""
        if not has_slots(array) or not array.axes_of("E"):
            return 1.0
        return np.where(product(self.mesh[axis] for axis in array.axes_of("E")) > 1, factor, 1.0)


def expert_slots(model: Model, *, num_tokens: Number, factor: Number = 1.0) -> dict[str, Number]:
    """Returns the sizes of C, slots of one expert for the tokens of a microbatch on all devices, and of Er, rows of the
    router's counts; {} for a dense model.

    C is tokens x experts per token / experts x ``factor``, the bound on slots relative to the mean load.
    """
    if not model.num_experts:
        return {}
    slots_per_expert = num_tokens * model.experts_per_token / model.num_experts * factor
    return {"C": slots_per_expert, "Er": len(ROUTING_ROWS)}


def places_of_token(sizes: SlotSizes, num_places: Number) -> Number:
    """Returns the mean number of ``num_places`` (nodes or devices with equally many experts) that have an expert of a
    token.

    The groups of experts that a token may choose from are in few places; within them it chooses evenly."""
    mean_places, (num_groups, num_chosen_groups) = np.asarray(num_places, float), sizes.groups
    if num_groups:
        groups_per_place = np.maximum(num_groups / mean_places, 1.0)
        mean_places = np.maximum(mean_places * (1 - (1 - num_chosen_groups / num_groups) ** groups_per_place), 1.0)
    return mean_places * (1 - (1 - 1 / mean_places) ** sizes.dims["Ea"])


def slot_sizes(step: Step, sizes: SlotSizes) -> SlotSizes:
    """Returns the sizes of a step's arrays: if slots are few, empty ones count too."""
    slot_array = _slots(step)
    if slot_array is None or np.all(np.asarray(sizes.spare_slots) == 1):
        return sizes
    is_few = _few(slot_array, sizes)
    size_of = {**sizes.dims, "C": sizes.dims["C"] * np.where(is_few, sizes.spare_slots, 1.0)}
    return msgspec.structs.replace(
        sizes, dims=size_of, load=np.where(is_few, 1.0, sizes.load), room=np.where(is_few, 1.0, sizes.room), cache={}
    )


def computed_share(step: Step, sizes: SlotSizes) -> Number:
    """Returns the FLOPs that products on slots compute over the FLOPs that filled slots need.

    Few slots are computed in one product, empty or not. Of many, only blocks with a filled slot are computed: for each
    expert on average half a block more than the filled slots, and at most all slots. If a product takes several blocks,
    the last product of each expert lacks half of them on average, and computes all the same. A kernel for grouped
    products computes one tile more for each expert, as its rows begin and end within tiles.
    """
    slot_array = _slots(step)
    if slot_array is None or not kind_of(step).is_einsum:
        return 1.0
    num_filled, num_at_once = _filled(slot_array, sizes), _at_once(slot_array, sizes)
    half_rows = sizes.local(slot_array)["E"] * BLOCK_ROWS / 2
    num_rows = np.minimum(num_filled + half_rows, num_filled * sizes.spare_slots) + half_rows * (num_at_once - 1)
    num_rows = np.where(has_kernel(step, sizes), num_filled + sizes.local(slot_array)["E"] * GROUP_TILE, num_rows)
    return np.where(_few(slot_array, sizes), sizes.spare_slots, num_rows / num_filled)


def has_kernel(step: Step, sizes: SlotSizes) -> Number:
    """True where the chip has a kernel for a product of packed tokens, and the widths are whole tiles."""
    size_by_dim, operands = sizes.local(*step.inputs), step.inputs[:2]
    remainders = (size_by_dim[dim] % GROUP_TILE for array in operands for dim in array.dims if dim not in ("E", "C"))
    return sizes.grouped & (sum(remainders) == 0)


def num_slot_products(step: Step, sizes: SlotSizes) -> Number:
    """Returns the number of products into which a product on slots is cut, each of one or several blocks."""
    array = _slots(step)
    if array is None:
        return 1.0
    num_rows = _filled(array, sizes) * computed_share(step, sizes)
    return np.where(
        _few(array, sizes) | has_kernel(step, sizes), 1.0, np.ceil(num_rows / BLOCK_ROWS / _at_once(array, sizes))
    )


def num_slot_calls(step: Step, sizes: SlotSizes) -> Number:
    """Returns the kernel calls of a step's product: each block is read, multiplied, merged with the result so far, and
    written back; one call if it is not cut into blocks."""
    num_products = num_slot_products(step, sizes)
    return np.where(num_products > 1, CALLS_A_PRODUCT * num_products, 1.0)


def block_bytes(step: Step, sizes: SlotSizes) -> Number:
    """Returns the bytes that a product of slots in blocks moves besides its operands and its result.

    The result is cleared first, and each block of it is read again to keep rows of other blocks; a grouped kernel's
    result is cleared in spare rows. A weight's gradient is read and written in float32 for each block, and so is the
    block's part of it. If several blocks are gathered, their rows are written and read once more.
    """
    slot_array = _slots(step)
    if slot_array is None or not kind_of(step).is_einsum:
        return 0.0
    if "C" in step.result.dims:
        moved_bytes = 2 * sizes.bytes(step.result)
    else:
        sum_bytes = DTYPE_BYTES["fp32"] * sizes.elements(step.result) / sizes.local(slot_array)["E"]
        moved_bytes = 4 * num_slot_products(step, sizes) * sum_bytes
    row_bytes = sizes.total(*(array for array in (*step.inputs, step.result) if "C" in array.dims))
    gathered_bytes = np.where(_at_once(slot_array, sizes) > 1, 2 * row_bytes, 0.0)
    kernel_bytes = moved_bytes if "C" in step.result.dims else 0.0
    bytes_in_blocks = np.where(has_kernel(step, sizes), kernel_bytes, moved_bytes + gathered_bytes)
    return np.where(_few(slot_array, sizes), 0.0, bytes_in_blocks)


def unread_bytes(step: Step, sizes: SlotSizes) -> Number:
    """Returns the bytes of the weights of experts that no token chose, which engines do not read (`experts_read`)."""
    if _slots(step) is None or not kind_of(step).is_einsum or "C" not in step.result.dims:
        return 0.0
    weight_arrays = [array for array in step.inputs if "E" in array.dims and not has_slots(array)]
    num_all, num_chosen = sizes.dims["E"], sizes.dims["Ea"]
    num_read = experts_read(sizes.dims["C"] * num_all / num_chosen, num_experts=num_all, active_experts=num_chosen)
    return (1 - num_read / num_all) * sizes.total(*weight_arrays)


def _slots(step: Step) -> ShardedArray | None:
    arrays = (*step.inputs, *step.results)
    return next(filter(has_slots, arrays), None)


def _filled(slot_array: ShardedArray, sizes: SlotSizes) -> Number:
    """Returns the number of filled slots on one device."""
    size_by_dim = sizes.local(slot_array)
    return size_by_dim["E"] * size_by_dim["C"]


def _at_once(slot_array: ShardedArray, sizes: SlotSizes) -> Number:
    """Returns the number of blocks that a product gathers: 1 on CPUs, known by their attention scores in memory."""
    if sizes.scores == "in_memory":
        return 1.0
    return blocks_at_once(_filled(slot_array, sizes) / sizes.local(slot_array)["E"])


def _few(slot_array: ShardedArray, sizes: SlotSizes) -> Number:
    """True if one product takes all slots: they are at most `FEW_SLOTS`, or a bound leaves no spare slots."""
    return (_filled(slot_array, sizes) * sizes.spare_slots <= FEW_SLOTS) | (np.asarray(sizes.spare_slots) == 1)
