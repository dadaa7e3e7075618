"""Ring attention: queries stay on their device; blocks of keys and values are sent around the ring.

In the forward pass keys and values are sent on until they have reached every device whose queries see them. In the
backward pass they are sent again together with their cotangents, to which each device adds its contribution; the last
device sends the cotangents to the owner of the keys. The next block is in flight while the current one is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from meshwright.algebra.rewrites.rings import positions_back
from meshwright.masks.table import NOTHING
from meshwright.nn.attention.call import AttentionCall
from meshwright.nn.attention.choice import attention, attention_backward
from meshwright.nn.attention.kernels.scores import (
    AttentionResult,
    BackwardInputs,
    HeadKeys,
    HeadQueries,
    KeyValues,
    safe,
)
from meshwright.nn.attention.order import IN_ORDER, SequenceOrder
from meshwright.nn.collectives import Ring

COARSE_BLOCKS = 8
"""Blocks per side of a rank's part, from whose mask it is decided whether its queries see another rank's keys."""

Pair = tuple[Array, Array]
_Carry = TypeVar("_Carry")


@dataclass(frozen=True, kw_only=True)
class KeyRing(Ring):
    """The ring of one attention, and which positions each rank has."""

    order: SequenceOrder = IN_ORDER

    def send(self, block: Pair, by: int = 1) -> Pair:
        """Returns the pair of arrays from the device whose rank is ``by`` lower."""
        k_block, v_block = (self.shift(x, by) for x in block)
        return k_block, v_block

    def moves(self, call: AttentionCall, length: int) -> int:
        """Returns how many times keys are sent on: to every other rank, or as far as a causal window or chunk reaches.

        In zigzag order the neighbours of a chunk are on the ranks before and after, so a window saves nothing.
        """
        near = next((name for name in ("chunk", "window") if name in call.terms), "")
        if not near or "causal" not in call.terms or self.order.zigzag_ranks:
            return self.size - 1
        num_back = int(positions_back(call.terms[near][0], length, chunked=near == "chunk"))
        return min(self.size - 1, -(-num_back // length))

    def own(self, call: AttentionCall, length: int) -> AttentionCall:
        """Returns the call of a rank's queries on its own keys.

        In zigzag order positions increase along the rows, but are not consecutive.
        """
        known_masks = {"causal"} if self.order.zigzag_ranks else {"causal", "window"}
        if call.terms.keys() <= known_masks and call.ignores_places:
            return replace(call, q_idx=None, kv_idx=None)
        positions = self.order.of_rank(self.rank, length, self.size)
        return replace(call, q_idx=positions, kv_idx=positions)


def ring_attention(call: AttentionCall, ring: KeyRing, q: HeadQueries, k: HeadKeys, v: KeyValues) -> AttentionResult:
    """Returns the result and log-sum-exp of this rank's queries on the keys of all ranks.

    Runs inside `shard_map`: rank r has the r-th of the n equal parts of queries, keys and values, as they are sharded
    over the ring's axes (major to minor).
    """
    own_result = attention(ring.own(call, q.shape[1]), q, k, v)

    def add_block(state: Pair, keys: Pair, step: Array) -> Pair:
        """Merges two results with their log-sum-exps into the softmax over the keys of both."""
        pair = _passing(call, ring, step, q, keys)
        lse = jnp.logaddexp(state[1], pair[1])
        # safe: where neither has seen a key, the difference of two infinities would be NaN
        held_o, added_o = (o.astype(jnp.float32) * jnp.exp(lse_i - safe(lse))[..., None] for o, lse_i in (state, pair))
        return held_o + added_o, lse

    # float32, as every passing block rescales the result and adds to it
    own_pair, num_moves = (own_result[0].astype(jnp.float32), own_result[1]), ring.moves(call, q.shape[1])
    o, lse = own_pair if num_moves == 0 else _around(ring, num_moves, ring.send((k, v)), own_pair, add_block, first=1)
    return o.astype(q.dtype), lse


def ring_attention_backward(
    call: AttentionCall, ring: KeyRing, given: BackwardInputs, q: HeadQueries, k: HeadKeys, v: KeyValues
) -> tuple[Array, ...]:
    """Returns (dq, dk, dv) of this rank's part; with sinks then dsinks from this rank's queries only, then the
    cotangents of the score rule's arrays."""
    dq, dk, dv, *other_cotangents = attention_backward(ring.own(call, q.shape[1]), given, q, k, v)
    num_moves = ring.moves(call, q.shape[1])
    if num_moves:
        ring_grads, dkv = _collected(ring, num_moves, (k, v), partial(_passing_back, call, ring, given, q))
        # Cotangents start on the first device that the keys reach, so the own part is added here.
        home_dkv = ring.send(dkv, -num_moves)
        dq, dk, dv = dq.astype(jnp.float32) + ring_grads[0], dk + home_dkv[0], dv + home_dkv[1]
        # the own part begins with the cotangents of sinks, which passing keys do not have
        first_learned = len(other_cotangents) - len(ring_grads) + 1
        other_cotangents[first_learned:] = jax.tree.map(jnp.add, other_cotangents[first_learned:], ring_grads[1:])
    return dq.astype(q.dtype), dk, dv, *other_cotangents


def _around(
    ring: KeyRing,
    num_moves: int,
    keys: Pair,
    start: _Carry,
    add_block: Callable[[_Carry, Pair, Array], _Carry],
    *,
    first: int,
) -> _Carry:
    """Folds ``add_block`` over passing blocks from ``start``; the first, ``keys``, is from ``first`` ranks before."""

    def step(carry: tuple[Pair, _Carry], step_index: Array) -> tuple[tuple[Pair, _Carry], None]:
        keys, state = carry
        return (ring.send(keys), add_block(state, keys, step_index)), None

    state = start
    if num_moves > first:
        (keys, state), _ = lax.scan(step, (keys, start), jnp.arange(first, num_moves))
    # outside of the loop, because the last block is not sent on
    return add_block(state, keys, jnp.int32(num_moves))


def _collected(
    ring: KeyRing, num_moves: int, keys: Pair, grads_of: Callable[[Array, Pair], tuple[list[Array], Pair]]
) -> tuple[list[Array], Pair]:
    """Returns the cotangents of this rank's queries and score rule, and the complete cotangents of the keys that passed
    last."""

    def add_block(state: tuple[list[Array], Pair], keys: Pair, step: Array) -> tuple[list[Array], Pair]:
        total_cotangents, collected_dkv = state
        added_cotangents, (dk, dv) = grads_of(step, keys)
        # The sums are in flight while this block is computed, whose part is added after the send.
        dk_before, dv_before = ring.send(collected_dkv)
        return jax.tree.map(jnp.add, total_cotangents, added_cotangents), (dk_before + dk, dv_before + dv)

    keys = ring.send(keys)
    state = grads_of(jnp.int32(1), keys)
    return state if num_moves == 1 else _around(ring, num_moves, ring.send(keys), state, add_block, first=2)


def _on_passing(
    call: AttentionCall, ring: KeyRing, step: Array, q: Array, run: Callable[[AttentionCall, int, int], _Carry]
) -> _Carry:
    """Returns ``run(call, first query, end of keys)`` for the visible pairs of this rank's queries and another rank's
    keys.

    If the mask is causal only, the ranks decide. The block comes from an earlier rank or, once around the ring, from a
    later one. In order: everything or nothing is visible. In zigzag: both chunks of queries see an earlier rank's first
    chunk and none sees its last; of a later rank's chunks only this rank's last chunk sees any, and it sees both. That
    is half the pairs in both cases, so all ranks take equally long. For other masks a coarse table of blocks decides,
    and keys that no query sees are skipped."""
    batch, length, heads = q.shape[:3]
    if call.terms.keys() != {"causal"} or not call.ignores_places:
        source_rank = (ring.rank - step) % ring.size
        q_positions, kv_positions = (ring.order.of_rank(rank, length, ring.size) for rank in (ring.rank, source_rank))
        # sinks count once, with a rank's own keys
        passing_call = replace(call, sinks=None, q_idx=q_positions, kv_idx=kv_positions)
        coarse_blocks = passing_call.blocks(batch, heads, *[-(-length // COARSE_BLOCKS)] * 2)
        sees_any = jnp.any(jnp.asarray(coarse_blocks.kinds) != NOTHING)
        return lax.cond(sees_any, lambda: run(passing_call, 0, length), lambda: run(passing_call, length, 0))
    unmasked_call = replace(call, sinks=None, q_idx=None, kv_idx=None, mask=None)
    half_len = length // 2
    early_cut, late_cut = ((0, half_len), (half_len, length)) if ring.order.zigzag_ranks else ((0, length), (length, 0))
    return lax.cond(ring.rank >= step, lambda: run(unmasked_call, *early_cut), lambda: run(unmasked_call, *late_cut))


def _passing(call: AttentionCall, ring: KeyRing, step: Array, q: Array, keys: Pair) -> Pair:
    """Returns the result and log-sum-exp of the queries on one passing block only."""
    k, v = keys

    def part(call: AttentionCall, first_query: int, num_keys: int) -> Pair:
        if num_keys == 0:
            return jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
        o, lse = attention(call, q[:, first_query:], k[:, :num_keys], v[:, :num_keys])
        padding = ((0, 0), (first_query, 0), (0, 0))
        return jnp.pad(o, (*padding, (0, 0))), jnp.pad(lse, padding, constant_values=-jnp.inf)

    return _on_passing(call, ring, step, q, part)


def _passing_back(
    call: AttentionCall, ring: KeyRing, inputs: BackwardInputs, q: Array, step: Array, keys: Pair
) -> tuple[list[Array], Pair]:
    """Returns [dq in float32, cotangents of the score rule's arrays] and (dk, dv) of the queries on one passing
    block."""
    k, v = keys

    def part(call: AttentionCall, first_query: int, num_keys: int) -> tuple[list[Array], Pair]:
        if num_keys == 0:
            learned_arrays = call.score.arrays if call.learns and call.score else ()
            zero_grads = [jnp.zeros(q.shape, jnp.float32), *(jnp.zeros_like(x) for x in learned_arrays)]
            return zero_grads, (jnp.zeros_like(k), jnp.zeros_like(v))
        dout, o, lse = (x[:, first_query:] for x in inputs)
        dq, *more_grads = attention_backward(call, (dout, o, lse), q[:, first_query:], k[:, :num_keys], v[:, :num_keys])
        padding = ((0, 0), (0, k.shape[1] - num_keys), (0, 0), (0, 0))
        dk, dv = (jnp.pad(x, padding) for x in more_grads[:2])
        dq = jnp.pad(dq.astype(jnp.float32), ((0, 0), (first_query, 0), (0, 0), (0, 0)))
        return [dq, *more_grads[2:]], (dk, dv)

    return _on_passing(call, ring, step, q, part)
