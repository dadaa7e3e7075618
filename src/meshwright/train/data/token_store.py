"""Tokens on disk with the starts of documents, read on demand; and the choice of held-out documents."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np

from meshwright.core.errors import CannotRunError, InputError

TOKENS, STARTS, CHECKSUMS = "tokens", "starts", "checksums"
"""The files of a store: tokens, where documents start (uint64, the number of tokens as last entry), and the CRC-32
(uint32) of every `CHUNK_BYTES` of the tokens."""
START_BYTES = 8
CHUNK_BYTES = 2**16
CHECKED = 2**16
"""Number of tokens of each file that are checked when it is opened; other tokens are checked when they are read."""
TokenSpan = tuple[int, int]
"""(start, stop): tokens from start up to, not including, stop."""


class CheckedTokens:
    """Tokens in a file; chunks are compared with their checksums when they are first read.

    The whole file is not checked: it may be far larger than the part that a run reads.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.file, self.dtype = path, _mapped(path, dtype), np.dtype(dtype)
        sums_path = path.with_name(CHECKSUMS)
        self.sums = _mapped(sums_path, "uint32") if sums_path.is_file() else None  # older stores have none
        self.checked = np.zeros(-(-self.file.nbytes // CHUNK_BYTES), bool)
        self.chunk = CHUNK_BYTES // self.file.itemsize

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, indices: np.ndarray | int) -> np.ndarray:
        """Returns the tokens at these indices of the file. Raises CannotRunError for a damaged chunk."""
        if self.sums is not None:
            for chunk_index in np.unique(np.asarray(indices) % len(self) // self.chunk):
                if not self.checked[chunk_index]:
                    self._check(int(chunk_index), self.sums)
        return np.asarray(self.file[indices])

    def _check(self, chunk_index: int, sums: np.ndarray) -> None:
        start = chunk_index * self.chunk
        if chunk_index >= len(sums) or zlib.crc32(self.file[start : start + self.chunk].tobytes()) != sums[chunk_index]:
            stop = min(start + self.chunk, len(self))
            raise CannotRunError(
                f"{self.path} is damaged: tokens {start} to {stop - 1} are not as they were written. Remove the folder "
                f"{self.path.parent}, and it is made again."
            )
        self.checked[chunk_index] = True


def checksums(path: Path) -> np.ndarray:
    """Returns the CRC-32 of every chunk of a file."""
    with path.open("rb") as file:
        return np.array([zlib.crc32(chunk) for chunk in iter(lambda: file.read(CHUNK_BYTES), b"")], np.uint32)


class TokenFiles:
    """The tokens of several files as one array. Each token is compared with ``vocab_size`` when it is read."""

    def __init__(self, arrays: dict[Path, np.ndarray], *, vocab_size: int) -> None:
        self.paths, self.arrays, self.vocab_size = list(arrays), list(arrays.values()), vocab_size
        self.edges = np.cumsum([0, *map(len, self.arrays)])
        # Not int32, which marks records (`TokenStore.is_records`).
        self.dtype = np.dtype(np.uint32)
        for first_token, array in zip(self.edges, self.arrays, strict=False):
            self[np.arange(first_token, first_token + min(len(array), CHECKED))]

    def __len__(self) -> int:
        return int(self.edges[-1])

    def __getitem__(self, indices: np.ndarray | int) -> np.ndarray:
        """Returns the tokens at these indices. Raises InputError for one that the model does not embed."""
        positions = np.asarray(indices) % len(self)
        file_indices = np.searchsorted(self.edges, positions, side="right") - 1
        all_tokens = np.zeros(positions.shape, np.int64)
        for index in np.unique(file_indices):
            is_in_file = file_indices == index
            file_tokens = np.asarray(self.arrays[index][positions[is_in_file] - self.edges[index]], np.int64)
            bad_ids = file_tokens[(file_tokens < 0) | (file_tokens >= self.vocab_size)]
            if len(bad_ids):
                raise InputError(
                    f"{self.paths[index]} has the token {bad_ids[0]}, but the model has vocab_size={self.vocab_size}. "
                    "It was made with another tokenizer or dtype. Give tokens of the model's tokenizer."
                )
            all_tokens[is_in_file] = file_tokens
        return all_tokens


class TokenStore:
    """Tokens of consecutive documents, read on demand.

    ``starts`` has the index of the first token of each document, and the number of tokens as the last entry; without
    it all tokens are one document. ``spans`` restricts the store to parts of the file, which are then concatenated; a
    document that crosses the end of a span ends there. ``columns`` are further arrays with an entry for each token,
    which a mask reads by name. Memory-mapped arrays stay on disk until they are read.
    """

    def __init__(
        self,
        tokens: np.ndarray | CheckedTokens | TokenFiles,
        starts: np.ndarray | None = None,
        spans: Iterable[TokenSpan] | None = None,
        columns: Mapping[str, np.ndarray] = {},
    ) -> None:
        self.tokens, self.columns = tokens, columns
        self.starts = np.array([0, len(tokens)], np.uint64) if starts is None else np.asarray(starts)
        assert self.starts.dtype == np.uint64, "starts must be uint64: to search another dtype would copy them"
        all_spans = ((0, len(tokens)),) if spans is None else spans
        self.spans = tuple((start, stop) for start, stop in all_spans if start < stop)
        # The index in the store at which each span begins, and the length; the shifts to indices of the file.
        self._edges = np.cumsum([0, *(stop - start for start, stop in self.spans)])
        self._shifts = np.array([start for start, _ in self.spans] or [0]) - self._edges[: max(len(self.spans), 1)]

    @classmethod
    def open(cls, folder: Path, *, dtype: str) -> Self:
        """Opens a store from its folder, memory-mapped; its tokens have this ``dtype``."""
        return cls(CheckedTokens(folder / TOKENS, dtype), _mapped(folder / STARTS, "uint64"))

    def part(self, spans: Iterable[TokenSpan]) -> "TokenStore":
        """Returns a store of the same files with other ``spans``."""
        return TokenStore(self.tokens, self.starts, spans, self.columns)

    def __len__(self) -> int:
        return int(self._edges[-1])

    @property
    def is_records(self) -> bool:
        """True if documents are records that stay whole; a token below 0 is the complement of a token without loss."""
        return self.tokens.dtype == np.int32

    def in_file(self, start: int, stop: int) -> Iterator[TokenSpan]:
        """Yields the spans of the file that hold the tokens from ``start`` to ``stop`` of the store."""
        first_span, last_span = np.searchsorted(self._edges, [start, stop - 1], side="right") - 1
        for span_index in range(int(first_span), int(last_span) + 1):
            shift, (span_start, span_end) = int(self._shifts[span_index]), self.spans[span_index]
            yield max(start + shift, span_start), min(stop + shift, span_end)

    @property
    def num_documents(self) -> int:
        """Number of documents; a part of a document in a span counts as one."""
        num_inside = (self._number_up_to(stop - 1) - self._number_up_to(start) for start, stop in self.spans)
        return len(self.spans) + int(sum(num_inside))

    def read(self, indices: np.ndarray, column: str = "") -> np.ndarray:
        """Returns the tokens or a column at indices of the store, int32 of the same shape; only `read` reads tokens."""
        span_indices = np.searchsorted(self._edges[1:-1], indices, side="right")
        array = self.columns[column] if column else self.tokens
        return np.asarray(array[indices + self._shifts[span_indices]], dtype=np.int32)

    def boundaries(self, start: int, stop: int) -> np.ndarray:
        """Returns the indices in ``(start, stop]`` at which a document or a span starts or ends, int64.

        Reads no token.
        """
        return np.concatenate([np.empty(0, np.int64), *self._boundaries(start, stop)])

    def _boundaries(self, start: int, stop: int) -> Iterator[np.ndarray]:
        first_span, last_span = np.searchsorted(self._edges, [start, stop], side="right") - 1
        for span_index in range(int(first_span), min(int(last_span) + 1, len(self.spans))):
            shift, span_end = int(self._shifts[span_index]), int(self._edges[span_index + 1])
            low_index, high_index = max(start, int(self._edges[span_index])) + shift, min(stop, span_end - 1) + shift
            yield self.starts[self._number_up_to(low_index) : self._number_up_to(high_index)].astype(np.int64) - shift
            if start < span_end <= stop:
                yield np.array([span_end])

    def _number_up_to(self, token_index: int) -> np.intp:
        # NumPy compares uint64 with a signed number as floats, and would convert all of ``starts`` for it.
        return np.searchsorted(self.starts, np.uint64(token_index), side="right")

    def nearest_start(self, index: int) -> int:
        """Returns the start of a document, or the end of the file, nearest to an index; if two are, the earlier.

        These are indices of the file, not of the store.
        """
        next_document = int(np.searchsorted(self.starts, np.uint64(index)))
        near_starts = self.starts[max(next_document - 1, 0) : next_document + 1]
        return min(map(int, near_starts), key=lambda start: abs(start - index))


def _mapped(path: Path, dtype: str) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


# -- what is held out ------------------------------------------------------------------------------------

MAX_RUNS = 64
"""Maximum number of held-out runs of documents; more would not make a better sample."""


def split(store: TokenStore, share: float) -> tuple[TokenStore, TokenStore]:
    """Returns two parts of a store without spans, which share no token: to train on, and about ``share`` of the tokens
    to hold out, in evenly spread runs of whole documents.

    If documents are too few or uneven for between half and twice the share, the last tokens are held out, from inside a
    document if they begin there (records stay whole). Equal stores and shares give equal parts.
    """
    whole_span = (0, len(store.tokens))
    assert store.spans in ((), (whole_span,)), "a store with spans is not split: spans are indices of the file"
    num_wanted = int(len(store) * share)
    held_spans = _whole_documents(store, num_wanted, num_runs=min(max(int(store.num_documents * share), 1), MAX_RUNS))
    num_held = sum(stop - start_token for start_token, stop in held_spans)
    if not num_wanted / 2 <= num_held <= min(2 * num_wanted, len(store) - 1):
        start_token = len(store) - num_wanted
        held_spans = [(store.nearest_start(start_token) if store.is_records else start_token, len(store))]
    token_edges = [0, *(edge for span in held_spans for edge in span), len(store)]
    return store.part(zip(token_edges[::2], token_edges[1::2], strict=True)), store.part(held_spans)


def _whole_documents(store: TokenStore, num_wanted: int, *, num_runs: int) -> list[TokenSpan]:
    """Returns the last documents of each of ``num_runs`` equal parts of the tokens, about ``num_wanted`` in all."""
    spans: list[TokenSpan] = []
    for run_number in range(1, num_runs + 1):
        stop = len(store) * run_number // num_runs
        start, stop = (store.nearest_start(edge) for edge in (stop - num_wanted // num_runs, stop))
        if start < stop and start >= (spans[-1][1] if spans else 0):
            spans.append((start, stop))
    return spans
