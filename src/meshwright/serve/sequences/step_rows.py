"""The rows of a step: whose they are, and which of them have logits."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.parallel.generation.packed_step import PackedRows, PackedShape, PackedStep, slots_of
from meshwright.serve.drawing.drawer import OutputRow
from meshwright.serve.sequences.live import Live, Tables


class OutputOf(NamedTuple):
    """A row with logits of a dispatched step: whose it is, and what it draws; the target is the next token of the
    prompt where its log-probability is wanted. ``draft`` is the token of the row after it, which counts only if this
    row draws that token."""

    live: Live
    row: OutputRow
    draft: int | None = None


RowsOf = tuple[Live, int, int, list[int]]
"""Whose rows, the positions from here to there, and the drafts that the last of these are."""


class OwnRows(NamedTuple):
    """The rows of an owner, to whose part each belongs, and those with logits."""

    rows: PackedRows
    whose: np.ndarray
    outputs: list[OutputOf]


def rows_of(step: PackedStep, tables: Tables, parts: Sequence[RowsOf]) -> OwnRows:
    """Returns the rows of one owner's parts. The requests take the pages that they need, and count what the step
    computes."""
    part_lens = np.array([end - start for _, start, end, _ in parts], np.int32)
    part_ends = np.array([end for _, _, end, _ in parts], np.int32)
    num_rows, first_rows = int(part_lens.sum()), np.cumsum(part_lens) - part_lens
    part_of_row = np.repeat(np.arange(len(parts)), part_lens)
    positions = np.arange(num_rows) - first_rows[part_of_row] + (part_ends - part_lens)[part_of_row]
    tokens, sources = list[int](), list[int]()
    outputs, output_rows = list[OutputOf](), list[int]()
    for (live, start, end, drafts), first_row in zip(parts, first_rows.tolist(), strict=True):
        live.take_pages(tables, end, step.storage.page_len)
        if windows := live.owner.pages.windows:
            windows.advance(live.window, start, end, tables.windows[live.slot])
        known_tokens = live.tokens[start:end] + drafts
        sources += [-1] * (end - start) if known_tokens else [live.slot]  # else the devices alone know the token
        tokens += known_tokens or [0]
        live.computed = end - len(drafts)  # drafts count once they were right
        prompt = live.request.prompt
        if live.request.echo and not live.produced:
            for position in range(start, min(end, len(prompt) - 1)):
                outputs.append(OutputOf(live, OutputRow(step.max_seqs, 0, prompt[position + 1])))
                output_rows.append(first_row + position - start)
        if live.computed == len(prompt) + live.produced:  # else more is known than is computed, and nothing is drawn
            for place, draft in enumerate([*drafts, None]):
                outputs.append(OutputOf(live, OutputRow(live.slot, live.produced + place), draft))
            output_rows += range(first_row + end - start - 1 - len(drafts), first_row + end - start)
            live.produced += 1
    table_rows, page_len = [live.slot for live, *_ in parts], step.storage.page_len
    pages = tables.pages[table_rows]
    cache_slots = slots_of(positions, pages, part_of_row, page_len)
    rows = PackedRows(tokens, sources, positions, cache_slots, first_rows, part_lens, part_ends, pages, output_rows)
    if step.has_windows:
        pages = tables.windows[table_rows]
        rows = rows._replace(window_slots=slots_of(positions, pages, part_of_row, page_len), window_pages=pages)
    if step.storage.adapters:
        rows = rows._replace(adapters=np.array([live.adapter for live, *_ in parts], np.int32)[part_of_row])
    for name in step.mask_fields:  # a prefix is the whole prompt; no other position is special
        prompt_lens = [len(live.request.prompt) for live, *_ in parts]
        data = prompt_lens if name == "prefix" else np.zeros((len(parts), step.max_len))
        rows = rows._replace(**{name: np.array(data, np.int32)})
    return OwnRows(rows, part_of_row, outputs)


def joined_rows(every: Sequence[OwnRows], shape: PackedShape) -> tuple[PackedRows, list[OutputOf | None]]:
    """Returns the rows of all owners as arrays of a shape, and those with logits, None for one that draws nothing."""
    rows = [owned.rows.each_alone(owned.whose) if shape.longest == 1 else owned.rows for owned in every]
    outputs = list[OutputOf | None]()
    for number, owned in enumerate(every):
        num_idle = shape.outputs // len(every) * number - len(outputs)  # rows of the owner before that draw nothing
        outputs += [*[None] * num_idle, *owned.outputs]
    return PackedRows.joined(rows, shape), outputs
