"""What the compiler's schedule overlaps with compute, beside what the price of the step hides."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from meshwright.cost.network.collectives import received_share
from meshwright.hlo.collectives import CompiledCollective
from meshwright.verify.expected import Expected, active_axes


class OverlapRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective over some axes: bytes on the wire per device.

    ``overlapped`` maps how collectives run beside compute (`hlo.schedule.Overlap`) to their bytes. ``hidden_bytes`` are
    those of the ``derived_bytes`` that the price hides behind compute, as far as compute lasts.
    """

    kind: str
    axes: tuple[str, ...]
    overlapped: dict[str, float]
    exposed_bytes: float
    derived_bytes: float
    hidden_bytes: float

    @property
    def overlapped_bytes(self) -> float:
        return sum(self.overlapped.values())


def compare_overlap(
    expected: Iterable[Expected], found: Iterable[CompiledCollective], mesh: Mapping[str, int]
) -> tuple[OverlapRow, ...]:
    """Returns the rows of both sides, most bytes first."""
    compiled: dict[tuple[str, tuple[str, ...]], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    derived: dict[tuple[str, tuple[str, ...]], dict[bool, float]] = defaultdict(lambda: defaultdict(float))
    for one in found:
        if axes := active_axes(one.axes, mesh):
            size = math.prod(mesh[axis] for axis in axes)
            group = one.group_size if 1 < one.group_size < size else size
            compiled[one.kind, axes][one.overlap] += one.total_bytes * received_share(one.kind, group)
    for step in expected:
        if step.axes:
            derived[step.kind, step.axes][step.hides] += step.full_bytes * received_share(step.kind, step.group_size)
    rows = [
        OverlapRow(
            kind=kind,
            axes=axes,
            overlapped={how: num_bytes for how, num_bytes in compiled[kind, axes].items() if how},
            exposed_bytes=compiled[kind, axes][""],
            derived_bytes=sum(derived[kind, axes].values()),
            hidden_bytes=derived[kind, axes][True],
        )
        for kind, axes in dict.fromkeys((*compiled, *derived))
    ]
    return tuple(sorted(rows, key=lambda row: -max(row.exposed_bytes + row.overlapped_bytes, row.derived_bytes)))
