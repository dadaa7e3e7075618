"""Builds the rows of a step (tokens, positions, pages) from its requests, and lists the rows that have logits."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.parallel.generation.packed_step import NO_SLOT, PackedRows, PackedShape, PackedStep, slots_of
from meshwright.parallel.generation.source_step import SourceRows
from meshwright.serve.drawing.drawer import OutputRow
from meshwright.serve.request import SourceFeatures
from meshwright.serve.sequences.live import Live, Tables
from meshwright.serve.sequences.step_shapes import SourceShapes


class OutputOf(NamedTuple):
    """A row with logits in a dispatched step: its request and what it draws (``row.target`` is the next prompt token
    where a prompt is scored). ``draft`` is the token of the next row, which counts only if this row draws that
    token."""

    live: Live
    row: OutputRow
    draft: int | None = None


RowsOf = tuple[Live, int, int, list[int]]
"""A request's part of a step: the request, its first and end position, and the drafts at its last positions."""


class OwnRows(NamedTuple):
    """The rows of one owner, the index of each row's part (``whose``), and the rows with logits."""

    rows: PackedRows
    whose: np.ndarray
    outputs: list[OutputOf]


def rows_of(step: PackedStep, tables: Tables, parts: Sequence[RowsOf]) -> OwnRows:
    """Returns the rows of one owner's parts. Side effects: the requests take the pages that they need and advance
    ``computed`` and ``produced``."""
    part_lens = np.array([end_pos - start_pos for _, start_pos, end_pos, _ in parts], np.int32)
    part_ends = np.array([end_pos for _, _, end_pos, _ in parts], np.int32)
    num_rows, first_rows = int(part_lens.sum()), np.cumsum(part_lens) - part_lens
    part_of_row = np.repeat(np.arange(len(parts)), part_lens)
    positions = np.arange(num_rows) - first_rows[part_of_row] + (part_ends - part_lens)[part_of_row]
    tokens, latest_slots = list[int](), list[int]()
    outputs, last_rows = list[OutputOf](), list[int]()
    for (seq, start_pos, end_pos, drafts), first_row in zip(parts, first_rows.tolist(), strict=True):
        seq.take_pages(tables, end_pos, step.storage.page_len)
        if windows := seq.owner.pages.windows:
            windows.advance(seq.window, start_pos, end_pos, tables.windows[seq.slot])
        known_tokens = seq.tokens[start_pos:end_pos] + drafts
        latest_slots += [-1] * (end_pos - start_pos) if known_tokens else [seq.slot]  # else it is on the devices only
        tokens += known_tokens or [0]
        seq.computed = end_pos - len(drafts)  # drafts count once accepted
        prompt = seq.request.prompt
        if seq.request.echo and not seq.produced:
            for position in range(start_pos, min(end_pos, len(prompt) - 1)):
                outputs.append(OutputOf(seq, OutputRow(step.max_seqs, 0, prompt[position + 1])))
                last_rows.append(first_row + position - start_pos)
        if seq.computed == len(prompt) + seq.produced:  # else known tokens are not computed yet, so nothing is drawn
            for draft_index, draft in enumerate([*drafts, None]):
                outputs.append(OutputOf(seq, OutputRow(seq.slot, seq.produced + draft_index), draft))
            last_rows += range(first_row + end_pos - start_pos - 1 - len(drafts), first_row + end_pos - start_pos)
            seq.produced += 1
    table_rows, page_len = [seq.slot for seq, *_ in parts], step.storage.page_len
    pages = tables.pages[table_rows]
    cache_slots = slots_of(positions, pages, part_of_row, page_len)
    rows = PackedRows(tokens, latest_slots, positions, cache_slots, first_rows, part_lens, part_ends, pages, last_rows)
    if step.has_windows:
        pages = tables.windows[table_rows]
        rows = rows._replace(window_slots=slots_of(positions, pages, part_of_row, page_len), window_pages=pages)
    if step.model.encoder:
        source_lens = np.array([len(seq.request.source) for seq, *_ in parts], np.int32)
        rows = rows._replace(source_lengths=source_lens, source_pages=tables.sources[table_rows])
    if step.storage.adapters:
        rows = rows._replace(adapters=np.array([seq.adapter for seq, *_ in parts], np.int32)[part_of_row])
    for field in step.mask_fields:  # a prefix is the whole prompt; no other position is special
        prompt_lens = [len(seq.request.prompt) for seq, *_ in parts]
        field_values = prompt_lens if field == "prefix" else np.zeros((len(parts), step.max_len))
        rows = rows._replace(**{field: np.array(field_values, np.int32)})
    return OwnRows(rows, part_of_row, outputs)


def rows_of_sources(
    step: PackedStep, admitted: Sequence[Sequence[Live]], shapes: SourceShapes | None
) -> Iterator[SourceRows]:
    """Yields batches of the sources that the encoder has not read yet, of requests admitted by each owner."""
    unread = [[seq for seq in own_seqs if seq.reads_source] for own_seqs in admitted]
    while shapes and any(unread):
        longest = max(len(seq.request.source) for own_seqs in unread for seq in own_seqs)
        num_each, length = shapes.fitting(longest, max(map(len, unread)))
        shape = num_each * step.num_owners, length
        # padding sources have one position, which is written to no slot
        rows = SourceRows(step.empty_sources(*shape), np.ones(shape[0], np.int32), np.full(shape, NO_SLOT, np.int32))
        for owner_id, own_seqs in enumerate(unread):
            for row, seq in enumerate(own_seqs[:num_each], start=owner_id * num_each):
                source, positions = seq.request.source, np.arange(len(seq.request.source))
                pages = np.array(seq.owner.pages.sources[source].pages)[None]
                rows.lengths[row] = len(source)
                if isinstance(source, SourceFeatures):
                    rows.contents[row] = source.values
                else:
                    rows.contents[row, positions] = source
                rows.slots[row, positions] = slots_of(positions, pages, 0 * positions, step.storage.page_len)
        unread = [own_seqs[num_each:] for own_seqs in unread]
        yield rows


def joined_rows(every: Sequence[OwnRows], shape: PackedShape) -> tuple[PackedRows, list[OutputOf | None]]:
    """Returns the rows of all owners padded to a shape, and for each row with logits its output (None: padding)."""
    owner_rows = [owner.rows.each_alone(owner.whose) if shape.longest == 1 else owner.rows for owner in every]
    outputs = list[OutputOf | None]()
    for owner_id, owner in enumerate(every):
        num_idle = shape.outputs // len(every) * owner_id - len(outputs)  # padding of the previous owner
        outputs += [*[None] * num_idle, *owner.outputs]
    return PackedRows.joined(owner_rows, shape), outputs
