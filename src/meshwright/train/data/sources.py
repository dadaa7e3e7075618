"""Maps each sample of a run to a row, by the shares of several sources, also if a run continues with other data.

A sample is a row of a source, which its number determines: there is no other state.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import grain
import msgspec
import numpy as np

from meshwright.core.errors import InputError
from meshwright.train.data.pairs import PairForm, PairRows, SpanRows
from meshwright.train.data.rows import Rows, WholeRows
from meshwright.train.data.token_store import TokenSpan, TokenStore

PATTERN = 1000
"""Length of the repeated pattern of sources whose shares are no whole numbers; each source occurs at least once."""


class Draw(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows that a phase drew from a source: the first ``samples`` rows of ``seq_len`` tokens, shuffled by ``seed``;
    ``text_len`` is the length of rows of text that get spans of noise."""

    seq_len: int
    packing: bool
    seed: int
    samples: int = 0
    text_len: int = 0


class DataPhase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a run, from its sample ``first`` on, in which samples are drawn from sources by their ``shares``.

    ``draw`` has the length, packing and seed of its rows; ``tokens`` is the number of tokens of each source that are
    not held out; ``drawn`` has the draws of earlier phases from each source, in their order.
    """

    shares: dict[str, float]
    tokens: dict[str, int]
    draw: Draw
    first: int = 0
    drawn: dict[str, list[Draw]] = {}

    def followed_by(self, new: "DataPhase", samples: int) -> "DataPhase":
        """Returns the phase after ``samples`` of the run: this one, or ``new`` with all draws so far if they differ.

        Raises InputError for a source whose number of tokens has changed.
        """
        lengths = {**self.tokens, **new.tokens}
        for name, num_tokens in self.tokens.items():
            if lengths[name] != num_tokens:
                raise InputError(
                    f"the run draws from {num_tokens} tokens of {name!r}, and now they are {lengths[name]}: the text, "
                    "train.held_out or train.loss_on has changed. Put it back, or give the new text another name."
                )
        new = msgspec.structs.replace(new, tokens=lengths)
        if msgspec.structs.replace(new, first=self.first, drawn=self.drawn) == self:
            return self
        draws_by_name, counts = dict(self.drawn), SourcePattern(list(self.shares.values())).drawn(samples - self.first)
        for name, count in zip(self.shares, counts, strict=True):
            draws_by_name[name] = [*draws_by_name.get(name, ()), msgspec.structs.replace(self.draw, samples=count)]
        return msgspec.structs.replace(new, first=samples, drawn=draws_by_name)


class Source(NamedTuple):
    """Documents with their name and share of the samples; ``packing`` says how they are cut into rows, ``form`` how
    into pairs for an encoder and a decoder."""

    store: TokenStore
    packing: bool = True
    name: str = ""
    share: float = 1.0
    form: PairForm | None = None

    def rows(self, seq_len: int, text_len: int = 0) -> Rows:
        """Returns the rows of ``seq_len`` tokens, of whole records or of text cut anywhere; there may be none. Pairs
        are made of rows of ``text_len`` tokens of text, by default as many as fit."""
        if self.form:
            is_pairs, form = self.store.is_records, self.form
            return (
                PairRows(self.store, form, self.name)
                if is_pairs
                else SpanRows(self.store, form, text_len or form.text_len)
            )
        return (WholeRows if self.store.is_records else Rows)(self.store, seq_len, packing=self.packing)


class Samples:
    """An endless sequence of one source's samples in a phase.

    First the tokens of the epoch that earlier phases (``drawn``) began and did not read, then whole epochs, each
    shuffled separately.
    """

    def __init__(self, source: Source, draw: Draw, drawn: Sequence[Draw] = (), *, number: int = 0) -> None:
        earlier_samples = Samples(source, drawn[-1], drawn[:-1], number=number) if drawn else None
        self._before = earlier_samples.epochs(drawn[-1].samples) if earlier_samples else 0.0
        spans_left = earlier_samples.left(drawn[-1].samples) if earlier_samples else ()
        store, source = source.store, source._replace(packing=draw.packing)
        parts = (source._replace(store=part) for part in (store.part(spans_left), store))
        self.rest, self.rows = (part.rows(draw.seq_len, draw.text_len) for part in parts)
        # Grain adds the epoch to the seed, so the seed is hashed first: epochs of neighbouring seeds would repeat.
        seed_sequence = np.random.SeedSequence(draw.seed, spawn_key=(number,) if number else ())
        self._seed = int(seed_sequence.generate_state(1)[0])

    @cached_property
    def _orders(self) -> tuple["grain.MapDataset[int]", "grain.MapDataset[int]"]:
        rest, rows = (grain.MapDataset.range(len(part)).shuffle(seed=self._seed) for part in (self.rest, self.rows))
        return rest, rows.repeat()

    def find(self, sample: int) -> tuple[Rows, int]:
        """Returns the rows that a sample is from, and the number of its row among them."""
        if sample < len(self.rest):
            return self.rest, int(self._orders[0][sample])
        return self.rows, int(self._orders[1][sample - len(self.rest)])

    def epochs(self, samples: int) -> float:
        """Returns how many epochs have been read after ``samples`` of this phase, earlier phases included."""
        num_begun = math.ceil(self._before)
        if samples < len(self.rest):
            return self._before + (num_begun - self._before) * samples / len(self.rest)
        return num_begun + (samples - len(self.rest)) / max(1, len(self.rows))

    def left(self, samples: int) -> list[TokenSpan]:
        """Returns the spans of the file not yet read in the epoch after ``samples`` of this phase; [] at its end."""
        num_rest_rows = len(self.rest)
        epoch_start = 0 if samples < num_rest_rows else samples - (samples - num_rest_rows) % max(1, len(self.rows))
        if epoch_start == samples >= num_rest_rows:
            return []
        rows = self.find(epoch_start)[0]
        spans = sorted(span for sample in range(epoch_start, samples) for span in rows.spans(self.find(sample)[1]))
        token_edges = [0, *(edge for span in spans for edge in span), len(rows.store)]
        gaps = zip(token_edges[::2], token_edges[1::2], strict=True)
        return [span for start, stop in gaps if start < stop for span in rows.store.in_file(start, stop)]


class SourcePattern:
    """A repeated pattern of sources, in which each has its share of the samples, evenly spaced."""

    def __init__(self, shares: Sequence[float]) -> None:
        scale = 1 if all(share == int(share) for share in shares) else PATTERN / sum(shares)
        self.counts = [max(1, round(share * scale)) for share in shares]
        draw_times = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        time_order = np.argsort(draw_times, kind="stable")
        self.pattern = np.repeat(np.arange(len(shares)), self.counts)[time_order]
        self._number = np.concatenate([np.arange(count) for count in self.counts])[time_order]

    def find(self, sample: int) -> tuple[int, int]:
        """Returns the source of a sample, and its number among the samples of that source."""
        num_repeats, position = divmod(sample, len(self.pattern))
        source_index = int(self.pattern[position])
        return source_index, num_repeats * self.counts[source_index] + int(self._number[position])

    def drawn(self, samples: int) -> list[int]:
        """Returns how many of the first ``samples`` are of each source."""
        num_repeats, position = divmod(samples, len(self.pattern))
        rest_counts = np.bincount(self.pattern[:position], minlength=len(self.counts))
        return [num_repeats * count + int(extra) for count, extra in zip(self.counts, rest_counts, strict=True)]
