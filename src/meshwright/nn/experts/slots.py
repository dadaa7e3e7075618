"""Dispatch of tokens to the slots of experts and combination of their results on one device, forward and backward.

Every device sorts its own tokens, in their order, into ``capacity`` slots of each of the E experts. The array
``chosen[B, T, Ea]`` has ``expert * capacity + slot``, or ``-1 - expert`` where the expert had no slot left. Dispatch,
combine and all backward functions need only this array. Rows are moved by index, not by products with one-hot matrices.

A device that has all experts needs no empty slots: T x Ea rows sorted by expert replace the E x T slots (`Ragged`).
"""

import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.algebra.ops.dispatch import FURTHER_ROOM, ROOM
from meshwright.spec.model import Model

ROW_TILE = 8
"""Kernels for grouped products take a number of rows that is a multiple of this."""

RouterScores = Float[Array, "B T E"]
Gates = Float[Array, "B T Ea"]
Chosen = Int[Array, "B T Ea"]
SlotRows = Float[Array, "R *D"]
ResidualStream = Float[Array, "B T D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Delivery:
    """One round of exchanging rows between n devices: ``counts`` has the rows of each device for each expert,
    ``fullest`` the rows that the fullest device receives in all rounds. Each device has received ``taken`` rows in
    earlier rounds, and has ``num_own`` rows of its own tokens. ``further``: this is not the first round."""

    counts: Int[Array, "n E"]
    taken: Int[Array, ""]
    fullest: Int[Array, ""]
    num_own: int = field(metadata={"static": True})
    further: bool = field(default=False, metadata={"static": True})

    @property
    def room(self) -> int:
        """The number of rows that a device can receive in this round, a multiple of `ROW_TILE`."""
        return math.ceil((FURTHER_ROOM if self.further else ROOM) * self.num_own / ROW_TILE) * ROW_TILE

    def places(self) -> tuple[Int[Array, "n E"], Int[Array, "n E"], Int[Array, "n E"]]:
        """Returns, per sending device and expert, this round's rows: the first one among the sender's rows, the first
        one at the receiver, and their number."""
        num_devices, num_experts = self.counts.shape
        own_first = jnp.cumsum(self.counts, axis=1) - self.counts
        # in the order of rounds: all rows to one device, those of the first device first
        counts = self.counts.reshape(num_devices, num_devices, num_experts // num_devices)
        num_sent = jnp.sum(counts, axis=-1)
        rows_before = (jnp.cumsum(num_sent, axis=0) - num_sent)[..., None] + jnp.cumsum(counts, axis=-1) - counts
        first_place = rows_before.reshape(num_devices, num_experts) - self.taken
        num_skipped = jnp.clip(-first_place, 0, self.counts)
        num_rows = jnp.clip(self.room - first_place, 0, self.counts) - num_skipped
        # at the expert's device: by expert, then by device
        rows_of_expert = jnp.sum(num_rows, axis=0).reshape(num_devices, -1)
        start_row = (jnp.cumsum(rows_of_expert, axis=-1) - rows_of_expert).reshape(-1)
        expert_first = start_row[None] + jnp.cumsum(num_rows, axis=0) - num_rows
        return own_first + num_skipped, expert_first, num_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ragged:
    """Tokens packed by expert: P pieces with equally many rows, each sorted by expert, with spare rows of zeros at its
    end.

    A device's own tokens are one piece without spare rows; gathered tokens have one piece per device. ``sizes`` has the
    rows of each expert in each piece. ``route`` is the exchange between devices, if there is one."""

    rows: SlotRows
    sizes: Int[Array, "P E"]
    route: Delivery | None = None

    def __add__(self, other: "Ragged") -> "Ragged":
        return self.with_rows(self.rows + other.rows)

    def with_rows(self, rows: SlotRows) -> "Ragged":
        """Returns a copy with other rows for the same tokens and experts."""
        return replace(self, rows=rows)


ExpertSlots = Float[Array, "E C *D"] | Ragged


def rows_of(slots: ExpertSlots) -> SlotRows:
    """Reshapes slots [E, C, ...] to rows [E C, ...]; returns the rows of packed tokens."""
    return slots.rows if isinstance(slots, Ragged) else slots.reshape(-1, *slots.shape[2:])


def with_rows(slots: ExpertSlots, rows: SlotRows) -> ExpertSlots:
    """Returns ``rows`` as slots of the shape, or as a `Ragged` with the sizes and route, of ``slots``."""
    return slots.with_rows(rows) if isinstance(slots, Ragged) else rows.reshape(*slots.shape[:2], *rows.shape[1:])


def experts_of_rows(slots: Ragged) -> Int[Array, " R"]:
    """Returns the expert of each row of packed tokens; for spare rows an arbitrary one."""
    num_pieces, num_experts = slots.sizes.shape
    experts, piece_len = jnp.arange(num_experts, dtype=jnp.int32), slots.rows.shape[0] // num_pieces
    return jax.vmap(lambda sizes: jnp.repeat(experts, sizes, total_repeat_length=piece_len))(slots.sizes).reshape(-1)


def expert_capacity(model: Model, num_tokens: int, capacity_factor: float = 0.0) -> int:
    """Returns the slots per expert of a device with ``num_tokens`` tokens.

    ``ceil(capacity_factor * num_tokens * experts_per_token / num_experts)``, at most ``num_tokens``. The factor 0 drops
    nothing: a token goes to an expert at most once, so ``num_tokens`` slots are always enough. The result is then the
    same on every mesh; the cost is E / Ea times the filled slots, in memory and in the AllToAll (`nn.experts.products`
    skips empty slots, `Ragged` has none). With a factor each device limits its own tokens, so the mesh decides which
    tokens are dropped. Sources: Lepikhin et al., GShard (2020); Fedus et al., Switch Transformers (2021).
    """
    if not capacity_factor:
        return num_tokens
    mean_load = num_tokens * model.experts_per_token / model.num_experts
    rounding = 1e-9  # a product of floats that should be whole may come out above it
    return max(1, min(num_tokens, math.ceil(capacity_factor * mean_load - rounding)))


def assign_slots(experts: Chosen, *, num_experts: int, capacity: int) -> Chosen:
    """Returns ``chosen`` (see the module) from the expert indices of each token; earlier tokens get the lower slots."""
    flat_experts = experts.reshape(-1, experts.shape[-1])
    expert_ids = jnp.arange(num_experts)[None]
    is_chosen = jnp.zeros((flat_experts.shape[0], num_experts), jnp.int32)
    for choice_index in range(flat_experts.shape[-1]):
        is_chosen += flat_experts[:, choice_index, None] == expert_ids
    slot_by_expert = jnp.cumsum(is_chosen, axis=0) - 1
    slot_of_choice = jnp.take_along_axis(slot_by_expert, flat_experts, axis=-1).reshape(experts.shape)
    return jnp.where(slot_of_choice < capacity, experts * capacity + slot_of_choice, -1 - experts).astype(jnp.int32)


def expert_numbers(chosen: Chosen, *, capacity: int) -> Chosen:
    """Returns the expert index of each choice, also if it got no slot."""
    return jnp.where(chosen >= 0, chosen // capacity, -1 - chosen)


# -- tokens to slots and back ---------------------------------------------------------------------------


def packing_of(chosen: Chosen, *, num_experts: int) -> Ragged:
    """Returns a `Ragged` of zeros with one row per token and chosen expert, sorted by expert.

    ``chosen`` must drop nothing: its capacity is the number of tokens.
    """
    expert_ids = expert_numbers(chosen, capacity=chosen.shape[0] * chosen.shape[1])
    rows_per_expert = jnp.bincount(expert_ids.reshape(-1), length=num_experts).astype(jnp.int32)
    return Ragged(jnp.zeros(chosen.size, jnp.float32), rows_per_expert[None])


def _places(slots: ExpertSlots, chosen: Chosen) -> Chosen:
    """Returns the row index of each choice; negative for dropped choices."""
    if not isinstance(slots, Ragged):
        return chosen
    rows_per_expert, capacity = slots.sizes[0], chosen.shape[0] * chosen.shape[1]
    first_rows = jnp.cumsum(rows_per_expert) - rows_per_expert
    return (first_rows[chosen // capacity] + chosen % capacity).astype(jnp.int32)


def dispatch(h: ResidualStream, chosen: Chosen, like: ExpertSlots) -> ExpertSlots:
    """Copies each token, or its cotangent, to the slots of its experts, laid out like ``like``; empty slots are zeros.

    The inverse of the row indices (4 bytes each) is scattered, and then whole rows are gathered: CPUs scatter rows one
    by one.
    """
    choice_of_row, is_filled = _source_of_rows(like, chosen)
    token_rows = h.reshape(-1, h.shape[-1])[choice_of_row // chosen.shape[-1]]
    return with_rows(like, jnp.where(is_filled[:, None], token_rows, jnp.zeros((), token_rows.dtype)))


def dispatch_gates(gates: Gates, chosen: Chosen, like: ExpertSlots) -> ExpertSlots:
    """Copies each choice's weight to its slot, laid out like ``like``; empty slots are zeros."""
    choice_of_row, is_filled = _source_of_rows(like, chosen)
    return with_rows(like, jnp.where(is_filled, gates.reshape(-1)[choice_of_row], jnp.zeros((), gates.dtype)))


def combine(slots: ExpertSlots, chosen: Chosen) -> ResidualStream:
    """Returns the sum of each token's slot rows, added in float32 choice by choice; dropped choices add nothing."""
    slot_rows, row_indices = rows_of(slots), _places(slots, chosen)
    row_sums = jnp.zeros((*row_indices.shape[:-1], slot_rows.shape[-1]), jnp.float32)
    for choice_index in range(row_indices.shape[-1]):
        row_index = row_indices[..., choice_index]
        choice_rows = slot_rows[jnp.maximum(row_index, 0)].astype(jnp.float32)
        row_sums += choice_rows * (row_index >= 0).astype(jnp.float32)[..., None]
    return row_sums.astype(slot_rows.dtype)


def gates_backward(dslots: ExpertSlots, chosen: Chosen) -> Gates:
    """Returns the cotangent of each choice's weight, zero for dropped choices."""
    drows, row_indices = rows_of(dslots), _places(dslots, chosen)
    return jnp.where(row_indices >= 0, drows[jnp.maximum(row_indices, 0)], jnp.zeros((), drows.dtype))


def _source_of_rows(like: ExpertSlots, chosen: Chosen) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Returns for each row the number of the choice that fills it (0 if none), and whether there is one."""
    num_rows, row_of_choice = rows_of(like).shape[0], _places(like, chosen).reshape(-1)
    choice_ids = jnp.arange(row_of_choice.size, dtype=jnp.int32)
    # a negative index would count from the end; an index past the end is dropped
    target_rows = jnp.where(row_of_choice < 0, num_rows, row_of_choice)
    choice_of_row = jnp.full(num_rows, -1, jnp.int32).at[target_rows].set(choice_ids, mode="drop", unique_indices=True)
    return jnp.maximum(choice_of_row, 0), choice_of_row >= 0
