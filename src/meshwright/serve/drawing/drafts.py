"""Drafts (speculative decoding): proposed next tokens of a request, which one step of the model checks together.

A draft is accepted if the model draws it at its position. A draw depends only on the logits, the request's sampling and
the position, so the output equals the output of an engine without drafts token for token, at any temperature. A draft
model draws with the same noise, so at least (1 - d) / (1 + d) of its drafts are accepted, where d is the total
variation distance of the two distributions. Source: Daliri, Musco and Suresh, Coupling without Communication and
Drafter-Invariant Speculative Decoding, 2024.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.nn.weights import Params
from meshwright.parallel.generation.packed_step import PackedRows, PackedShape, PackedStep, sizes_up_to, slots_of
from meshwright.serve.drawing.drawer import OutputRow, TokenDrawer
from meshwright.serve.request import TokenRequest

LONGEST_NGRAM = 4


class Drafting(NamedTuple):
    """A request to draft for: up to ``most`` drafts after its ``tokens`` (prompt and ``num_before`` drawn tokens)."""

    number: int
    slot: int
    tokens: list[int]
    num_before: int
    most: int


class Drafter:
    """Interface that proposes up to ``num_drafts`` (0 here) next tokens for a request; every hook here does nothing."""

    num_drafts = 0

    def propose(self, asked: Sequence[Drafting], table: np.ndarray) -> list[list[int]]:
        """Returns the drafts of each request of ``asked``; ``table`` [slots, Bp] has the cache pages of each slot."""
        raise NotImplementedError

    def enter(self, slot: int, request: TokenRequest, output: Sequence[int]) -> None:
        """Assigns a slot to a request that has drawn the tokens ``output`` before (after a preemption; else none)."""

    def follow(self, rows: PackedRows, longest: int, ends: dict[int, int]) -> None:
        """Runs the rows of a step of the engine's model too; ``ends``: slot -> positions in the cache after them."""

    def leave(self, number: int) -> None:
        """Drops the state of the request with this number."""

    def warm_up(self, shape: PackedShape) -> None:
        """Compiles the programs that drafting needs when the engine's model runs steps of this shape."""


class NgramDrafter(Drafter):
    """Proposes the tokens after the latest earlier occurrence of a request's last n tokens; n = 4, else 3, else 2.

    Source: prompt lookup decoding (Saxena, 2023).
    """

    def __init__(self, num_drafts: int, *, shortest: int = 2) -> None:
        self.num_drafts, self._lengths = num_drafts, range(LONGEST_NGRAM, shortest - 1, -1)
        self._places: dict[int, dict[tuple[int, ...], int]] = {}  # request -> n-gram -> position after it
        self._done: dict[int, int] = {}

    def propose(self, asked: Sequence[Drafting], table: np.ndarray) -> list[list[int]]:
        """Returns up to ``most`` tokens after the latest earlier occurrence for each request; [] if there is none."""
        return [self._found(drafting) for drafting in asked]

    def _found(self, drafting: Drafting) -> list[int]:
        tokens, end_by_ngram = drafting.tokens, self._places.setdefault(drafting.number, {})
        # the last n-gram is left out: it is the one to look for
        for end_pos in range(self._done.get(drafting.number, 0), len(tokens)):
            end_by_ngram.update((tuple(tokens[end_pos - n : end_pos]), end_pos) for n in self._lengths if n <= end_pos)
        self._done[drafting.number] = len(tokens)
        for n in self._lengths:
            if ngram_end := end_by_ngram.get(tuple(tokens[-n:])):
                return tokens[ngram_end : ngram_end + drafting.most]
        return []

    def leave(self, number: int) -> None:
        self._places.pop(number, None)
        self._done.pop(number, None)


class ModelDrafter(Drafter):
    """Proposes the tokens that a smaller model draws. Its ``step`` has as many slots and pages, of the same length, as
    the engine's step. It also runs every step of the engine that prefills, to fill its own cache."""

    def __init__(self, step: PackedStep, params: Params, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self._step, self._params, self._cache = step, params, step.init_cache()
        self._drawer = TokenDrawer(step.max_seqs, step.model.vocab_size, step.logits_sharding, step.programs)
        # two rows a request: after accepted drafts the last draft is not in this cache yet
        self._sizes = sizes_up_to(2 * step.max_seqs, halves_from=8)
        self._ends = np.zeros(step.max_seqs, int)  # cached positions of each slot, if all drafts are accepted

    def propose(self, asked: Sequence[Drafting], table: np.ndarray) -> list[list[int]]:
        """Draws the drafts of all requests, one a step, and reads them after the last step is dispatched."""
        draws = []
        for index in range(max(drafting.most for drafting in asked)):
            rows, output_rows = self._rows([drafting for drafting in asked if drafting.most > index], table, index)
            logits, self._cache = self._step.step(self._params, self._cache, self._drawer.latest, rows, 1)
            draws.append(self._drawer.draw(logits, output_rows, adjusted=False))
        for drafting in asked:
            self._ends[drafting.slot] = len(drafting.tokens) + drafting.most - 1
        # draw i has rows only of requests with ``most`` > i
        token_iterators = [iter(np.asarray(draw.token).tolist()) for draw in draws]
        return [[next(iterator) for iterator in token_iterators[: drafting.most]] for drafting in asked]

    def _rows(self, asked: Sequence[Drafting], table: np.ndarray, num_past: int) -> tuple[PackedRows, list[OutputRow]]:
        """Returns the rows that draw draft ``num_past`` of each request; the first also has the uncached positions."""
        tokens, latest_slots, positions, row_slots, last_rows = [], list[int](), list[int](), list[int](), list[int]()
        for drafting in asked:
            end_pos = len(drafting.tokens) + num_past
            # the cache is rewritten from the first rejected draft on
            start_pos = end_pos - 1 if num_past else min(self._ends[drafting.slot], end_pos - 1)
            tokens += [0] if num_past else drafting.tokens[start_pos:]
            latest_slots += [drafting.slot if num_past else -1] * (end_pos - start_pos)
            positions += range(start_pos, end_pos)
            row_slots += [drafting.slot] * (end_pos - start_pos)
            last_rows.append(len(positions) - 1)
        num_rows = next(num_rows for num_rows in self._sizes if num_rows >= len(tokens))
        cache_slots = slots_of(np.array(positions), table, row_slots, self._step.storage.page_len)
        rows = PackedRows(tokens, latest_slots, positions, cache_slots, [], [], [], table, last_rows)
        rows = rows.each_alone(row_slots)
        output_rows = [OutputRow(drafting.slot, drafting.num_before + num_past) for drafting in asked]
        return PackedRows.joined([rows], PackedShape(num_rows, num_rows, num_rows, 1)), output_rows

    def enter(self, slot: int, request: TokenRequest, output: Sequence[int]) -> None:
        self._drawer.enter(slot, request, output)

    def follow(self, rows: PackedRows, longest: int, ends: dict[int, int]) -> None:
        rows = rows._replace(last=rows.last[: len(rows.first)])
        _, self._cache = self._step.step(self._params, self._cache, self._drawer.latest, rows, longest)
        for slot, end_pos in ends.items():
            self._ends[slot] = end_pos

    def warm_up(self, shape: PackedShape) -> None:
        """Compiles the steps that draft, and for a ``shape`` that prefills also the step that fills this cache."""
        for num_rows in self._sizes:
            self._step.compiled(PackedShape(num_rows, num_rows, num_rows, 1))
            self._drawer.compiled(num_rows, False)
        if shape.longest > 1:
            self._step.compiled(shape._replace(outputs=shape.sequences))
