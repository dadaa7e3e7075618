"""Groups of sequences in a packed step, from which FLOPs and bytes are counted."""

import msgspec
import numpy as np

from meshwright.algebra.sizes import Number


class LikeSequences(msgspec.Struct, frozen=True):
    """``count`` equal sequences of a step, over all devices: each has ``rows`` new positions after ``before`` cached
    ones, and a ``source`` of so many positions. Numbers need not be whole."""

    count: Number
    rows: Number = 1.0
    before: Number = 0.0
    source: Number = 0.0

    @classmethod
    def of_sums(cls, rows: Number, pairs: Number, positions: Number) -> "LikeSequences":
        """Returns the equal sequences with these totals: ``rows``, ``pairs`` of a row and a position up to it, and
        ``positions``, rows included; rows must be positive."""
        num_seqs = (positions - rows / 2) / (pairs / rows - 0.5)
        return cls(num_seqs, rows / num_seqs, (positions - rows) / num_seqs)

    def pairs(self, window: int | None, *, chunked: bool = False) -> Number:
        """Returns the pairs of a row and a position that it sees: positions up to it, within the window, or with
        ``chunked`` in its chunk of ``window``. Rows that are `_anywhere` see half of their chunk on average."""
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
        """True if rows may begin anywhere in a chunk: fewer than a chunk, after at least one whole chunk, so that equal
        sequences are averages."""
        return (np.asarray(self.rows) < chunk) & (np.asarray(self.before) >= chunk)

    def positions(self, window: int | None, *, chunked: bool = False) -> Number:
        """Returns the positions, cached or new, that any row sees, over all sequences."""
        positions_each = self.rows + self.before
        if window is not None and chunked:
            before_rows = np.where(self._anywhere(window), (window - 1) / 2, self.before % window)
            return self.count * (self.rows + before_rows)
        return self.count * (positions_each if window is None else np.minimum(positions_each, window - 1 + self.rows))
