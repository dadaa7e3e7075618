"""Rows of a fixed length, cut from a store of tokens: the label, the position and the document of each token."""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.train.data.token_store import TokenSpan, TokenStore

NO_LABEL = -1
"""Label of a position without a prediction."""
PADDING = 0
"""Token that fills up a row; it has no label, and all padding of a row is one document."""


class RowPart(NamedTuple):
    """Some positions of a row, each array int32: tokens, their labels, positions within the piece, and the number of
    the piece in the row. A piece is the part of a document in one row."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    documents: np.ndarray


class Rows:
    """The rows of ``seq_len`` tokens of a store, in the order of the text.

    With ``packing`` documents are concatenated, and each token is in at most one row. Document numbers keep attention
    within documents; positions count from the start of the piece. The last token of a document (its end-of-text token)
    has no label; the last token of a row has one if its document continues in the next row. A last row that is not full
    is padded, and omitted if it has no label. Fewer tokens than one row give no rows.

    Without ``packing`` rows ignore documents: the label of every position is the next token, of a row's last position
    the first token of the next row. Tokens that do not fill a row are omitted.
    """

    def __init__(self, store: TokenStore, seq_len: int, *, packing: bool = True) -> None:
        self.store, self.seq_len, self.packing = store, seq_len, packing
        num_whole, num_left = divmod(len(store), seq_len)
        if packing:
            self._length = num_whole + (num_whole > 0 and num_left > 0 and self.num_labels(num_whole) > 0)
        else:
            self._length = max(0, len(store) - 1) // seq_len

    def __len__(self) -> int:
        return self._length

    def spans(self, number: int) -> list[TokenSpan]:
        """Returns the spans of the store from which a row is made, including tokens that the row cuts off."""
        first_token = number * self.seq_len
        return [(first_token, min(first_token + self.seq_len, len(self.store)))]

    def _pieces(self, row_index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the edges between pieces, as indices in the row, and for each piece (one more than edges) the shift
        from an index in the row to the index in the store."""
        row_start = row_index * self.seq_len
        edges = self.store.boundaries(row_start, row_start + self.seq_len) if self.packing else np.empty(0, np.int64)
        return edges - row_start, np.full(len(edges) + 1, row_start)

    def read(self, number: int, positions: np.ndarray) -> RowPart:
        """Reads ``positions`` of row ``number``; reads only their tokens, and the token after each, from disk."""
        piece_edges, documents, indices = self._places(number, positions)
        # Padding and last tokens read some token that lies within the store, and are masked.
        last_index = len(self.store) - 1
        # Padding continues the positions before it, for attention that has no document numbers.
        starts = np.concatenate([[0], piece_edges])[documents - (indices > last_index)]
        stored_tokens = self.store.read(np.minimum(indices, last_index))
        # A token without a loss is stored as its complement, below 0.
        tokens = np.where(indices <= last_index, np.maximum(stored_tokens, ~stored_tokens), PADDING)
        next_tokens = self.store.read(np.minimum(indices + 1, last_index))
        has_next = (np.searchsorted(piece_edges, positions + 1, side="right") == documents) & (indices < last_index)
        labels = np.where(has_next, np.maximum(next_tokens, NO_LABEL), NO_LABEL)
        return RowPart(*(np.asarray(array, np.int32) for array in (tokens, labels, positions - starts, documents)))

    def _places(self, row_index: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the edges between pieces, and for each position its piece and its index in the store."""
        piece_edges, shifts = self._pieces(row_index)
        documents = np.searchsorted(piece_edges, positions, side="right")
        return piece_edges, documents, shifts[documents] + positions

    def mask_data(self, name: str, number: int, positions: np.ndarray) -> np.ndarray:
        """Returns a mask's int32 array ``name`` at ``positions``, 0 for padding; a scalar for lengths and prefix."""
        row_positions = np.arange(self.seq_len) if name == "lengths" else np.array(0) if name == "prefix" else positions
        indices, size = self._places(number, row_positions)[2], len(self.store)
        if name == "lengths":
            return np.array(np.count_nonzero(indices < size), np.int32)
        return np.where(indices < size, self.store.read(np.minimum(indices, size - 1), name), 0).astype(np.int32)

    def num_labels(self, number: int, *, skipped: int = 0) -> int:
        """Returns the number of positions of a row with a label, without the first ``skipped`` positions of each
        piece."""
        row_len = min(self.seq_len, len(self.store) - number * self.seq_len)
        piece_sizes = np.diff([0, *self._pieces(number)[0], row_len])
        piece_sizes[:-1] -= 1  # the last token of a document has none
        return int(np.maximum(piece_sizes - skipped, 0).sum())


class WholeRows(Rows):
    """Rows of whole documents, each cut after ``seq_len`` tokens; the rest of a row is padding.

    With ``packing`` a row has as many documents as fit: longest first, each goes into the fullest row that it fits.
    Without, a row has one. A document without a label before its cut is left out. ``summary`` counts cut documents.
    """

    def __init__(self, store: TokenStore, seq_len: int, *, packing: bool = True) -> None:
        self.store, self.seq_len, self.packing = store, seq_len, packing
        doc_edges = np.concatenate([[0], store.boundaries(0, len(store))])
        self._starts, self._stops = doc_edges[:-1], doc_edges[1:]
        self._sizes = np.minimum(np.diff(doc_edges), seq_len)
        self._predicted = np.flatnonzero(store.read(np.arange(len(store))) >= 0)
        used_docs = np.flatnonzero(self._labels(np.arange(len(self._sizes))))
        self._rows = fill_rows(self._sizes, used_docs, seq_len) if packing else [[int(doc)] for doc in used_docs]
        self._length = len(self._rows)
        fill_share = self._sizes[used_docs].sum() / max(1, self._length * seq_len)
        self.summary = (
            f"{len(used_docs)} records {'packed' if packing else 'padded'} into {self._length} rows of {seq_len}, "
            f"{fill_share:.0%} filled; {(np.diff(doc_edges)[used_docs] > seq_len).sum()} cut, "
            f"{len(doc_edges) - 1 - len(used_docs)} left out: nothing to predict in their first {seq_len} tokens"
        )

    def spans(self, number: int) -> list[TokenSpan]:
        return [(int(self._starts[document]), int(self._stops[document])) for document in self._rows[number]]

    def _pieces(self, row_index: int) -> tuple[np.ndarray, np.ndarray]:
        row_docs = self._rows[row_index]
        piece_ends = np.cumsum(self._sizes[row_docs])
        return piece_ends, np.append(self._starts[row_docs] - piece_ends + self._sizes[row_docs], len(self.store))

    def _labels(self, documents: Sequence[int] | np.ndarray, skipped: int = 0) -> np.ndarray:
        """Returns the number of labels of each document before its cut, without the first ``skipped`` positions."""
        doc_starts = self._starts[documents]
        num_before = np.searchsorted(self._predicted, [doc_starts + 1 + skipped, doc_starts + self._sizes[documents]])
        return np.maximum(num_before[1] - num_before[0], 0)

    def num_labels(self, number: int, *, skipped: int = 0) -> int:
        return int(self._labels(self._rows[number], skipped).sum())


def fill_rows(sizes: np.ndarray, kept: np.ndarray, seq_len: int) -> list[list[int]]:
    """Packs the documents ``kept`` into rows of at most ``seq_len`` tokens: best fit, longest first."""
    rows: list[list[int]] = []
    rows_by_room: defaultdict[int, deque[list[int]]] = defaultdict(deque)
    rooms: list[int] = []  # the keys of ``rows_by_room``, sorted
    for document in kept[np.argsort(-sizes[kept], kind="stable")]:
        num_tokens = int(sizes[document])
        room_index = bisect_left(rooms, num_tokens)
        if room_index == len(rooms):
            row, room = list[int](), seq_len
            rows.append(row)
        else:
            room = rooms[room_index]
            row = rows_by_room[room].popleft()
            if not rows_by_room[room]:
                del rows_by_room[room], rooms[room_index]
        row.append(int(document))
        if room > num_tokens:
            if room - num_tokens not in rows_by_room:
                insort(rooms, room - num_tokens)
            rows_by_room[room - num_tokens].append(row)
    return rows
