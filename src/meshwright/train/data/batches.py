"""The batches of a run: a pure function of the seed and the number of the first sample.

Rows of a fixed length are cut from a store of tokens, with the label, the position and the document of each token.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import grain
import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array
from tokenizers import Tokenizer

from meshwright.core.errors import InputError
from meshwright.train.data.store import open_store
from meshwright.train.data.text import open_corpus
from meshwright.train.data.token_store import TokenStore, split
from meshwright.train.data.tokenizer import open_tokenizer
from meshwright.train.settings import TrainSettings

READ_AHEAD = 2
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

    def _boundaries(self, number: int) -> np.ndarray:
        """Returns the indices in the row at which a document starts or the tokens end."""
        start = number * self.seq_len
        found = self.store.boundaries(start, start + self.seq_len) if self.packing else np.empty(0, np.int64)
        return found - start

    def read(self, number: int, positions: np.ndarray) -> Row:
        """Reads these positions of a row, and no others, from disk."""
        inner = self._boundaries(number)
        documents = np.searchsorted(inner, positions, side="right")
        begins = np.concatenate([[0], inner])[documents]
        # Padding and last tokens read some token that lies within the store, and are masked.
        places, last = number * self.seq_len + positions, len(self.store) - 1
        tokens = np.where(places <= last, self.store.read(np.minimum(places, last)), PADDING)
        following = self.store.read(np.minimum(places + 1, last))
        goes_on = (np.searchsorted(inner, positions + 1, side="right") == documents) & (places < last)
        arrays = (tokens, np.where(goes_on, following, NO_LABEL), positions - begins, documents)
        return Row(*(np.asarray(array, np.int32) for array in arrays))

    def num_labels(self, number: int) -> int:
        """Counts positions with a label: those whose document continues after them."""
        size = min(self.seq_len, len(self.store) - number * self.seq_len)
        return size - len(self._boundaries(number))


class Ahead:
    """Iterates over ``(number, make(number))`` for start, start + stride, ... without end.

    Within its context one thread keeps `READ_AHEAD` items ready; at its end the thread and its items are gone. An error
    of ``make`` is raised where its item is read.
    """

    def __init__(self, make: Callable[[int], dict[str, Array]], *, start: int, stride: int) -> None:
        self._make, self._next, self._stride = make, start, stride
        self._ready: deque[tuple[int, Future[dict[str, Array]]]] = deque()
        # One worker, so that items are made in order and `make` need not be safe for several threads.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")

    def __enter__(self) -> Self:
        self._fill()
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._ready.clear()

    @property
    def is_ready(self) -> bool:
        """True if the next item is ready."""
        return bool(self._ready) and self._ready[0][1].done()

    def __iter__(self) -> Iterator[tuple[int, dict[str, Array]]]:
        return self

    def __next__(self) -> tuple[int, dict[str, Array]]:
        self._fill()
        number, item = self._ready.popleft()
        self._fill()
        return number, item.result()

    def _fill(self) -> None:
        while len(self._ready) < READ_AHEAD:
            self._ready.append((self._next, self._pool.submit(self._make, self._next)))
            self._next += self._stride


# -- batches ---------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """Tokens, and how they are cut into `Rows`: packed by document or not."""

    store: TokenStore
    packing: bool = True

    def rows(self, seq_len: int) -> Rows:
        """Returns the rows of ``seq_len`` tokens; none if the text does not fill one."""
        return Rows(self.store, seq_len, packing=self.packing)


class Data(NamedTuple):
    """The data of a run.

    ``held_out`` shares no document with ``train`` unless they are few, and is None where nothing is held out.
    ``skipped_records`` of the text could not be read.
    """

    tokenizer: Tokenizer
    train: Source
    held_out: Source | None
    skipped_records: int = 0

    @property
    def several_documents(self) -> bool:
        """True if a row of either part may have more than one."""
        parts = (self.train, self.held_out) if self.held_out else (self.train,)
        return any(part.store.num_documents > 1 for part in parts)


def open_data(settings: TrainSettings, *, vocab_size: int, folder: Path) -> Data:
    """Tokenises the text of ``settings.data``, once, and keeps the tokens in ``folder``.

    Safe to call from many processes at once: one makes the store while the others wait.
    Raises InputError for data or a tokenizer that cannot be read, or that ``vocab_size`` does not fit.
    """
    corpus = open_corpus(settings.data, skip_bad=settings.skip_bad_records)
    given = open_tokenizer(Path(settings.tokenizer), vocab_size=vocab_size) if settings.tokenizer else None
    found = open_store(corpus, given, vocab_size=vocab_size, folder=folder)
    train, held_out = split(found.store, settings.held_out)
    rest = Source(held_out, settings.packing) if len(held_out) else None
    return Data(found.tokenizer, Source(train, settings.packing), rest, found.skipped_records)


class Batches:
    """The global batches of a run. The only state of a run is the number of samples before a batch.

    A sample is a row of the source. Every epoch has its own shuffled order of all rows, and sample i of the run is
    row ``i mod num_samples`` of epoch ``i // num_samples``; batches may span epochs. Samples do not depend on mesh,
    processes or batch size, so a run continues exactly from its count of samples on any others. Another seed, text or
    ``seq_len`` gives other samples.

    ``order`` permutes the positions of every array before it is sharded (zigzag, for ring attention).
    """

    def __init__(
        self, source: Source, *, batch_seqs: int, seq_len: int, seed: int, order: np.ndarray | None = None
    ) -> None:
        """Raises InputError where the source does not fill one row."""
        self.batch_seqs, self.seq_len, self.seed = batch_seqs, seq_len, seed
        self.source = source.rows(seq_len)
        self.order = np.arange(seq_len) if order is None else np.asarray(order, np.int64)
        if len(self.source) == 0:
            have, needed = len(source.store), "" if source.packing else " and its labels"
            raise InputError(
                f"the text has {have} tokens, not one sequence of {seq_len}{needed}. Give more text, or sequences of "
                f"at most {max(1, have - (not source.packing))} tokens."
            )

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch."""
        return len(self.source)

    @cached_property
    def samples(self) -> "grain.MapDataset[int]":
        """Grain's endless pipeline from the number of a sample in the run to the number of its row.

        Grain adds the epoch to the seed, so the seed is hashed first: epochs of neighbouring seeds would repeat.
        """
        seed = int(np.random.SeedSequence(self.seed).generate_state(1)[0])
        return grain.MapDataset.range(self.num_samples).shuffle(seed=seed).repeat()

    def row_numbers(self, first_sample: int, row_slice: slice = slice(None)) -> list[int]:
        """Returns the source's rows in the global batch that starts at ``first_sample``, by number."""
        return [int(self.samples[first_sample + row]) for row in range(self.batch_seqs)[row_slice]]

    def rows(
        self, first_sample: int, row_slice: slice = slice(None), position_slice: slice = slice(None)
    ) -> dict[str, np.ndarray]:
        """Reads ``tokens``, ``labels``, ``positions``, ``documents`` [rows, positions] int32 of a part of a batch."""
        positions = self.order[position_slice]
        parts = [self.source.read(number, positions) for number in self.row_numbers(first_sample, row_slice)]
        return {name: np.stack(arrays) for name, arrays in zip(Row._fields, zip(*parts, strict=True), strict=True)}

    def num_labels(self, first_sample: int) -> int:
        """Counts the labels of the whole global batch, from the index of documents alone."""
        return sum(map(self.source.num_labels, self.row_numbers(first_sample)))

    def global_batch(self, first_sample: int, shardings: Mapping[str, Sharding]) -> dict[str, Array]:
        """Makes the arrays that ``shardings`` names; each device reads its own rows and positions.

        ``tokens``, ``labels``, ``positions`` and ``documents`` are int32 [batch_seqs, seq_len]; ``num_labels`` is
        a float32 scalar, the labels of the whole batch on every process.
        """
        shape = (self.batch_seqs, self.seq_len)
        # The four arrays, and replicas of a shard, share one read.
        read = lru_cache(maxsize=None)(lambda a, b, c, d: self.rows(first_sample, slice(a, b), slice(c, d)))

        def part(name: str, index: Any) -> np.ndarray:
            if name == "num_labels":
                return np.asarray(self.num_labels(first_sample), np.float32)
            (a, b, _), (c, d, _) = (s.indices(n) for s, n in zip(index, shape, strict=True))
            return read(a, b, c, d)[name]

        def whole(name: str, sharding: Sharding) -> Array:
            size = () if name == "num_labels" else shape
            return jax.make_array_from_callback(size, sharding, lambda index: part(name, index))

        return {name: whole(name, sharding) for name, sharding in shardings.items()}

    def ahead(self, first_sample: int, shardings: Mapping[str, Sharding]) -> Ahead:
        """Returns global batches from ``first_sample`` on, each read while the previous one is in use."""
        return Ahead(lambda first: self.global_batch(first, shardings), start=first_sample, stride=self.batch_seqs)
