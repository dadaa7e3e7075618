"""Collectives of a compiled program put together: those that move the same bytes in the same way are one row."""

from collections.abc import Iterable

import msgspec

from meshwright.hlo.collectives import Collective


class CollectiveRow(msgspec.Struct, frozen=True):
    """Collectives of one kind, group, size and manner; ``times`` counts all of them, in all their loops."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    full_bytes: int
    times: int
    is_async: bool
    notes: tuple[str, ...]
    steps: tuple[str, ...]
    """Labels of the derived steps that they came from, or that are near, without what makes them."""

    @property
    def total_bytes(self) -> int:
        """Full bytes over all the times."""
        return self.full_bytes * self.times


def collective_rows(found: Iterable[Collective]) -> tuple[CollectiveRow, ...]:
    """One row for collectives that are alike, most bytes first."""
    alike: dict[tuple[object, ...], list[Collective]] = {}
    for one in found:
        key = (one.kind, one.axes, one.group_size, one.dtype, one.full_bytes, one.is_async, collective_notes(one))
        alike.setdefault(key, []).append(one)
    rows = [
        CollectiveRow(
            kind=group[0].kind,
            axes=group[0].axes,
            group_size=group[0].group_size,
            dtype=group[0].dtype,
            full_bytes=group[0].full_bytes,
            times=sum(one.trips for one in group),
            is_async=group[0].is_async,
            notes=collective_notes(group[0]),
            steps=tuple(dict.fromkeys(step for one in group if (step := _step(one)))),
        )
        for group in alike.values()
    ]
    return tuple(sorted(rows, key=lambda row: row.total_bytes, reverse=True))


def collective_notes(one: Collective) -> tuple[str, ...]:
    """What is particular of a collective, a word each."""
    marks = {
        "between slices": one.dcn,
        "cut matmul": one.windowed,
        "sliced after": one.sliced,
        "in a branch": one.in_conditional,
    }
    return tuple(word for word, holds in marks.items() if holds)


def _step(one: Collective) -> str:
    label = one.label or one.near
    if label is None:
        return ""
    return f"{'' if one.label else 'near '}{label.block}:{label.phase}:{label.result}"
