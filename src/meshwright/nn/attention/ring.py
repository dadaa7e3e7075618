"""Ring attention: queries stay, keys and values go round the devices block by block, and each block is attended to as
it comes by.

Forward, keys and values are sent on as many times as other devices have queries that see them. Backward they go round
once more with their own cotangents, which gather on the way and are sent home from the last device. The next block is
on its way while the block at hand is worked on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshwright.nn.attention.choice import Sight, all_seen, look, look_back
from meshwright.nn.attention.scores import row_products, safe, sink_cotangents
from meshwright.nn.attention.visibility import Places, Rule
from meshwright.nn.collectives import shift

Dealt = Literal["contiguous", "zigzag", "any"]
"""Which positions a rank has. "contiguous": the r-th part of the sequence. "zigzag": chunks r and 2 n - 1 - r of 2 n
(`zigzag_order`). "any": nothing is known before the positions are."""

Pair = tuple[Array, Array]
State = TypeVar("State")


class Held(NamedTuple):
    """What a rank keeps during the backward pass."""

    dout: Array
    o: Array
    lse: Array
    q: Array


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The ring of one attention: who is in it, how often blocks move on, and what may be left out.

    ``simple`` where only the order of positions decides what is seen: no window and no documents.
    """

    axes: tuple[str, ...]
    size: int
    moves: int
    dealt: Dealt
    divergent: bool
    simple: bool

    @property
    def by_rank(self) -> bool:
        """Whether ranks alone say what is seen of a block of another rank."""
        return self.simple and self.dealt != "any"

    def send(self, block: Pair, by: int = 1) -> Pair:
        """The block of the device ``by`` places before this one."""
        first, second = (shift(x, self.axes, by, divergent=self.divergent) for x in block)
        return first, second

    def rank(self) -> Array:
        """This device's place in the ring."""
        return lax.axis_index(self.axes)


def ring_moves(*, num_ranks: int, block_positions: int, window: int | None, dealt: Dealt) -> int:
    """How often keys are sent on: to every other rank, or only as far as the windows of contiguous ranks reach.

    Dealt out in zigzag, a chunk's neighbours are before and behind its rank, so that a window saves no move.
    """
    if window is None or dealt != "contiguous":
        return num_ranks - 1
    return min(num_ranks - 1, -(-window // block_positions))


def ring_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    *,
    axes: tuple[str, ...],
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    documents: Int[Array, "B T"] | None = None,
    key_documents: Int[Array, "B S"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    dealt: Dealt,
    divergent: bool = False,
    platform: str = "",
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """The mixed values and the log-sum-exp, as `attention` on all keys gives them.

    Inside `shard_map`: rank r has the r-th of the n equal parts of queries, keys and values, as they are dealt out over
    the mesh ``axes`` (major to minor). ``key_positions`` and ``key_documents`` are those of all parts in that order.
    ``divergent``: see `shift`.
    """
    rule = Rule(scale=scale, window=window, softcap=softcap)
    ring = _ring(axes, q.shape[1], rule, documents, dealt, divergent)
    here, everywhere = Places(positions, documents), Places(key_positions, key_documents)
    own = look(q, k, v, sinks, rule=rule, sight=_own_sight(here, ring, window), platform=platform)

    def meet(state: Pair, keys: Pair, step: Array) -> Pair:
        return _merged(state, _passing(q, keys, here, everywhere, step, ring=ring, rule=rule, platform=platform))

    start = (own[0].astype(jnp.float32), own[1])
    o, lse = start if ring.moves == 0 else _around(ring, ring.send((k, v)), start, meet, first=1)
    return o.astype(q.dtype), lse


def ring_attention_backward(
    dout: Float[Array, "B T N Hv"],
    o: Float[Array, "B T N Hv"],
    lse: Float[Array, "B T N"],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    *,
    axes: tuple[str, ...],
    positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    documents: Int[Array, "B T"] | None = None,
    key_documents: Int[Array, "B S"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    dealt: Dealt,
    divergent: bool = False,
    platform: str = "",
) -> tuple[Array, ...]:
    """(dq, dk, dv) of this rank's queries, keys and values and, where there are sinks, dsinks of its queries alone."""
    rule = Rule(scale=scale, window=window, softcap=softcap)
    ring = _ring(axes, q.shape[1], rule, documents, dealt, divergent)
    here, everywhere = Places(positions, documents), Places(key_positions, key_documents)
    held = Held(dout, o, lse, q)
    sight = _own_sight(here, ring, window)
    dq, dk, dv = look_back(*held, k, v, rule=rule, sight=sight, platform=platform, sinks=sinks)

    def passing(keys: Pair, step: Array) -> tuple[Array, Array, Array]:
        return _passing_back(held, keys, here, everywhere, step, ring=ring, rule=rule, platform=platform)

    if ring.moves:
        more, collected = _collected(ring, (k, v), passing)
        # The own part is added at home: cotangents start their round on the first device that the keys come to.
        home = ring.send(collected, -ring.moves)
        dq, dk, dv = dq.astype(jnp.float32) + more, dk + home[0], dv + home[1]
    found = (dq.astype(q.dtype), dk, dv)
    return found if sinks is None else (*found, sink_cotangents(sinks, lse, row_products(dout, o)))


def _ring(
    axes: tuple[str, ...], num_queries: int, rule: Rule, documents: Array | None, dealt: Dealt, divergent: bool
) -> Ring:
    size = lax.axis_size(axes)
    moves = ring_moves(num_ranks=size, block_positions=num_queries, window=rule.window, dealt=dealt)
    simple = rule.window is None and documents is None
    return Ring(axes=axes, size=size, moves=moves, dealt=dealt, divergent=divergent, simple=simple)


def _own_sight(here: Places, ring: Ring, window: int | None) -> Sight:
    """A rank's queries on its own keys. Positions rise along the rows of a zigzag too, though not by one."""
    rising = ring.dealt == "contiguous" or (ring.dealt == "zigzag" and window is None)
    return Sight(here, here, "rows" if rising else "places")


def _around(ring: Ring, keys: Pair, start: State, meet: Callable[[State, Pair, Array], State], *, first: int) -> State:
    """``start`` after meeting the blocks that come by, ``keys`` in step ``first``: those of that many places before."""

    def step(carry: tuple[Pair, State], index: Array) -> tuple[tuple[Pair, State], None]:
        keys, state = carry
        return (ring.send(keys), meet(state, keys, index)), None

    state = start
    if ring.moves > first:
        (keys, state), _ = lax.scan(step, (keys, start), jnp.arange(first, ring.moves))
    return meet(state, keys, jnp.int32(ring.moves))


def _collected(
    ring: Ring, keys: Pair, passing: Callable[[Pair, Array], tuple[Array, Array, Array]]
) -> tuple[Array, Pair]:
    """Cotangents of this rank's queries, and those of keys that were met last, from every rank that they met."""

    def meet(state: tuple[Array, Pair], keys: Pair, step: Array) -> tuple[Array, Pair]:
        dq, collected = state
        more, dk, dv = passing(keys, step)
        # Sent on while this block is worked on: its own part is added at this end.
        dk_before, dv_before = ring.send(collected)
        return dq + more.astype(jnp.float32), (dk_before + dk, dv_before + dv)

    keys = ring.send(keys)
    dq, dk, dv = passing(keys, jnp.int32(1))
    state = (dq.astype(jnp.float32), (dk, dv))
    return state if ring.moves == 1 else _around(ring, ring.send(keys), state, meet, first=2)


def _there(everywhere: Places, step: Array, ring: Ring, length: int) -> Places:
    """Places of the keys that come by in a step."""
    source = (ring.rank() - step) % ring.size
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, source * length, length, axis=1), everywhere)


def _by_rank(ring: Ring, step: Array, length: int, part: Callable[[int, int], State]) -> State:
    """``part`` of (first query, end of keys): all of these queries see all of these keys, and nothing else is seen.

    The block is of an earlier rank or, having come round, of a later one. Contiguous: all, or nothing. In zigzag, an
    earlier rank's first chunk is seen by both chunks here and its last one by none; both chunks of a later rank are
    seen by the last chunk here alone. Half the pairs either way, so that ranks wait for none.
    """
    half = length // 2
    earlier, later = ((0, length), (length, 0)) if ring.dealt == "contiguous" else ((0, half), (half, length))
    return lax.cond(ring.rank() >= step, lambda: part(*earlier), lambda: part(*later))


def _passing(
    q: Array, keys: Pair, here: Places, everywhere: Places, step: Array, *, ring: Ring, rule: Rule, platform: str
) -> Pair:
    """Result and log-sum-exp of the queries on the block of another rank alone."""
    k, v = keys
    length = q.shape[1]

    def part(first: int, end: int) -> Pair:
        unseen = ((0, 0), (first, 0), (0, 0))
        if end == 0:
            return jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
        last, early = q[:, first:], k[:, :end]
        o, lse = look(last, early, v[:, :end], None, rule=rule, sight=all_seen(last, early), platform=platform)
        return jnp.pad(o, (*unseen, (0, 0))), jnp.pad(lse, unseen, constant_values=-jnp.inf)

    if ring.by_rank:
        return _by_rank(ring, step, length, part)
    sight = Sight(here, _there(everywhere, step, ring, length), "places")
    return look(q, k, v, None, rule=rule, sight=sight, platform=platform)


def _passing_back(
    held: Held, keys: Pair, here: Places, everywhere: Places, step: Array, *, ring: Ring, rule: Rule, platform: str
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of the queries on the block of another rank."""
    k, v = keys
    length = k.shape[1]

    def part(first: int, end: int) -> tuple[Array, Array, Array]:
        if end == 0:
            return jnp.zeros_like(held.q), jnp.zeros_like(k), jnp.zeros_like(v)
        last, early = Held(*(x[:, first:] for x in held)), k[:, :end]
        sight = all_seen(last.q, early)
        dq, *dkeys = look_back(*last, early, v[:, :end], rule=rule, sight=sight, platform=platform)
        dk, dv = (jnp.pad(x, ((0, 0), (0, length - end), (0, 0), (0, 0))) for x in dkeys)
        return jnp.pad(dq, ((0, 0), (first, 0), (0, 0), (0, 0))), dk, dv

    if ring.by_rank:
        return _by_rank(ring, step, length, part)
    sight = Sight(here, _there(everywhere, step, ring, length), "places")
    return look_back(*held, k, v, rule=rule, sight=sight, platform=platform)


def _merged(first: Pair, second: Pair) -> Pair:
    """Softmax over the keys of both, from the results and log-sum-exps over the keys of each."""
    lse = jnp.logaddexp(first[1], second[1])
    one, other = (o.astype(jnp.float32) * jnp.exp(sums - safe(lse))[..., None] for o, sums in (first, second))
    return one + other, lse
