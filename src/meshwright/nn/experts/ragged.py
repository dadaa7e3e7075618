"""Tokens packed by expert, without empty slots: what stands for xe[E, C, D] where slots never leave their device.

A device that holds all experts needs a row for each choice of its tokens and no more: T x Ea rows sorted by expert
instead of E x T slots. Every step between dispatch and combine runs on the rows; products are done in blocks
(`nn.experts.products`). `jax.lax.ragged_dot` is not used: on CPUs, and on GPUs by default, it becomes a product with
every expert's matrix, and took 20 times as long on two CPU cores (32 experts, 4 of them chosen).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshwright.nn.experts import rows as experts
from meshwright.nn.experts.products import block_product, block_weight_gradient, grouped_blocks, num_at_once
from meshwright.nn.experts.rows import Chosen, Gates, Stream


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ragged:
    """Rows sorted by expert, those of one expert in the order of their tokens; ``sizes`` says how many each has."""

    rows: Float[Array, "R D"]
    sizes: Int[Array, " E"]

    def __add__(self, other: "Ragged") -> "Ragged":
        return Ragged(self.rows + other.rows, self.sizes)


def ragged_places(chosen: Chosen, sizes: Int[Array, " E"]) -> Chosen:
    """The row of each choice. ``chosen`` must drop nothing: its capacity is the number of tokens."""
    capacity = chosen.shape[0] * chosen.shape[1]
    first = jnp.cumsum(sizes) - sizes
    return (first[chosen // capacity] + chosen % capacity).astype(jnp.int32)


def ragged_dispatch(h: Stream, chosen: Chosen, *, num_experts: int) -> Ragged:
    """Each token copied once for each of its experts."""
    numbers = experts.expert_numbers(chosen, capacity=chosen.shape[0] * chosen.shape[1])
    sizes = jnp.bincount(numbers.reshape(-1), length=num_experts).astype(jnp.int32)
    places = ragged_places(chosen, sizes)
    return Ragged(experts.slots_of_tokens(h, places, num_slots=chosen.size), sizes)


def ragged_dispatch_backward(drows: Ragged, chosen: Chosen) -> Stream:
    """The sum of the cotangents of each token's rows."""
    return experts.tokens_of_slots(drows.rows, ragged_places(chosen, drows.sizes))


def ragged_combine(slots: Ragged, gates: Gates, chosen: Chosen) -> Stream:
    """The weighted sum of each token's rows."""
    return experts.tokens_of_slots(slots.rows, ragged_places(chosen, slots.sizes), gates)


def ragged_combine_backward(dout: Stream, slots: Ragged, gates: Gates, chosen: Chosen) -> tuple[Ragged, Gates]:
    """Cotangents of the rows and of the weights."""
    places = ragged_places(chosen, slots.sizes)
    drows = experts.slots_of_tokens(dout, places, gates, num_slots=chosen.size).astype(slots.rows.dtype)
    return Ragged(drows, slots.sizes), experts.gates_backward(dout, slots.rows, places)


# -- what happens to the rows in between -----------------------------------------------------------------


def ragged_product(slots: Ragged, weights: Float[Array, "E _ _"], *, transposed: bool = False) -> Ragged:
    """Each row times its expert's matrix, [I, O] or with ``transposed`` [O, I]."""
    blocks, at_once = grouped_blocks(slots.sizes, slots.rows.shape[0]), _at_once(slots)
    return Ragged(block_product(slots.rows, weights, blocks, transposed=transposed, at_once=at_once), slots.sizes)


def ragged_weight_gradient(left: Ragged, right: Ragged) -> Float[Array, "E I O"]:
    """For each expert the sum over its rows of left times right."""
    blocks = grouped_blocks(left.sizes, left.rows.shape[0])
    return block_weight_gradient(left.rows, right.rows, blocks, at_once=_at_once(left))


def _at_once(slots: Ragged) -> int:
    return num_at_once(slots.rows.shape[0] / slots.sizes.shape[0])


def ragged_bias_add(slots: Ragged, bias: Float[Array, "E D"]) -> Ragged:
    """Each row plus its expert's bias."""
    numbers = jnp.arange(bias.shape[0], dtype=jnp.int32)
    expert_of_row = jnp.repeat(numbers, slots.sizes, total_repeat_length=slots.rows.shape[0])
    return Ragged(slots.rows + bias[expert_of_row].astype(slots.rows.dtype), slots.sizes)


def ragged_bias_add_backward(dout: Ragged) -> Float[Array, "E D"]:
    """The sum of each expert's rows: the gradient of a weight whose input is always 1."""
    ones = Ragged(jnp.ones((dout.rows.shape[0], 1), dout.rows.dtype), dout.sizes)
    return ragged_weight_gradient(ones, dout)[:, 0]


def over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of blocks, on the rows where it is given packed ones; elementwise functions, to which the dims in
    front are all alike."""

    def run(*given: Any) -> Any:
        packed = [value for value in given if isinstance(value, Ragged)]
        if not packed:
            return function(*given)
        results = function(*(value.rows if isinstance(value, Ragged) else value for value in given))
        return jax.tree.map(lambda rows: Ragged(rows, packed[0].sizes), results)

    return run
