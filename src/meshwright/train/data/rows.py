"""Rows of a fixed length, cut from a store of tokens: the label, the position and the document of each token."""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np

from meshwright.train.data.token_store import TokenSpan, TokenStore

NO_LABEL = -1
"""Label of a position without a prediction."""
PADDING = 0
"""Token after the end of the last row; it has no label, and a document number of its own."""


class Row(NamedTuple):
    """Some positions of a row, each array int32: tokens, their labels, positions within the document's piece, and the
    number of that piece in the row."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    documents: np.ndarray


class Rows:
    """The rows of ``seq_len`` tokens of a store, in the order of the text.

    With ``packing`` documents are concatenated, and each token is in exactly one row. Document numbers keep attention
    within documents; positions count from the start of the document's piece in the row. The last token of a document
    (its end-of-text token) has no label; the last token of a row has one if its document continues in the next row. The
    last row is padded, and omitted if it has no label. Fewer tokens than one row give no rows.

    Without, rows ignore documents: every position has the next token as its label, and the last label of a row is the
    first token of the next. Tokens that do not fill a row are omitted.
    """

    def __init__(self, store: TokenStore, seq_len: int, *, packing: bool = True) -> None:
        self.store, self.seq_len, self.packing = store, seq_len, packing
        whole, rest = divmod(len(store), seq_len)
        if packing:
            self._length = whole + (whole > 0 and rest > 0 and self.num_labels(whole) > 0)
        else:
            self._length = max(0, len(store) - 1) // seq_len

    def __len__(self) -> int:
        return self._length

    def spans(self, number: int) -> list[TokenSpan]:
        """Returns the tokens of the store that a row has, or cuts, as indices of the store."""
        start = number * self.seq_len
        return [(start, min(start + self.seq_len, len(self.store)))]

    def _pieces(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices in the row at which a document starts or the tokens end, and what is added to an index
        before, between and after them for that of the store."""
        start = number * self.seq_len
        found = self.store.boundaries(start, start + self.seq_len) if self.packing else np.empty(0, np.int64)
        return found - start, np.full(len(found) + 1, start)

    def read(self, number: int, positions: np.ndarray) -> Row:
        """Reads these positions of a row, and no others, from disk."""
        inner, shifts = self._pieces(number)
        documents = np.searchsorted(inner, positions, side="right")
        # Padding and last tokens read some token that lies within the store, and are masked.
        places, last = shifts[documents] + positions, len(self.store) - 1
        # Padding counts on from the document before it: without document numbers attention goes by positions.
        begins = np.concatenate([[0], inner])[documents - (places > last)]
        found = self.store.read(np.minimum(places, last))
        tokens = np.where(places <= last, np.maximum(found, ~found), PADDING)
        following = self.store.read(np.minimum(places + 1, last))
        goes_on = (np.searchsorted(inner, positions + 1, side="right") == documents) & (places < last)
        # A token without a loss is below 0.
        labels = np.where(goes_on, np.maximum(following, NO_LABEL), NO_LABEL)
        return Row(*(np.asarray(array, np.int32) for array in (tokens, labels, positions - begins, documents)))

    def num_labels(self, number: int) -> int:
        """Counts positions with a label: those whose document continues after them."""
        size = min(self.seq_len, len(self.store) - number * self.seq_len)
        return size - len(self._pieces(number)[0])


class WholeRows(Rows):
    """Rows of whole documents, each cut after ``seq_len`` tokens; what is left of a row is padding.

    With ``packing`` a row has as many as fit: the longest come first, each goes where the least room is left for it.
    Without, it has one. A document without a label before its cut is in no row. ``summary`` counts both in words.
    """

    def __init__(self, store: TokenStore, seq_len: int, *, packing: bool = True) -> None:
        self.store, self.seq_len, self.packing = store, seq_len, packing
        edges = np.concatenate([[0], store.boundaries(0, len(store))])
        self._starts, self._stops = edges[:-1], edges[1:]
        self._sizes = np.minimum(np.diff(edges), seq_len)
        predicted = np.flatnonzero(store.read(np.arange(len(store))) >= 0)
        before = np.searchsorted(predicted, np.stack([self._starts + 1, self._starts + self._sizes]))
        self._labels = np.maximum(before[1] - before[0], 0)
        kept = np.flatnonzero(self._labels)
        self._rows = fill_rows(self._sizes, kept, seq_len) if packing else [[int(number)] for number in kept]
        self._length = len(self._rows)
        filled = self._sizes[kept].sum() / max(1, self._length * seq_len)
        self.summary = (
            f"{len(kept)} records {'packed' if packing else 'padded'} into {self._length} rows of {seq_len}, "
            f"{filled:.0%} filled; {(np.diff(edges)[kept] > seq_len).sum()} cut, "
            f"{len(edges) - 1 - len(kept)} without anything to predict before the cut left out"
        )

    def spans(self, number: int) -> list[TokenSpan]:
        return [(int(self._starts[one]), int(self._stops[one])) for one in self._rows[number]]

    def _pieces(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        row = self._rows[number]
        ends = np.cumsum(self._sizes[row])
        return ends, np.append(self._starts[row] - ends + self._sizes[row], len(self.store))

    def num_labels(self, number: int) -> int:
        return int(self._labels[self._rows[number]].sum())


def fill_rows(sizes: np.ndarray, kept: np.ndarray, seq_len: int) -> list[list[int]]:
    """Returns rows of the numbers ``kept``, whose sizes are at most ``seq_len`` in a row: best fit, longest first."""
    rows: list[list[int]] = []
    by_room: defaultdict[int, deque[list[int]]] = defaultdict(deque)
    rooms: list[int] = []  # sorted: the keys of the above
    for number in kept[np.argsort(-sizes[kept], kind="stable")]:
        size = int(sizes[number])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            row, room = list[int](), seq_len
            rows.append(row)
        else:
            room = rooms[at]
            row = by_room[room].popleft()
            if not by_room[room]:
                del by_room[room], rooms[at]
        row.append(int(number))
        if room > size:
            if room - size not in by_room:
                insort(rooms, room - size)
            by_room[room - size].append(row)
    return rows
