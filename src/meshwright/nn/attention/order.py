"""Which positions of a sequence a device has: a part in order, or two parts of a zigzag."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from meshwright.core.errors import InputError


@dataclass(frozen=True)
class SequenceOrder:
    """The order in which the devices of an axis have a sequence: positions in order or, with ``zigzag_ranks`` n, in the
    zigzag of n ranks."""

    zigzag_ranks: int = 0

    def index(self, axes: tuple[str, ...], length: int) -> Array | np.ndarray | None:
        """Returns the positions of this device's ``length`` rows, [T], where ``axes`` split them; known while tracing,
        or None if these are 0, 1, 2 and so on, where no axes do."""
        if not axes:
            return zigzag_order(length, self.zigzag_ranks) if self.zigzag_ranks else None
        return self.of_rank(lax.axis_index(axes), length, lax.axis_size(axes))

    def of_rank(self, rank: Array, length: int, ranks: int) -> Array:
        """Returns the positions of a rank of a sequence split over so many."""
        if not self.zigzag_ranks:
            return rank * length + jnp.arange(length, dtype=jnp.int32)
        return jnp.asarray(zigzag_order(length * ranks, self.zigzag_ranks)).reshape(ranks, length)[rank]

    def restored(self, rows: Array) -> Array:
        """Returns rows [B, T, ...] of the whole sequence in order."""
        if not self.zigzag_ranks:
            return rows
        return rows[:, np.argsort(zigzag_order(rows.shape[1], self.zigzag_ranks))]


IN_ORDER = SequenceOrder()
"""Each device has the part of the sequence that its rank says."""


def zigzag_order(length: int, num_ranks: int) -> np.ndarray:
    """Returns positions in zigzag order, in int32: rank r has chunks r and 2 n - 1 - r of the 2 n.

    Under the causal mask every rank then has the same work: an early chunk sees little, its late partner much.
    """
    if length % (2 * num_ranks):
        raise InputError(
            f"a zigzag over {num_ranks} ranks needs {2 * num_ranks} equal chunks, and the length is {length}. "
            f"Use a multiple of {2 * num_ranks}, or fewer ranks."
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * num_ranks, -1)
    chunk_pairs = [(rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]
    return chunks[np.array(chunk_pairs).reshape(-1)].reshape(-1)
