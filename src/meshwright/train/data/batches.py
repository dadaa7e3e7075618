"""The batches of a run: a pure function of the seed and the number of the first sample."""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import Sharding
from tokenizers import Tokenizer

from meshwright.core.errors import InputError
from meshwright.train.data.ahead import Ahead
from meshwright.train.data.packing import PackedRows, Row, Rows, WindowRows
from meshwright.train.data.split import split
from meshwright.train.data.store import open_store
from meshwright.train.data.text import open_corpus
from meshwright.train.data.token_store import TokenStore
from meshwright.train.data.tokenizer import open_tokenizer
from meshwright.train.settings import TrainSettings


class Source(NamedTuple):
    """Tokens, and whether they are packed by document (`PackedRows`) or cut blindly (`WindowRows`)."""

    store: TokenStore
    packing: bool = True

    def rows(self, seq_len: int) -> Rows:
        """The rows of ``seq_len`` tokens, numbered in the order of the text."""
        return PackedRows(self.store, seq_len) if self.packing else WindowRows(self.store, seq_len)

    def num_samples(self, seq_len: int) -> int:
        """Rows of ``seq_len`` tokens; 0 where the text does not fill one."""
        return len(self.rows(seq_len))


class Data(NamedTuple):
    """What a run reads: ``held_out`` shares no document with ``train``, and is None where nothing is held out."""

    tokenizer: Tokenizer
    end_id: int
    train: Source
    held_out: Source | None

    @property
    def num_tokens(self) -> int:
        """Tokens that are trained on, with the end-of-text token of each document."""
        return len(self.train.store)

    @property
    def num_documents(self) -> int:
        """Documents that are trained on."""
        return self.train.store.num_documents

    @property
    def several_documents(self) -> bool:
        """Whether any row, held out or not, may hold more than one."""
        parts = (self.train, self.held_out) if self.held_out else (self.train,)
        return any(part.store.num_documents > 1 for part in parts)


def open_data(settings: TrainSettings, *, vocab_size: int, folder: Path) -> Data:
    """The text of ``settings.data`` as tokens, made once and kept in ``folder``.

    Safe to call from many processes at once: one makes the store, the others wait for it.
    Raises InputError for data or a tokenizer that cannot be read, or that ``vocab_size`` does not fit.
    """
    corpus = open_corpus(settings.data)
    given = open_tokenizer(Path(settings.tokenizer), vocab_size=vocab_size) if settings.tokenizer else None
    found = open_store(corpus, given, vocab_size=vocab_size, folder=folder)
    train, held_out = split(found.store, settings.held_out)
    rest = Source(held_out, settings.packing) if len(held_out) else None
    return Data(found.tokenizer, found.end_id, Source(train, settings.packing), rest)


class Batches:
    """The global batches of a run. Its only state is a number: how many samples were taken before.

    A sample is a row of the source. Every epoch has its own shuffled order of all rows, and sample i of the run is
    row ``i mod num_samples`` of epoch ``i // num_samples``, across the ends of epochs where batches do not divide
    them. Neither mesh nor process nor batch size enters, so a run goes on exactly from its count of samples on any
    other mesh, number of processes or batch size. Another seed, text or ``seq_len`` gives other samples.

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
        """Samples of one epoch."""
        return len(self.source)

    @cached_property
    def samples(self) -> "grain.MapDataset[int]":
        """Grain's endless pipeline from the number of a sample in the run to the number of its row.

        Grain adds the epoch to the seed, so the seed is hashed first: epochs of neighbouring seeds would repeat.
        """
        seed = int(np.random.SeedSequence(self.seed).generate_state(1)[0])
        return grain.MapDataset.range(self.num_samples).shuffle(seed=seed).repeat()

    def row_numbers(self, first_sample: int, row_slice: slice = slice(None)) -> list[int]:
        """Numbers of the source's rows in the global batch that starts at ``first_sample``."""
        return [int(self.samples[first_sample + row]) for row in range(self.batch_seqs)[row_slice]]

    def rows(
        self, first_sample: int, row_slice: slice = slice(None), position_slice: slice = slice(None)
    ) -> dict[str, np.ndarray]:
        """``tokens``, ``labels``, ``positions`` and ``documents`` [rows, positions] int32 of a part of a batch.

        Only that part is read from disk.
        """
        positions = self.order[position_slice]
        parts = [self.source.read(number, positions) for number in self.row_numbers(first_sample, row_slice)]
        return {name: np.stack(arrays) for name, arrays in zip(Row._fields, zip(*parts, strict=True), strict=True)}

    def num_labels(self, first_sample: int) -> int:
        """Labels in the whole global batch, counted from the index of documents alone."""
        return sum(map(self.source.num_labels, self.row_numbers(first_sample)))

    def global_batch(self, first_sample: int, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        """The arrays that ``shardings`` names, each device given its own rows and positions.

        ``tokens``, ``labels``, ``positions`` and ``documents`` are int32 [batch_seqs, seq_len]; ``num_labels`` is
        a float32 scalar, the labels of the whole batch on every process.
        """
        shape = (self.batch_seqs, self.seq_len)
        # Four arrays, and replicas of one shard, share what was read.
        read = lru_cache(maxsize=None)(lambda a, b, c, d: self.rows(first_sample, slice(a, b), slice(c, d)))

        def part(name: str, index: Any) -> np.ndarray:
            if name == "num_labels":
                return np.asarray(self.num_labels(first_sample), np.float32)
            (a, b, _), (c, d, _) = (s.indices(n) for s, n in zip(index, shape, strict=True))
            return read(a, b, c, d)[name]

        def whole(name: str, sharding: Sharding) -> jax.Array:
            size = () if name == "num_labels" else shape
            return jax.make_array_from_callback(size, sharding, lambda index: part(name, index))

        return {name: whole(name, sharding) for name, sharding in shardings.items()}

    def ahead(self, first_sample: int, shardings: Mapping[str, Sharding]) -> Ahead[dict[str, jax.Array]]:
        """Global batches from ``first_sample`` on, in order, each read while the one before is worked on."""
        return Ahead(lambda first: self.global_batch(first, shardings), start=first_sample, stride=self.batch_seqs)
