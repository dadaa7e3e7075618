"""Which positions of a sequence a device has: one contiguous part, or the two chunks of a zigzag."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from meshwright.core.errors import InputError


@dataclass(frozen=True)
class SequenceOrder:
    """The order of a sequence's positions over the devices of an axis: ascending, or the zigzag of ``zigzag_ranks``
    ranks if that is not 0."""

    zigzag_ranks: int = 0

    def index(self, axes: tuple[str, ...], length: int) -> Array | np.ndarray | None:
        """Returns the positions [T] of this device's ``length`` rows of a sequence split over ``axes``. Without axes
        they are known while tracing, and None stands for 0, 1, 2 and so on."""
        if not axes:
            return zigzag_order(length, self.zigzag_ranks) if self.zigzag_ranks else None
        return self.of_rank(lax.axis_index(axes), length, lax.axis_size(axes))

    def of_rank(self, rank: Array, length: int, ranks: int) -> Array:
        """Returns the positions of the ``length`` rows of one rank, of a sequence split over ``ranks``."""
        if not self.zigzag_ranks:
            return rank * length + jnp.arange(length, dtype=jnp.int32)
        return jnp.asarray(zigzag_order(length * ranks, self.zigzag_ranks)).reshape(ranks, length)[rank]

    def restored(self, rows: Array) -> Array:
        """Returns the rows [B, T, ...] of a whole sequence, sorted by position."""
        if not self.zigzag_ranks:
            return rows
        return rows[:, np.argsort(zigzag_order(rows.shape[1], self.zigzag_ranks))]


IN_ORDER = SequenceOrder()
"""Rank r has the r-th contiguous part of the sequence."""


def zigzag_order(length: int, num_ranks: int) -> np.ndarray:
    """Returns positions in zigzag order, in int32: rank r has chunks r and 2 n - 1 - r of the 2 n.

    Under the causal mask every rank then has the same work: an early chunk sees little, its late partner much. Raises
    InputError unless 2 n divides ``length``."""
    if length % (2 * num_ranks):
        raise InputError(
            f"a zigzag over {num_ranks} ranks needs {2 * num_ranks} equal chunks, and the length is {length}. "
            f"Use a multiple of {2 * num_ranks}, or fewer ranks."
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * num_ranks, -1)
    chunk_pairs = [(rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]
    return chunks[np.array(chunk_pairs).reshape(-1)].reshape(-1)
