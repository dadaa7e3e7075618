"""What an attention is besides its arrays: which keys a query sees, element by element and block by block, how scores
are made of products; and the order of tokens that deals blocks out evenly."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meshwright.core.errors import InputError
from meshwright.nn.attention.platform import default_platform

Order = Literal["all", "rows", "places"]
"""How the sight of a query is known. "all": it sees every key. "rows": queries and keys are the same rows in rising
positions, so that row i sees no row after it; known while tracing. "places": by positions and documents alone."""

NOTHING, SOME, EVERYTHING = 0, 1, 2
"""What the queries of a block see of a block of keys."""

NOWHERE = np.iinfo(np.int32).max
"""A position that no query sees, for keys that only fill up a block."""


class Places(NamedTuple):
    """Position of each row and, where rows hold several documents, the number of its document.

    Neither is there where every key is seen.
    """

    position: Int[Array, "..."] = None  # type: ignore[assignment]
    document: Int[Array, "..."] | None = None

    def over_keys(self) -> "Places":
        """With a last dim of one, to be held against keys."""
        return jax.tree.map(lambda x: x[..., :, None], self)

    def over_queries(self) -> "Places":
        """With a dim of one before the last, to be held against queries."""
        return jax.tree.map(lambda x: x[..., None, :], self)


NO_PLACES = Places()


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One attention: how scores are made of products, and which keys a query sees.

    ``query`` and ``key`` are the places of the rows, [B, T] and [B, S]. ``sinks`` are a further logit of each head.
    ``platform`` is "cpu", "cuda", "rocm" or "tpu" where it is not the default backend's.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Array, " N"] | None = None
    query: Places = NO_PLACES
    key: Places = NO_PLACES
    order: Order
    platform: str = field(default_factory=default_platform)


def order_of(q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], *, in_order: bool) -> Order:
    """How sight is known of rows whose positions rise by one along them (within a document), if ``in_order``."""
    return "rows" if in_order and q.shape[1] == k.shape[1] else "places"


def visible(query: Places, key: Places, *, window: int | None) -> Bool[Array, "..."]:
    """Whether the query sees the key: not later, in the same document, fewer than ``window`` positions back."""
    seen = key.position <= query.position
    if window is not None:
        seen &= query.position - key.position < window
    if query.document is not None and key.document is not None:
        seen &= query.document == key.document
    return seen


def block_sight(
    query: Places, key: Places, *, window: int | None, query_block: int, key_block: int
) -> Int[Array, "queries keys"]:
    """NOTHING, SOME or EVERYTHING for each block of queries against each block of keys.

    Told from the least and greatest position and document of a block, whatever the order within it: NOTHING and
    EVERYTHING are certain, SOME may turn out to be either. Dims in front of the rows are taken together.
    """
    least, most = (_over_blocks(query, query_block, reduce).over_keys() for reduce in (jnp.min, jnp.max))
    first, last = (_over_blocks(key, key_block, reduce).over_queries() for reduce in (jnp.min, jnp.max))
    some = first.position <= most.position
    every = last.position <= least.position
    if window is not None:
        some &= least.position - last.position < window
        every &= most.position - first.position < window
    if query.document is not None and key.document is not None:
        low, high, lowest, highest = (jnp.asarray(places.document) for places in (least, most, first, last))
        some &= (lowest <= high) & (low <= highest)
        every &= (lowest == highest) & (low == high) & (lowest == low)
    some, every = (reduce(x, axis=tuple(range(x.ndim - 2))) for reduce, x in ((jnp.any, some), (jnp.all, every)))
    return jnp.where(every, EVERYTHING, jnp.where(some, SOME, NOTHING))


def _over_blocks(places: Places, block: int, reduce: Callable[..., Array]) -> Places:
    return jax.tree.map(lambda x: reduce(x.reshape(*x.shape[:-1], -1, block), axis=-1), places)


def zigzag_order(length: int, num_ranks: int) -> np.ndarray:
    """Positions in the order in which a ring holds them: rank r has chunks r and 2 n - 1 - r of the 2 n.

    Under the causal mask every rank then has the same work: an early chunk sees little, its late partner much.
    """
    if length % (2 * num_ranks):
        raise InputError(
            f"a zigzag over {num_ranks} ranks deals out {2 * num_ranks} chunks, which do not divide {length} positions."
            f" Use a length that {2 * num_ranks} divides, or fewer ranks."
        )
    chunks = np.arange(length).reshape(2 * num_ranks, -1)
    pairs = [(rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]
    return chunks[np.array(pairs).reshape(-1)].reshape(-1)
