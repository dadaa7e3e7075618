"""Sequences of packed steps, as counts need them."""

import msgspec
import numpy as np

from meshwright.algebra.sizes import Number


class LikeSequences(msgspec.Struct, frozen=True):
    """Sequences that are alike in a step: ``count`` of them on all devices, each with ``rows`` new positions behind
    ``before`` that a cache has, and a ``source`` of so many. Numbers need not be whole."""

    count: Number
    rows: Number = 1.0
    before: Number = 0.0
    source: Number = 0.0

    @classmethod
    def of_sums(cls, rows: Number, pairs: Number, positions: Number) -> "LikeSequences":
        """Returns the sequences that have so many rows, pairs of a row and a position up to it, and positions with
        these rows in all; rows must be positive."""
        num_seqs = (positions - rows / 2) / (pairs / rows - 0.5)
        return cls(num_seqs, rows / num_seqs, (positions - rows) / num_seqs)

    def pairs(self, window: int | None, *, chunked: bool = False) -> Number:
        """Returns the pairs of a row and a position that it sees: those up to it, at most the window, or ``chunked``
        those of its chunk of so many. Rows that are `_anywhere` see half of it in the mean."""
        num_rows, num_before = self.rows, self.before
        if window is not None and chunked:
            sums = (p // window * window * (window + 1) / 2 + p % window * (p % window + 1) / 2
                    for p in (num_before + num_rows, num_before))  # fmt: skip
            pairs_each = next(sums) - next(sums)
            return self.count * np.where(self._anywhere(window), num_rows * (window + 1) / 2, pairs_each)
        pairs_each = num_rows * (num_before + (num_rows + 1) / 2)
        if window is not None:
            unclipped_rows = np.clip(window - num_before, 0, num_rows)  # rows that see all positions
            pairs_each = unclipped_rows * (num_before + (unclipped_rows + 1) / 2) + (num_rows - unclipped_rows) * window
        return self.count * pairs_each

    def _anywhere(self, chunk: int) -> Number:
        """True of fewer rows than a chunk behind a whole one: of texts that are alike on average, they begin anywhere
        in a chunk."""
        return (np.asarray(self.rows) < chunk) & (np.asarray(self.before) >= chunk)

    def positions(self, window: int | None, *, chunked: bool = False) -> Number:
        """Returns the positions of the cache that rows see."""
        positions_each = self.rows + self.before
        if window is not None and chunked:
            before_rows = np.where(self._anywhere(window), (window - 1) / 2, self.before % window)
            return self.count * (self.rows + before_rows)
        return self.count * (positions_each if window is None else np.minimum(positions_each, window - 1 + self.rows))
