"""Rows of an encoder and a decoder: sources with their targets, and text with spans of noise, as T5 is pre-trained on.

Source of the noise: Raffel et al., Exploring the Limits of Transfer Learning (2020), section 3.1.4.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.algebra.layers import ENCODER, ENCODER_LENGTHS, FEATURES
from meshwright.core.errors import InputError, path_errors
from meshwright.nn.hf.features import read_features
from meshwright.train.data.chat import ChatTokenizer
from meshwright.train.data.rows import NO_LABEL, PADDING, Rows, WholeRows
from meshwright.train.data.token_store import TokenStore
from meshwright.train.data.tokenizer import TextTokenizer, num_ids

SENTINELS = "<extra_id_{}>", "▁<extra_id_{}>"
"""Names of the tokens that T5's tokenizers have for spans of noise, from the end of the vocabulary downwards."""
SIDES = ("source", "prompt"), ("target", "completion")
"""Field names of the source, and of the target, in a record."""
PAIR_OF_FEATURES = 'Give JSON lines {"source": "a.npy", "target": "text"}, with files of numpy.save.'


class TokenPair(NamedTuple):
    """The tokens of a source and of its target, without padding."""

    source: np.ndarray
    target: np.ndarray


class PairForm(NamedTuple):
    """Rules by which documents become (source, target) pairs. Sources have at most ``source_len`` tokens, targets
    ``target_len``, and the row of the decoder is the target after ``start_token``.

    Of plain text the share ``noise_density`` of tokens is noise, in spans of ``mean_span`` tokens on average; it needs
    ``sentinel``, the token that replaces the first span in the source (``sentinel`` - 1 replaces the next, and so on),
    and ``end_id``, which ends sources and targets.

    With ``features`` a source is the bytes of a file's name, see `read_features`, whose array is read as ``dtype``.
    """

    source_len: int
    target_len: int
    start_token: int
    noise_density: float
    mean_span: float
    sentinel: int = 0
    end_id: int = 0
    features: int = 0
    dtype: str = "float32"

    def read_source(self, source: np.ndarray) -> np.ndarray:
        """Returns the [features, 2 source_len] array of the file named ``source``; InputError for another shape."""
        name = bytes(source.tolist()).decode()
        with path_errors():
            values = read_features(Path(name).expanduser().read_bytes(), name)
        if values.shape != (shape := (self.features, 2 * self.source_len)):
            raise InputError(
                f"{name} has features {list(values.shape)}, but the encoder reads {list(shape)}. Convert them."
            )
        return values.astype(self.dtype)

    def spans_of(self, num_tokens: int) -> "Spans":
        """Returns how many noise tokens and spans a row of ``num_tokens`` tokens of text gets."""
        num_noise = min(max(round(num_tokens * self.noise_density), 1), num_tokens - 1)
        num_spans = min(max(round(num_noise / self.mean_span), 1), num_tokens - num_noise)
        return Spans(num_tokens, num_noise, num_spans)

    @property
    def text_len(self) -> int:
        """Most tokens of text whose source and target both fit. Raises InputError if fewer than two fit."""
        return _text_len(self)

    def with_tokens(self, encoder: TextTokenizer | None, name: str, *, vocab_size: int) -> "PairForm":
        """Returns the form with ``sentinel`` and ``end_id`` for text: sentinels of T5's tokenizers, else unused ids at
        the end of the vocabulary. Raises InputError if ``encoder`` is None or leaves too few ids unused."""
        if encoder is None:
            raise InputError(f"data {name!r} needs train.tokenizer: spans of noise need its end token.")
        num_spans, first_id = self.spans_of(self.text_len).spans, vocab_size - 1
        for text in SENTINELS:
            ids = [encoder.tokenizer.token_to_id(text.format(number)) for number in (0, num_spans - 1)]
            if ids[0] is not None and ids[1] == ids[0] - num_spans + 1:
                return self._replace(sentinel=ids[0], end_id=encoder.end_id)
        num_used = num_ids(encoder.tokenizer)
        if num_used + num_spans > vocab_size:
            raise InputError(
                f"rows of {self.source_len} and {self.target_len} have {num_spans} spans of noise, and the {num_used} "
                f"tokens of the tokenizer leave {max(0, vocab_size - num_used)} of vocab_size={vocab_size} for them. "
                f"Set model.vocab_size={num_used + num_spans} or more, or a longer train.mean_span."
            )
        return self._replace(sentinel=first_id, end_id=encoder.end_id)


class Spans(NamedTuple):
    """Counts of a row of text: its tokens, the noise tokens among them, and the spans of noise."""

    tokens: int
    noise: int
    spans: int

    @property
    def source_len(self) -> int:
        """Tokens of the source: tokens that are no noise, a sentinel for each span, the end token."""
        return self.tokens - self.noise + self.spans + 1

    @property
    def target_len(self) -> int:
        """Tokens of the target: each span after its sentinel, the end token."""
        return self.noise + self.spans + 1


@lru_cache(maxsize=64)
def _text_len(form: PairForm) -> int:
    num_tokens = 1
    while (
        spans := form.spans_of(num_tokens + 1)
    ).source_len <= form.source_len and spans.target_len <= form.target_len:
        num_tokens += 1
    if num_tokens == 1:
        raise InputError(
            f"rows of {form.source_len} and {form.target_len} tokens are too short for spans of noise. Use longer ones."
        )
    return num_tokens


def corrupted(tokens: np.ndarray, form: PairForm, seed: tuple[int, int]) -> TokenPair:
    """Returns the source, ``tokens`` with a sentinel for each span of noise, and the target, each span after its
    sentinel. Text and noise alternate, text first, in lengths that ``seed`` draws uniformly."""
    spans, generator = form.spans_of(len(tokens)), np.random.default_rng(seed)

    def lengths(num_tokens: int) -> np.ndarray:
        cuts = generator.permutation(np.arange(num_tokens - 1) < spans.spans - 1)
        return np.diff([0, *np.flatnonzero(cuts) + 1, num_tokens])

    span_lens = np.stack([lengths(spans.tokens - spans.noise), lengths(spans.noise)], axis=1)
    parts, sentinels = np.split(tokens, np.cumsum(span_lens)[:-1]), form.sentinel - np.arange(spans.spans)[:, None]
    kept, noise = (list(zip(*pair, strict=True)) for pair in ((parts[::2], sentinels), (sentinels, parts[1::2])))
    source, target = (np.concatenate([*(x for pair in sides for x in pair), [form.end_id]]) for sides in (kept, noise))
    return TokenPair(source, target)


class SpanRows(Rows):
    """Text in rows of ``text_len`` tokens, regardless of documents, with spans of noise that each sample draws anew."""

    def __init__(self, store: TokenStore, form: PairForm, text_len: int) -> None:
        super().__init__(store, text_len, packing=False)
        self.form = form

    def pair(self, number: int, seed: tuple[int, int]) -> TokenPair:
        """Returns the pair of row ``number``, with spans of noise drawn by ``seed``."""
        positions = number * self.seq_len + np.arange(self.seq_len)
        return corrupted(self.store.read(positions), self.form, seed)

    def num_labels(self, number: int, *, skipped: int = 0) -> int:
        return self.form.spans_of(self.seq_len).target_len - skipped


class PairRows(WholeRows):
    """Rows of one source and its target, cut to the lengths of ``form``. A document's target begins at its first token
    that counts in the loss, or after it if that is the start token; documents without a target are left out."""

    def __init__(self, store: TokenStore, form: PairForm, name: str = "") -> None:
        self.store, self.seq_len, self.form, self.packing = store, form.target_len, form, False
        doc_edges = np.concatenate([[0], store.boundaries(0, len(store))])
        self._starts, self._stops = doc_edges[:-1], doc_edges[1:]
        tokens = store.read(np.arange(len(store)))
        counted_indices = np.append(np.flatnonzero(tokens >= 0), len(store))
        self._ends = np.minimum(counted_indices[np.searchsorted(counted_indices, self._starts)], self._stops)
        self._targets = self._ends + (np.append(tokens, PADDING)[self._ends] == form.start_token)
        if (self._ends == self._starts).any():
            raise InputError(
                f"data {name!r} has records without a source, which the encoder reads. Give source and target, or "
                "prompt and completion."
            )
        used_docs = np.flatnonzero(self._targets < self._stops)
        self._rows, self._length = [[int(doc)] for doc in used_docs], len(used_docs)
        source_lens = self._ends - self._starts if not form.features else np.full(len(self._ends), form.source_len)
        sides = (source_lens, form.source_len), (self._stops - self._targets, form.target_len)
        fills, cuts = zip(*(_filled(lens[used_docs], row_len) for lens, row_len in sides), strict=True)
        self.summary = (
            f"{len(used_docs)} pairs in rows of {form.source_len} and {form.target_len}, {fills[0]:.0%} and "
            f"{fills[1]:.0%} filled; {cuts[0]} sources and {cuts[1]} targets cut"
        )

    def pair(self, number: int, seed: tuple[int, int]) -> TokenPair:
        """Returns the pair of row ``number``; ``seed`` is unused."""
        (doc,) = self._rows[number]
        start, end, target, stop = (int(edges[doc]) for edges in (self._starts, self._ends, self._targets, self._stops))
        target_end = min(stop, target + self.form.target_len)
        source_end = end if self.form.features else min(end, start + self.form.source_len)  # a file's name is whole
        # a token without a loss is stored as its complement
        return TokenPair(~self.store.read(np.arange(start, source_end)), self.store.read(np.arange(target, target_end)))

    def num_labels(self, number: int, *, skipped: int = 0) -> int:
        (doc,) = self._rows[number]
        return max(0, min(int(self._stops[doc] - self._targets[doc]), self.form.target_len) - skipped)


def _filled(lengths: np.ndarray, row_len: int) -> tuple[float, int]:
    """Returns the filled share of the rows' positions, and how many ``lengths`` exceed ``row_len``."""
    return float(np.minimum(lengths, row_len).sum() / max(1, len(lengths) * row_len)), int((lengths > row_len).sum())


def pair_arrays(pairs: Iterable[TokenPair], form: PairForm) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch, int32: ``tokens`` (the targets after the start token), ``labels`` and
    ``positions`` [rows, target_len], ``encoder_tokens`` and ``encoder_positions`` [rows, source_len], and
    ``encoder_lengths`` [rows]; for an encoder of features, in place of tokens and lengths, ``encoder_features``
    [rows, features, 2 source_len], floats."""
    rows = list(pairs)
    sources, targets, inputs = [pair.source for pair in rows], [pair.target for pair in rows], list[np.ndarray]()
    inputs = [np.concatenate([[form.start_token], target[:-1]]) for target in targets]
    positions = {"positions": form.target_len, "encoder_positions": form.source_len}
    if form.features:
        source_arrays = {FEATURES: np.stack([form.read_source(source) for source in sources])}
    else:
        source_arrays = {
            f"{ENCODER}tokens": _padded(sources, form.source_len, PADDING),
            ENCODER_LENGTHS: np.array([len(source) for source in sources], np.int32),
        }
    return source_arrays | {
        "tokens": _padded(inputs, form.target_len, PADDING),
        "labels": _padded(targets, form.target_len, NO_LABEL),
        **{name: np.tile(np.arange(size, dtype=np.int32), (len(rows), 1)) for name, size in positions.items()},
    }


def _padded(rows: list[np.ndarray], row_len: int, value: int) -> np.ndarray:
    return np.stack([np.pad(row, (0, row_len - len(row)), constant_values=value) for row in rows]).astype(np.int32)


class PairTokenizer(ChatTokenizer):
    """Encodes the source and the target of a record, each with the special tokens that the tokenizer adds, and an end
    token if it adds none. Tokens of the source are stored as complements, and have no loss."""

    def _tokens(self, record: dict[str, Any], raw: str, where: str) -> list[int]:
        source, target = (record.get(name, record.get(other)) for name, other in SIDES)
        if not (isinstance(source, str) and isinstance(target, str)):
            raise InputError(
                f"{where} is no pair for an encoder and a decoder. Give source and target, or prompt and completion, "
                "as texts."
            )
        return [*(~token for token in self._source_ids(source, where)), *self._ended(target)]

    def _source_ids(self, text: str, where: str) -> list[int]:
        return self._ended(text)

    def _ended(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text).ids
        return ids + [self.end_id] * (ids[-1:] != [self.end_id])


class FeaturesTokenizer(PairTokenizer):
    """Encodes the target of a record as `PairTokenizer` does; the source is a file of features, whose name is encoded
    as bytes. Every file is read, so that a bad one is found before the first step."""

    form: PairForm

    def _source_ids(self, text: str, where: str) -> list[int]:
        if not (path := Path(text).expanduser()).is_file():
            raise InputError(f"{where}: the source {str(path.absolute())[:200]!r} is no file. {PAIR_OF_FEATURES}")
        name = text.encode()
        try:
            self.form.read_source(np.frombuffer(name, np.uint8))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        return list(name)


def open_pair_tokenizer(given: TextTokenizer, form: PairForm) -> PairTokenizer:
    """Returns the tokenizer for records of pairs."""
    kind = f"features {form.features} {form.source_len}" if form.features else "pairs"
    digest = hashlib.sha256(f"{kind} {given.identity}".encode()).hexdigest()
    of_pairs = FeaturesTokenizer if form.features else PairTokenizer
    tokenizer = of_pairs(given.tokenizer, given.end_id, None, "completion", Path(), digest)
    if isinstance(tokenizer, FeaturesTokenizer):
        tokenizer.form = form
    return tokenizer
