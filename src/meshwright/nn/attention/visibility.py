"""The parameters of an attention call, the causal mask by element and by block, and the zigzag order of a sequence."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meshwright.core.errors import InputError
from meshwright.nn.attention.platform import default_platform

MaskKind = Literal["all", "rows", "positions"]
"""How the mask is computed. "all": every query sees every key. "rows": queries and keys are the same rows in rising
positions, so it is known while tracing that row i sees no later row. "positions": positions and documents decide."""

NOTHING, SOME, EVERYTHING = 0, 1, 2
"""How much of a block of keys the queries of a block see."""

NOWHERE = np.iinfo(np.int32).max
"""A position that no query sees: keys that pad a block have it."""


class TokenPositions(NamedTuple):
    """Position of each row and, where rows hold several documents, its document's number.

    Both are None where every query sees every key.
    """

    position: Int[Array, "..."] = None  # type: ignore[assignment]
    document: Int[Array, "..."] | None = None

    def over_keys(self) -> "TokenPositions":
        """Adds a last dim of 1, to broadcast over keys."""
        return jax.tree.map(lambda x: x[..., :, None], self)

    def over_queries(self) -> "TokenPositions":
        """Adds a dim of 1 before the last, to broadcast over queries."""
        return jax.tree.map(lambda x: x[..., None, :], self)


NO_POSITIONS = TokenPositions()


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Parameters of one attention: the scale and cap of scores, the sinks, and the mask.

    ``query`` and ``key`` are the positions of the rows, [B, T] and [B, S]. ``sinks`` are an additional logit per head.
    ``platform`` is the one that the program is traced for.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Array, " N"] | None = None
    query: TokenPositions = NO_POSITIONS
    key: TokenPositions = NO_POSITIONS
    mask: MaskKind
    platform: str = field(default_factory=default_platform)


def mask_kind(q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], *, in_order: bool) -> MaskKind:
    """Returns the kind of mask; with ``in_order`` positions rise by one along the rows (within a document)."""
    return "rows" if in_order and q.shape[1] == k.shape[1] else "positions"


def visible(query: TokenPositions, key: TokenPositions, *, window: int | None) -> Bool[Array, "..."]:
    """True where a key is not later than the query, in its document, and fewer than ``window`` positions back."""
    seen = key.position <= query.position
    if window is not None:
        seen &= query.position - key.position < window
    if query.document is not None and key.document is not None:
        seen &= query.document == key.document
    return seen


def block_visibility(
    query: TokenPositions, key: TokenPositions, *, window: int | None, query_block: int, key_block: int
) -> Int[Array, "queries keys"]:
    """Returns NOTHING, SOME or EVERYTHING for each block of queries and block of keys.

    Compares the smallest and largest position and document of each block, so the order within a block does not matter.
    NOTHING and EVERYTHING are certain; SOME may turn out to be either. Leading dims are reduced.
    """
    least, most = (_over_blocks(query, query_block, reduce).over_keys() for reduce in (jnp.min, jnp.max))
    first, last = (_over_blocks(key, key_block, reduce).over_queries() for reduce in (jnp.min, jnp.max))
    some = first.position <= most.position
    every = last.position <= least.position
    if window is not None:
        some &= least.position - last.position < window
        every &= most.position - first.position < window
    if query.document is not None and key.document is not None:
        low, high, lowest, highest = (jnp.asarray(positions.document) for positions in (least, most, first, last))
        some &= (lowest <= high) & (low <= highest)
        every &= (lowest == highest) & (low == high) & (lowest == low)
    some, every = (reduce(x, axis=tuple(range(x.ndim - 2))) for reduce, x in ((jnp.any, some), (jnp.all, every)))
    return jnp.where(every, EVERYTHING, jnp.where(some, SOME, NOTHING))


def _over_blocks(positions: TokenPositions, block: int, reduce: Callable[..., Array]) -> TokenPositions:
    return jax.tree.map(lambda x: reduce(x.reshape(*x.shape[:-1], -1, block), axis=-1), positions)


def zigzag_order(length: int, num_ranks: int) -> np.ndarray:
    """Returns positions in zigzag order: rank r has chunks r and 2 n - 1 - r of the 2 n.

    Under the causal mask every rank then has the same work: an early chunk sees little, its late partner much.
    """
    if length % (2 * num_ranks):
        raise InputError(
            f"a zigzag over {num_ranks} ranks needs {2 * num_ranks} equal chunks, and the length is {length}. "
            f"Use a multiple of {2 * num_ranks}, or fewer ranks."
        )
    chunks = np.arange(length).reshape(2 * num_ranks, -1)
    pairs = [(rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]
    return chunks[np.array(pairs).reshape(-1)].reshape(-1)
