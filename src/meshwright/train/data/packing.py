"""Rows of a fixed length cut from a store: what each position sees, predicts and counts as."""

from typing import NamedTuple, Protocol

import numpy as np

from meshwright.train.data.token_store import TokenStore

NO_LABEL = -1
"""Label of a position that predicts nothing."""
PADDING = 0
"""Token after the end of the last row; it has no label, and a document number of its own."""


class Row(NamedTuple):
    """Some positions of a row, each array int32: the token, the token it predicts, its place in its document's
    piece and the number of that piece in the row."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    documents: np.ndarray


class Rows(Protocol):
    """Rows of ``seq_len`` positions, numbered from 0."""

    seq_len: int

    def __len__(self) -> int:
        """How many rows there are."""

    def read(self, number: int, positions: np.ndarray) -> Row:
        """These positions of a row, in this order."""

    def num_labels(self, number: int) -> int:
        """Labels of the whole row other than `NO_LABEL`."""


class PackedRows:
    """Documents one after the other, cut every ``seq_len`` tokens: each token is in exactly one row.

    A row says which document each position is of, so that attention stays within it; positions count from the
    start of the document's piece in the row. The last token of a document (its end-of-text token) has no label;
    the last token of a row does, where its document goes on in the next row. The last row is padded; it is left
    out where it would have no label, so that no batch is without any. Fewer tokens than one row give no rows.
    """

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        self.store, self.seq_len = store, seq_len
        whole, rest = divmod(len(store), seq_len)
        self._length = whole + (whole > 0 and rest > 0 and self.num_labels(whole) > 0)

    def __len__(self) -> int:
        return self._length

    def read(self, number: int, positions: np.ndarray) -> Row:
        """These positions of a row; only they are read from disk."""
        start = number * self.seq_len
        inner = self.store.boundaries(start, start + self.seq_len) - start
        documents = np.searchsorted(inner, positions, side="right")
        begins = np.concatenate([[0], inner])[documents]
        # Padding and last tokens read some token that lies within the store, and are masked.
        places, last = start + positions, len(self.store) - 1
        tokens = np.where(places <= last, self.store.read(np.minimum(places, last)), PADDING)
        following = self.store.read(np.minimum(places + 1, last))
        goes_on = (np.searchsorted(inner, positions + 1, side="right") == documents) & (places < last)
        return _row(tokens, np.where(goes_on, following, NO_LABEL), positions - begins, documents)

    def num_labels(self, number: int) -> int:
        """Positions whose document goes on after them."""
        start, stop = number * self.seq_len, min((number + 1) * self.seq_len, len(self.store))
        return stop - start - len(self.store.boundaries(start, stop))


class WindowRows:
    """Plain windows of ``seq_len`` tokens, blind to documents: every position has the next token as its label.

    Windows do not overlap; the last label of one is the first token of the next. Tokens that fill no window are
    left out.
    """

    def __init__(self, store: TokenStore, seq_len: int) -> None:
        self.store, self.seq_len = store, seq_len

    def __len__(self) -> int:
        return max(0, len(self.store) - 1) // self.seq_len

    def read(self, number: int, positions: np.ndarray) -> Row:
        """These positions of a window; only they are read from disk."""
        places = number * self.seq_len + positions
        return _row(self.store.read(places), self.store.read(places + 1), positions, np.zeros_like(positions))

    def num_labels(self, number: int) -> int:
        """All positions."""
        return self.seq_len


def _row(*arrays: np.ndarray) -> Row:
    return Row(*(np.asarray(array, np.int32) for array in arrays))
