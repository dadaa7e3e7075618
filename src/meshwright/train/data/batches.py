"""The batches of a run: pure functions of the seed and the number of the first sample."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array
from tokenizers import Tokenizer

from meshwright.algebra.layers import ENCODER, ENCODER_LENGTHS, FEATURES
from meshwright.core.errors import InputError
from meshwright.masks.names import Rule
from meshwright.parallel.second_labels import second_labels
from meshwright.spec.model import MASK_DATA
from meshwright.train.data.chat import open_chat_tokenizer
from meshwright.train.data.pairs import (
    PAIR_OF_FEATURES,
    PairForm,
    PairRows,
    SpanRows,
    TokenPair,
    open_pair_tokenizer,
    pair_arrays,
)
from meshwright.train.data.records import open_records, with_mask_data
from meshwright.train.data.rows import RowPart, Rows, WholeRows
from meshwright.train.data.sources import DataPhase, Draw, Samples, Source, SourcePattern
from meshwright.train.data.store import open_store
from meshwright.train.data.text import FileCorpus, open_corpus
from meshwright.train.data.token_files import open_tokens
from meshwright.train.data.token_store import split
from meshwright.train.data.tokenizer import TextTokenizer, open_tokenizer
from meshwright.train.settings import TrainSettings, data_sources

READ_AHEAD = 2
NEEDS_TOKENIZER = {True: "it says how chats and pairs become tokens", False: "the data before it came as tokens"}


class Ahead:
    """Iterates over ``(number, make(number))`` for start, start + stride, ... without end.

    Within its context one thread keeps `READ_AHEAD` items ready; leaving the context stops the thread and drops them.
    An error of ``make`` is raised where its item is read.
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
        first_sample, future = self._ready.popleft()
        self._fill()
        return first_sample, future.result()

    def _fill(self) -> None:
        while len(self._ready) < READ_AHEAD:
            self._ready.append((self._next, self._pool.submit(self._make, self._next)))
            self._next += self._stride


# -- batches ---------------------------------------------------------------------------------------------


SampleNumbers = int | Sequence[int]
"""Samples of a batch: the number of the first if they are consecutive, else all numbers."""


class Data(NamedTuple):
    """The data of a run.

    ``held_out`` shares no document with ``train`` unless documents are few; it is empty if nothing is held out.
    ``tokenizer`` is None if no data is text and none is named. ``skipped_records`` counts records that cannot be read.
    """

    tokenizer: Tokenizer | None
    train: tuple[Source, ...]
    held_out: tuple[Source, ...]
    skipped_records: int = 0

    @property
    def several_documents(self) -> bool:
        """True if a row may have more than one document."""
        return any(source.store.num_documents > 1 for source in self.train + self.held_out if not source.form)

    @property
    def is_padded(self) -> bool:
        """True if rows of an encoder may have padding."""
        forms = ((source.form, source.store.is_records) for source in self.train + self.held_out)
        return any(
            form and not form.features and (is_records or form.spans_of(form.text_len).source_len < form.source_len)
            for form, is_records in forms
        )


def open_data(
    settings: TrainSettings, *, vocab_size: int, folder: Path, mask: Rule | None = None, form: PairForm | None = None
) -> Data:
    """Opens ``settings.data``: tokenises texts and chats, once, and keeps their tokens in ``folder``.

    Without a tokenizer one is trained on the first source, for all sources. Many processes may call this at once: one
    makes the store while all others wait. Where the ``mask`` reads a prefix, a row has one record; with a ``form`` a
    row is a (source, target) pair, which text becomes by spans of noise. Raises InputError for data or a tokenizer that
    cannot be read, has more tokens than ``vocab_size``, or lacks data that the mask or noise needs.
    """
    packing = settings.packing and not form and not (mask and "prefix" in mask.data)
    path, num_skipped = Path(settings.tokenizer), 0
    encoder = open_tokenizer(path, vocab_size=vocab_size) if settings.tokenizer else None
    train_sources, held_sources = list[Source](), list[Source]()
    for name, share in data_sources(settings.data).items():
        store, records = open_tokens(Path(name), vocab_size=vocab_size), None
        if store is None:
            corpus = open_corpus(name, skip_bad=settings.skip_bad_records)
            if isinstance(corpus, FileCorpus) and corpus.is_tokens:
                store = open_records(corpus, mask, vocab_size=vocab_size)
                num_skipped += len(corpus.bad or ())
        if store is None:
            if not settings.tokenizer and (corpus.is_chat or (train_sources and not encoder)):
                raise InputError(f"data {name!r} needs train.tokenizer: {NEEDS_TOKENIZER[corpus.is_chat]}.")
            if encoder and corpus.is_chat:
                open_chats = partial(open_chat_tokenizer, path, loss_on=settings.loss_on)
                records = open_pair_tokenizer(encoder, form) if form else open_chats(encoder)
            num_free = form.spans_of(form.text_len).spans if form and not (encoder or form.features) else 0
            opened_store = open_store(corpus, records or encoder, vocab_size=vocab_size - num_free, folder=folder)
            encoder, store = encoder or TextTokenizer(opened_store.tokenizer, opened_store.end_id), opened_store.store
            num_skipped += opened_store.skipped_records
        if form and form.features and records is None:
            raise InputError(f"data {name!r} has no pairs, and the encoder reads features. {PAIR_OF_FEATURES}")
        store, named_form = with_mask_data(store, mask, name), form
        if form and not store.is_records:
            named_form = form.with_tokens(encoder, name, vocab_size=vocab_size)
        for sources, part_store in zip((train_sources, held_sources), split(store, settings.held_out), strict=True):
            sources.append(Source(part_store, packing, name, share, named_form))
    filled_held_sources = tuple(source for source in held_sources if len(source.store))
    return Data(encoder.tokenizer if encoder else None, tuple(train_sources), filled_held_sources, num_skipped)


class Batches:
    """The global batches of a run. The only state of a run is the number of samples before a batch.

    A sample is a row of a source; the sources alternate by their shares. Every epoch of a source has its own shuffled
    order of all rows: with one source, sample i of the run is row ``i mod num_samples`` of epoch ``i // num_samples``.
    Batches may span epochs. Samples do not depend on mesh, processes or batch size, so a run continues exactly from its
    count of samples if these change. If it continues with another seed, ``seq_len``, packing or other sources
    (`go_on`), a new phase begins with the tokens that earlier phases have left of each source's epoch.

    ``order`` permutes the positions of every array before it is sharded (zigzag, for ring attention).
    """

    def __init__(
        self, sources: Sequence[Source], *, batch_seqs: int, seq_len: int, seed: int, order: np.ndarray | None = None
    ) -> None:
        """Raises InputError where a source does not fill one row."""
        self.batch_seqs, self.seq_len, self.sources = batch_seqs, seq_len, sources
        self.order = np.arange(seq_len) if order is None else np.asarray(order, np.int64)
        self.form = next((source.form for source in sources), None)
        text_len = max((s.form.text_len for s in sources if s.form and not s.store.is_records), default=0)
        is_packed = all(source.packing for source in sources)
        draw = Draw(seq_len=seq_len, packing=is_packed, seed=seed, text_len=text_len)
        share_by_name, num_tokens_by_name = {s.name: s.share for s in sources}, {s.name: len(s.store) for s in sources}
        self._begin(DataPhase(shares=share_by_name, tokens=num_tokens_by_name, draw=draw))
        for source, samples in zip(sources, self.samples, strict=True):
            if len(samples.rows):
                continue
            num_tokens, suffix = len(source.store), f" of {source.name}" if source.name else ""
            seq_len = samples.rows.seq_len
            if source.store.is_records:
                raise InputError(
                    f"no record{suffix} has anything to predict in its first {seq_len} tokens. Raise seq_len."
                )
            extra = "" if source.packing else " and its labels"
            raise InputError(
                f"the text{suffix} has {num_tokens} tokens, not one sequence of {seq_len}{extra}. Give more text, or "
                f"sequences of at most {max(1, num_tokens - (not source.packing))} tokens."
            )

    def _begin(self, phase: DataPhase) -> None:
        self.phase, self._mixture = phase, SourcePattern(list(phase.shares.values()))
        self.samples = [
            Samples(source, phase.draw, phase.drawn.get(source.name, ()), number=source_index)
            for source_index, source in enumerate(self.sources)
        ]

    def go_on(self, phase: DataPhase | None, samples: int) -> None:
        """Continues after ``samples`` samples of a run that was in ``phase``; does nothing for None."""
        if phase is not None:
            self._begin(phase.followed_by(self.phase, samples))

    @property
    def notes(self) -> list[str]:
        """Lines to print: that a phase has begun, and how the records of each source fill rows."""
        begun = f"goes on after sample {self.phase.first} with what is left of each source, in rows of {self.seq_len}"
        pairs = zip(self.sources, self.samples, strict=True)
        lines = [f"{source.name}: {part.rows.summary}" for source, part in pairs if isinstance(part.rows, WholeRows)]
        return ([begun] if self.phase.first else []) + lines

    def epochs(self, samples: int) -> dict[str, float]:
        """Returns by source how many epochs of it have been read after ``samples`` samples of the run."""
        counts = self._mixture.drawn(samples - self.phase.first)
        return {
            name: part.epochs(count) for name, part, count in zip(self.phase.shares, self.samples, counts, strict=True)
        }

    def find(self, sample: int) -> tuple[Rows, int]:
        """Returns the rows that a sample of the run is from, and the number of its row among them."""
        source_index, source_sample = self._mixture.find(sample - self.phase.first)
        return self.samples[source_index].find(source_sample)

    def _numbers(self, samples: SampleNumbers) -> Sequence[int]:
        """Returns the numbers of a batch's samples: ``batch_seqs`` from a first one on, or the given numbers."""
        return range(samples, samples + self.batch_seqs) if isinstance(samples, int) else samples

    def _found(self, samples: SampleNumbers, row_slice: slice = slice(None)) -> list[tuple[Rows, int]]:
        return [self.find(number) for number in self._numbers(samples)[row_slice]]

    def rows(
        self,
        samples: SampleNumbers,
        row_slice: slice = slice(None),
        position_slice: slice = slice(None),
        *,
        with_second: bool = False,
        data: Sequence[str] = (),
    ) -> dict[str, np.ndarray]:
        """Reads ``tokens``, ``labels``, ``positions``, ``documents`` [rows, positions] int32 of a part of a batch;
        ``with_second`` adds `second_labels`; ``data`` names further arrays that a mask reads (`MASK_DATA`)."""
        drawn_rows, positions = self._found(samples, row_slice), self.order[position_slice]

        def read(positions: np.ndarray) -> dict[str, np.ndarray]:
            field_arrays = zip(*(rows.read(row, positions) for rows, row in drawn_rows), strict=True)
            return {name: np.stack(arrays) for name, arrays in zip(RowPart._fields, field_arrays, strict=True)}

        part = read(positions)
        part |= {name: np.stack([rows.mask_data(name, row, positions) for rows, row in drawn_rows]) for name in data}
        return part | second_labels(part, read(np.minimum(positions + 1, self.seq_len - 1))) if with_second else part

    def pairs(self, samples: SampleNumbers, row_slice: slice = slice(None)) -> dict[str, np.ndarray]:
        """Reads whole rows of an encoder and a decoder, see `pair_arrays`; ``order`` permutes the decoder's."""
        assert self.form
        pairs = list[TokenPair]()
        for sample in self._numbers(samples)[row_slice]:
            rows, row = self.find(sample)
            assert isinstance(rows, PairRows | SpanRows)
            pairs.append(rows.pair(row, (self.phase.draw.seed, sample)))
        array_by_name = pair_arrays(pairs, self.form)
        return array_by_name | {name: array_by_name[name][:, self.order] for name in ("tokens", "labels", "positions")}

    def num_labels(self, samples: SampleNumbers, *, skipped: int = 0) -> int:
        """Returns the number of labels of the whole global batch, without labels of the first ``skipped`` positions of
        each document; reads no tokens."""
        return sum(rows.num_labels(row, skipped=skipped) for rows, row in self._found(samples))

    def global_batch(self, samples: SampleNumbers, shardings: Mapping[str, Sharding]) -> dict[str, Array]:
        """Makes the arrays that ``shardings`` names; each device reads only its rows and positions (of pairs, rows).

        ``tokens``, ``labels``, ``positions``, ``documents``, ``mtp_tokens`` and ``mtp_labels`` are int32
        [batch_seqs, seq_len], as are arrays that a mask reads per token; its arrays per row are [batch_seqs].
        For arrays of an encoder see `pair_arrays`.
        ``num_labels`` and ``num_mtp_labels`` are float32 scalars, the labels of the whole batch on every process.
        """
        has_second = "mtp_labels" in shardings
        names = [name for name in MASK_DATA if name in shardings and name not in RowPart._fields]
        # All arrays, and replicas of a shard, share one read.
        read = lru_cache(maxsize=None)(
            lambda a, b, c, d: self.rows(samples, slice(a, b), slice(c, d), with_second=has_second, data=names)
        )

        read_pairs = lru_cache(maxsize=None)(lambda a, b: self.pairs(samples, slice(a, b)))

        def part(name: str, index: Any) -> np.ndarray:
            if name.startswith("num_"):
                num_skipped = int(name == "num_mtp_labels")
                return np.asarray(self.num_labels(samples, skipped=num_skipped), np.float32)
            ends = [s.indices(n)[:2] for s, n in zip(index, shape(name), strict=True)]
            if self.form:
                return read_pairs(*ends[0])[name][(slice(None), *(slice(*end) for end in ends[1:]))]
            return read(*ends[0], *(ends[1:] or [(0, self.seq_len)])[0])[name]

        def shape(name: str) -> tuple[int, ...]:
            if name.startswith("num_"):
                return ()
            row_len = self.form.source_len if self.form and name.startswith(ENCODER) else self.seq_len
            if self.form and name == FEATURES:
                return self.batch_seqs, self.form.features, 2 * self.form.source_len
            is_of_rows = name == ENCODER_LENGTHS or MASK_DATA.get(name) == ("B",)
            return (self.batch_seqs,) if is_of_rows else (self.batch_seqs, row_len)

        def whole(name: str, sharding: Sharding) -> Array:
            return jax.make_array_from_callback(shape(name), sharding, lambda index: part(name, index))

        return {name: whole(name, sharding) for name, sharding in shardings.items()}

    def ahead(self, first_sample: int, shardings: Mapping[str, Sharding]) -> Ahead:
        """Returns an iterator of global batches from ``first_sample`` on, each read while the previous one is used."""
        return Ahead(lambda first: self.global_batch(first, shardings), start=first_sample, stride=self.batch_seqs)
