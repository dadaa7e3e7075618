"""Compares the communication that overlaps with compute in the compiled schedule with what the cost model predicts."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from meshwright.cost.breakdown import Breakdown, PricedOverlap
from meshwright.cost.network.collectives import received_share
from meshwright.hlo.collectives import CompiledCollective
from meshwright.verify.expected import active_axes


class OverlapRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective over some axes: compiled bytes sent per device, and predicted seconds.

    ``overlapped`` maps each form of overlap with compute (`hlo.collectives.Overlap`) to its bytes. The cost model hides
    ``hidden_s`` of the ``alone_s`` seconds that the derived collectives take without overlap.
    """

    kind: str
    axes: tuple[str, ...]
    overlapped: dict[str, float]
    exposed_bytes: float
    alone_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def overlapped_bytes(self) -> float:
        return sum(self.overlapped.values())


class OverlapComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Overlap as compiled and as predicted; rows with most predicted seconds first.

    ``beside_s`` is the predicted time of the communication that overlaps in the compiled schedule; ``priced`` is the
    step's overlap if the other communication is exposed.
    """

    rows: tuple[OverlapRow, ...]
    beside_s: float
    priced: PricedOverlap


def compare_overlap(
    found: Iterable[CompiledCollective], priced: Breakdown, mesh: Mapping[str, int]
) -> OverlapComparison:
    """Compares the overlap of compiled collectives with that of a priced step on the same mesh."""
    compiled_bytes: dict[tuple[str, tuple[str, ...]], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for sent in found:
        if axes := active_axes(sent.axes, mesh):
            num_devices = math.prod(mesh[axis] for axis in axes)
            group_size = sent.group_size if 1 < sent.group_size < num_devices else num_devices
            compiled_bytes[sent.kind, axes][sent.overlap] += sent.total_bytes * received_share(sent.kind, group_size)
    priced_by_key = {(traffic.op, active_axes(traffic.axes, mesh)): traffic for traffic in priced.traffic}
    rows = [
        OverlapRow(
            kind=kind,
            axes=axes,
            overlapped={how: num_bytes for how, num_bytes in compiled_bytes[kind, axes].items() if how},
            exposed_bytes=compiled_bytes[kind, axes][""],
            alone_s=traffic.alone_s if traffic else 0.0,
            hidden_s=traffic.alone_s - traffic.exposed_s if traffic else 0.0,
        )
        for kind, axes in dict.fromkeys((*compiled_bytes, *priced_by_key))
        for traffic in (priced_by_key.get((kind, axes)),)
    ]
    return OverlapComparison(
        rows=tuple(sorted(rows, key=lambda row: (-row.alone_s, -row.exposed_bytes))),
        beside_s=sum(row.alone_s * (1 - _exposed_share(rows, row.kind, row.axes)) for row in rows),
        priced=priced.overlap(lambda cost: _exposed_share(rows, cost.step.op, active_axes(cost.step.axes, mesh))),
    )


def _exposed_share(rows: Sequence[OverlapRow], kind: str, axes: tuple[str, ...]) -> float:
    """Returns the exposed share of a collective's compiled bytes; 1 if nothing was compiled.

    If no compiled row has this kind and these axes, all rows that share an axis with it count.
    """
    sent_rows = [row for row in rows if row.exposed_bytes or row.overlapped]
    exact_rows = [row for row in sent_rows if (row.kind, row.axes) == (kind, axes)]
    near_rows = exact_rows or [row for row in sent_rows if set(row.axes) & set(axes)]
    exposed_bytes = sum(row.exposed_bytes for row in near_rows)
    return exposed_bytes / (exposed_bytes + sum(row.overlapped_bytes for row in near_rows)) if near_rows else 1.0
