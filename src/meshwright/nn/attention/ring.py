"""Ring attention: queries stay, keys and values go round the devices block by block, and each block is attended to as
it comes by.

Forward, keys and values are sent on as many times as other devices have queries that see them. Backward they go round
once more with their own cotangents, which gather on the way and are sent home from the last device. The next block is
on its way while the block at hand is worked on.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshwright.nn.attention.choice import attention, attention_backward
from meshwright.nn.attention.scores import Cotangents, Given, Mixed, safe
from meshwright.nn.attention.visibility import NO_PLACES, AttentionCall
from meshwright.nn.collectives import Ring

Dealt = Literal["contiguous", "zigzag", "any"]
"""Which positions a rank has. "contiguous": the r-th part of the sequence. "zigzag": chunks r and 2 n - 1 - r of 2 n
(`zigzag_order`). "any": nothing is known before the positions are."""

Pair = tuple[Array, Array]
State = TypeVar("State")


@dataclass(frozen=True, kw_only=True)
class KeyRing(Ring):
    """The devices that the keys of one attention go round, and which positions each has."""

    dealt: Dealt

    def send(self, block: Pair, by: int = 1) -> Pair:
        """The block of the device ``by`` places before this one."""
        first, second = (self.shift(x, by) for x in block)
        return first, second

    def moves(self, call: AttentionCall, length: int) -> int:
        """How often keys are sent on: to every other rank, or only as far as the windows of contiguous ranks reach.

        Dealt out in zigzag, a chunk's neighbours are before and behind its rank, so that a window saves no move.
        """
        if call.window is None or self.dealt != "contiguous":
            return self.size - 1
        return min(self.size - 1, -(-call.window // length))

    def own(self, call: AttentionCall) -> AttentionCall:
        """A rank's queries on its own keys. Positions rise along the rows of a zigzag too, though not by one."""
        rising = self.dealt == "contiguous" or (self.dealt == "zigzag" and call.window is None)
        return replace(call, key=call.query, order="rows" if rising else "places")


def ring_attention(
    call: AttentionCall,
    ring: KeyRing,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
) -> Mixed:
    """The mixed values and the log-sum-exp, as `attention` on all keys gives them.

    Inside `shard_map`: rank r has the r-th of the n equal parts of queries, keys and values, as they are dealt out over
    the ring's axes (major to minor). The keys of ``call`` are those of all parts in that order.
    """
    own = attention(ring.own(call), q, k, v)

    def meet(state: Pair, keys: Pair, step: Array) -> Pair:
        return _merged(state, _passing(call, ring, step, q, keys))

    start, moves = (own[0].astype(jnp.float32), own[1]), ring.moves(call, q.shape[1])
    o, lse = start if moves == 0 else _around(ring, moves, ring.send((k, v)), start, meet, first=1)
    return o.astype(q.dtype), lse


def ring_attention_backward(
    call: AttentionCall,
    ring: KeyRing,
    given: Given,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
) -> tuple[Array, ...]:
    """(dq, dk, dv) of this rank's queries, keys and values and, where there are sinks, dsinks of its queries alone."""
    dq, dk, dv, *dsinks = attention_backward(ring.own(call), given, q, k, v)
    moves = ring.moves(call, q.shape[1])
    if moves:
        more, collected = _collected(ring, moves, (k, v), partial(_passing_back, call, ring, given, q))
        # The own part is added at home: cotangents start their round on the first device that the keys come to.
        home = ring.send(collected, -moves)
        dq, dk, dv = dq.astype(jnp.float32) + more, dk + home[0], dv + home[1]
    return dq.astype(q.dtype), dk, dv, *dsinks


def _around(
    ring: KeyRing, moves: int, keys: Pair, start: State, meet: Callable[[State, Pair, Array], State], *, first: int
) -> State:
    """``start`` after meeting the blocks that come by, ``keys`` in step ``first``: those of that many places before."""

    def step(carry: tuple[Pair, State], index: Array) -> tuple[tuple[Pair, State], None]:
        keys, state = carry
        return (ring.send(keys), meet(state, keys, index)), None

    state = start
    if moves > first:
        (keys, state), _ = lax.scan(step, (keys, start), jnp.arange(first, moves))
    return meet(state, keys, jnp.int32(moves))


def _collected(
    ring: KeyRing, moves: int, keys: Pair, passing: Callable[[Array, Pair], Cotangents]
) -> tuple[Array, Pair]:
    """Cotangents of this rank's queries, and those of keys that were met last, from every rank that they met."""

    def meet(state: tuple[Array, Pair], keys: Pair, step: Array) -> tuple[Array, Pair]:
        dq, collected = state
        more, dk, dv = passing(step, keys)
        # Sent on while this block is worked on: its own part is added at this end.
        dk_before, dv_before = ring.send(collected)
        return dq + more.astype(jnp.float32), (dk_before + dk, dv_before + dv)

    keys = ring.send(keys)
    dq, dk, dv = passing(jnp.int32(1), keys)
    state = (dq.astype(jnp.float32), (dk, dv))
    return state if moves == 1 else _around(ring, moves, ring.send(keys), state, meet, first=2)


def _on_passing(
    call: AttentionCall, ring: KeyRing, step: Array, length: int, part: Callable[[AttentionCall, int, int], State]
) -> State:
    """``part`` of (call, first query, end of keys): these queries on these keys of the block of another rank, where
    nothing else is seen.

    Where only the order of positions decides, ranks alone say what is seen. The block is of an earlier rank or, having
    come round, of a later one. Contiguous: all, or nothing. In zigzag, an earlier rank's first chunk is seen by both
    chunks here and its last one by none; both chunks of a later rank are seen by the last chunk here alone. Half the
    pairs either way, so that ranks wait for none.
    """
    if ring.dealt == "any" or call.window is not None or call.query.document is not None:
        source = (ring.rank - step) % ring.size
        there = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, source * length, length, axis=1), call.key)
        return part(replace(call, sinks=None, key=there, order="places"), 0, length)
    whole = replace(call, sinks=None, query=NO_PLACES, key=NO_PLACES, order="all")
    half = length // 2
    earlier, later = ((0, length), (length, 0)) if ring.dealt == "contiguous" else ((0, half), (half, length))
    return lax.cond(ring.rank >= step, lambda: part(whole, *earlier), lambda: part(whole, *later))


def _passing(call: AttentionCall, ring: KeyRing, step: Array, q: Array, keys: Pair) -> Pair:
    """Result and log-sum-exp of the queries on the block of another rank alone."""
    k, v = keys

    def part(call: AttentionCall, first: int, end: int) -> Pair:
        if end == 0:
            return jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
        o, lse = attention(call, q[:, first:], k[:, :end], v[:, :end])
        unseen = ((0, 0), (first, 0), (0, 0))
        return jnp.pad(o, (*unseen, (0, 0))), jnp.pad(lse, unseen, constant_values=-jnp.inf)

    return _on_passing(call, ring, step, q.shape[1], part)


def _passing_back(call: AttentionCall, ring: KeyRing, given: Given, q: Array, step: Array, keys: Pair) -> Cotangents:
    """(dq, dk, dv) of the queries on the block of another rank."""
    k, v = keys

    def part(call: AttentionCall, first: int, end: int) -> Cotangents:
        if end == 0:
            return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
        dout, o, lse = (x[:, first:] for x in given)
        dq, *dkeys = attention_backward(call, (dout, o, lse), q[:, first:], k[:, :end], v[:, :end])
        dk, dv = (jnp.pad(x, ((0, 0), (0, k.shape[1] - end), (0, 0), (0, 0))) for x in dkeys)
        return jnp.pad(dq, ((0, 0), (first, 0), (0, 0), (0, 0))), dk, dv

    return _on_passing(call, ring, step, k.shape[1], part)


def _merged(first: Pair, second: Pair) -> Pair:
    """Softmax over the keys of both, from the results and log-sum-exps over the keys of each."""
    lse = jnp.logaddexp(first[1], second[1])
    one, other = (o.astype(jnp.float32) * jnp.exp(sums - safe(lse))[..., None] for o, sums in (first, second))
    return one + other, lse
