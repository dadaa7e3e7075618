"""Kinds of steps that work on the slots of experts, xe[E, C, D] and what is made of it, as well as on other arrays.

Which form the slots have follows from the derivation and the options alone:

- a bound on the slots, or few of them, or the GSPMD form: arrays [E, C, D] and batched products
- no bound, and a collective moves slots: arrays [E, C, D], products in blocks that leave out empty slots
- no bound, and slots stay on their device: `Ragged`, tokens packed by expert, products in blocks
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from meshwright.algebra.ops.experts import FEW_SLOTS
from meshwright.algebra.steps import Step
from meshwright.nn.context import Context, as_given
from meshwright.nn.experts import ragged
from meshwright.nn.experts.products import block_product, block_weight_gradient, filled_blocks, num_at_once
from meshwright.nn.experts.ragged import Ragged

LocalKind = Callable[..., Any]

ELEMENTWISE = ("silu_mul", "silu_mul_backward", "gelu_mul", "gelu_mul_backward", "gelu", "gelu_backward")


def in_blocks(context: Context, *, num_slots: int) -> bool:
    """Whether empty slots are left out: not where a bound keeps most of them filled, nor where the compiler chooses
    the communication."""
    return not context.options.capacity_factor and context.constrain is as_given and num_slots > FEW_SLOTS


def packs_tokens(context: Context, step: Step, *, num_slots: int) -> bool:
    """Whether tokens are packed by expert: empty slots are left out, and no collective of the block moves slots."""
    block = next((block for block in context.derived.blocks if block.block.name == step.block), None)
    if block is None or not in_blocks(context, num_slots=num_slots):
        return False
    return not any(s.is_collective and "C" in s.result.dims for s in (*block.forward, *block.backward))


def slots_aware(kinds: Mapping[str, LocalKind]) -> dict[str, LocalKind]:
    """``kinds`` with those among them that may be given slots taking packed ones too, and products in blocks."""
    return {
        **kinds,
        **{name: _elementwise(kinds[name]) for name in ELEMENTWISE if name in kinds},
        "einsum": _product(kinds["einsum"]),
        "bias_add": _bias_add(kinds["bias_add"]),
        "bias_add_backward": _bias_add_backward(kinds["bias_add_backward"]),
    }


def _elementwise(kind: LocalKind) -> LocalKind:
    def run(context: Context, step: Step, *given: Any) -> Any:
        return ragged.over_rows(lambda *blocks: kind(context, step, *blocks))(*given)

    return run


def _bias_add(kind: LocalKind) -> LocalKind:
    def run(context: Context, step: Step, x: Any, bias: jax.Array) -> Any:
        return ragged.ragged_bias_add(x, bias) if isinstance(x, Ragged) else kind(context, step, x, bias)

    return run


def _bias_add_backward(kind: LocalKind) -> LocalKind:
    def run(context: Context, step: Step, dout: Any) -> Any:
        return ragged.ragged_bias_add_backward(dout) if isinstance(dout, Ragged) else kind(context, step, dout)

    return run


def _product(kind: LocalKind) -> LocalKind:
    def run(context: Context, step: Step, lhs: Any, rhs: Any) -> Any:
        slots = [value for array, value in zip(step.inputs, (lhs, rhs), strict=True) if array.dims[:2] == ("E", "C")]
        if not slots:
            return kind(context, step, lhs, rhs)
        num_slots = 0 if isinstance(slots[0], Ragged) else slots[0].shape[0] * slots[0].shape[1]
        if num_slots and not in_blocks(context, num_slots=num_slots):
            return kind(context, step, lhs, rhs)
        at_once = 1
        if num_slots:
            at_once = num_at_once(slots[0].shape[1] * context.model.experts_per_token / context.model.num_experts)
        form = _weight_gradient if len(slots) == 2 else _slot_product
        return form(step, lhs, rhs, at_once)

    return run


def _slot_product(step: Step, lhs: Any, rhs: Any, at_once: int) -> Any:
    """Slots times weights: each slot times its expert's matrix, or that transposed."""
    swapped = "C" in step.inputs[1].dims
    slots, weights = (rhs, lhs) if swapped else (lhs, rhs)
    transposed = step.inputs[0 if swapped else 1].dims[2] not in step.result.dims
    if isinstance(slots, Ragged):
        return ragged.ragged_product(slots, weights, transposed=transposed)
    wide = step.result.dtype == "fp32"
    rows = block_product(_rows(slots), weights, filled_blocks(slots), transposed=transposed, wide=wide, at_once=at_once)
    return rows.reshape(*slots.shape[:2], -1)


def _weight_gradient(step: Step, lhs: Any, rhs: Any, at_once: int) -> Any:
    """The gradient of a weight from what it was multiplied with and the cotangent of what came out."""
    if step.result.dims[1] not in step.inputs[0].dims:
        lhs, rhs = rhs, lhs
    if isinstance(lhs, Ragged):
        return ragged.ragged_weight_gradient(lhs, rhs)
    # a slot with zeros on either side adds nothing
    return block_weight_gradient(_rows(lhs), _rows(rhs), filled_blocks(rhs), at_once=at_once)


def _rows(slots: jax.Array) -> jax.Array:
    return slots.reshape(-1, slots.shape[-1])
