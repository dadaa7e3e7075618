"""Derived and compiled collectives in one table: traffic by kind and axes, by step, and differences with a name."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from meshwright.core.labels import StepLabel
from meshwright.cost.network.collectives import received_share
from meshwright.hlo.collectives import CompiledCollective
from meshwright.hlo.shapes import ELEMENT_BITS
from meshwright.verify.expected import Expected, active_axes

TOLERANCE = 0.02
"""Numbers within this relative difference count as equal; a quarter of it, of a row's derived bytes, is negligible."""

MOST_PADDING = 0.5
"""Largest padding of an array, as a share of its elements, if its shards are no smaller than a tile: a larger growth
has another cause."""

TILE_BYTES = 4096
"""Bytes of a TPU tile; a smaller shard is padded to a whole tile."""

_Axes = tuple[str, ...]
TrafficKey = tuple[str, _Axes]
"""(kind, mesh axes in the mesh's order)."""

_REPEATED = ".remat"
"""Part of the names of instructions that XLA duplicates to save memory."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One named difference of a step, or of several steps over the same axes. Bytes are sent per device."""

    name: str
    where: str
    derived_bytes: float
    compiled_bytes: float

    @property
    def extra_bytes(self) -> float:
        """Compiled less derived bytes."""
        return self.compiled_bytes - self.derived_bytes


class TrafficRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective over some axes: arrays, and bytes sent per device, derived and compiled.

    ``named_bytes`` is the part of the difference, compiled less derived, that has a name.
    """

    kind: str
    axes: _Axes
    derived_arrays: int
    compiled_arrays: int
    derived_bytes: float
    compiled_bytes: float
    named_bytes: float = 0.0


class TrafficComparison(msgspec.Struct, frozen=True, kw_only=True):
    """All rows, most bytes first, and the named differences."""

    rows: tuple[TrafficRow, ...]
    differences: tuple[Difference, ...]

    @property
    def compiled_bytes(self) -> float:
        return sum(row.compiled_bytes for row in self.rows)

    @property
    def derived_bytes(self) -> float:
        return sum(row.derived_bytes for row in self.rows)

    @property
    def remainder(self) -> float:
        """Sum of the rows' absolute unnamed differences, as a share of the sum of each row's larger side."""
        unnamed_bytes = sum(abs(row.compiled_bytes - row.derived_bytes - row.named_bytes) for row in self.rows)
        return unnamed_bytes / max(sum(max(row.compiled_bytes, row.derived_bytes) for row in self.rows), 1.0)


class Amount(msgspec.Struct, frozen=True):
    """Traffic: elements of unsharded arrays, bytes sent per device, and number of arrays."""

    elements: float = 0.0
    wire: float = 0.0
    arrays: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.elements + other.elements, self.wire + other.wire, self.arrays + other.arrays)

    def __neg__(self) -> "Amount":
        return Amount(-self.elements, -self.wire, -self.arrays)


NOTHING = Amount()
TrafficAmounts = Mapping[TrafficKey, Amount]


class Sides:
    """Derived and compiled traffic by kind and axes, of one label or of the whole step."""

    def __init__(self) -> None:
        self.derived: dict[TrafficKey, Amount] = defaultdict(Amount)
        self.compiled: dict[TrafficKey, Amount] = defaultdict(Amount)
        self.windowed = False


def _amount_of(found: CompiledCollective, num_devices: int) -> Amount:
    """Returns the traffic of a collective over axes of ``num_devices`` devices.

    A collective over axes that span slices is compiled as one inside each slice and one between slices. The one between
    slices adds only its bytes; elements and arrays are counted with the one inside.
    """
    group_size = found.group_size if 1 < found.group_size < num_devices else num_devices
    wire_bytes = found.total_bytes * received_share(found.kind, group_size)
    if found.dcn and group_size < num_devices:
        return Amount(wire=wire_bytes)
    return Amount(found.total_bytes * 8 / ELEMENT_BITS.get(found.dtype, 32), wire_bytes, found.trips * found.num_arrays)


def same(one: float, other: float) -> bool:
    """True if two positive numbers differ by at most `TOLERANCE` of the larger one."""
    return abs(one - other) <= TOLERANCE * max(one, other)


class TrafficTable:
    """Derived and compiled traffic of a step, from whose difference rules subtract the parts that they can name.

    ``left`` is the unnamed difference of each row, compiled less derived. ``copied`` is the number of elements of the
    largest array that the partitioner replicated."""

    def __init__(
        self, expected: Iterable[Expected], found: Iterable[CompiledCollective], mesh: Mapping[str, int], copied: int
    ) -> None:
        self.mesh, self.copied = mesh, copied
        self.rows = Sides()
        self.labels: dict[StepLabel | None, Sides] = defaultdict(Sides)
        self.taken: set[StepLabel | None] = set()
        self.named: dict[TrafficKey, float] = defaultdict(float)
        self.repeated_bytes: dict[TrafficKey, float] = defaultdict(float)
        self.differences: list[Difference] = []
        self.left: dict[TrafficKey, Amount] = defaultdict(Amount)
        self.most_padding: dict[StepLabel | None, float] = defaultdict(lambda: MOST_PADDING)
        for row in expected:
            if row.axes:
                shard_bytes = row.full_bytes / row.num_arrays / row.group_size
                self.most_padding[row.label] = max(self.most_padding[row.label], TILE_BYTES / shard_bytes)
                received_fraction = received_share(row.kind, row.group_size)
                amount = Amount(row.full_bytes / row.element_bytes, row.full_bytes * received_fraction, row.num_arrays)
                for amount_by_key in (self.labels[row.label].derived, self.rows.derived):
                    amount_by_key[row.kind, row.axes] += amount
        for collective in found:
            if axes := active_axes(collective.axes, mesh):
                amount = _amount_of(collective, math.prod(mesh[axis] for axis in axes))
                for amount_by_key in (self.labels[collective.label].compiled, self.rows.compiled):
                    amount_by_key[collective.kind, axes] += amount
                self.labels[collective.label].windowed |= collective.windowed
                if _REPEATED in collective.name:
                    self.repeated_bytes[collective.kind, axes] += amount.wire
        for key in (*self.rows.compiled, *self.rows.derived):
            self.left[key] = self.rows.compiled.get(key, NOTHING) + -self.rows.derived.get(key, NOTHING)

    def is_even(self, key: TrafficKey) -> bool:
        """True if the row's unnamed difference is at most a quarter of `TOLERANCE` of its derived bytes."""
        return abs(self.left[key].wire) <= TOLERANCE / 4 * self.rows.derived[key].wire

    def name(self, name: str, where: str, derived: TrafficAmounts, compiled: TrafficAmounts) -> None:
        """Records a named difference, and subtracts it, compiled less derived, from each row of ``left``."""
        for key in {**derived, **compiled}:
            extra_amount = compiled.get(key, NOTHING) + -derived.get(key, NOTHING)
            self.named[key] += extra_amount.wire
            self.left[key] += -extra_amount
        due_bytes, sent_bytes = (sum(amounts.values(), NOTHING).wire for amounts in (derived, compiled))
        self.differences.append(Difference(name=name, where=where, derived_bytes=due_bytes, compiled_bytes=sent_bytes))

    def result(self) -> TrafficComparison:
        """Returns all rows and the named differences, most bytes first."""
        rows = [
            TrafficRow(
                kind=key[0],
                axes=key[1],
                derived_arrays=self.rows.derived[key].arrays,
                compiled_arrays=self.rows.compiled[key].arrays,
                derived_bytes=self.rows.derived[key].wire,
                compiled_bytes=self.rows.compiled[key].wire,
                named_bytes=self.named.get(key, 0.0),
            )
            for key in dict.fromkeys((*self.rows.derived, *self.rows.compiled))
        ]
        return TrafficComparison(
            rows=tuple(sorted(rows, key=lambda row: -max(row.compiled_bytes, row.derived_bytes))),
            differences=tuple(sorted(self.differences, key=lambda difference: -abs(difference.extra_bytes))),
        )
