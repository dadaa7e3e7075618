"""Names the differences between compiled and derived collectives, and counts what no name explains.

A compiled collective is matched to its step by label. A collective that the compiler has combined from several carries
one of their labels or none: it is matched by the number of elements that it moves over the same axes.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from meshwright.algebra.sizes import LANES
from meshwright.core.labels import StepLabel
from meshwright.cost.network.collectives import received_share
from meshwright.hlo.collectives import CompiledCollective
from meshwright.hlo.shapes import ELEMENT_BITS, parse_shapes
from meshwright.verify.expected import Expected, active_axes

CLASSES: dict[str, str] = {
    "windowed matmul": "gathers and scatters cut into permutes that run beside the blocks of a product",
    "full all-reduce": "sums of which a device keeps a part, sent whole: twice the bytes of a reduce-scatter",
    "scattered all-reduce": "sums sent as a reduce-scatter, and gathered where they are used",
    "joined": "sums over some axes and then over others, sent as one over all of them",
    "float32": "sent in float32 where two bytes are derived",
    "padding": "rows or columns added to fill tiles or to make equal parts",
    "repeated": "done again, to keep less in memory",
    "shared": "done once for several uses, or for several contributions to one gradient",
    "dropped": "sends of a ring that are not there: nothing uses the block any more, or it is there already",
    "involuntary rematerialisation": "arrays copied whole by the partitioner to bring them to another sharding",
}
"""Name of a difference -> its explanation."""

TOLERANCE = 0.02
"""Numbers this close count as equal; differences of a row below a quarter of this share of its bytes are ignored."""

MOST_PADDING = 0.5
"""Share of its own numbers that is added to an array at most, if its shards are no smaller than a tile: what grows by
more has another cause."""

TILE_BYTES = 4096
"""Bytes of a TPU's tile, of which a smaller shard becomes a whole one."""

_Axes = tuple[str, ...]
TrafficKey = tuple[str, _Axes]
"""(kind, mesh axes in the mesh's order)."""

_REPEATED = ".remat"
"""Part of the names of instructions that XLA duplicates to save memory."""

_COPIED = re.compile(r"for HLO operation %\S+ = (\w+\[[0-9,]*\])")
"""Shard of the array that the partitioner reports as replicated."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One named difference of a step, or of several steps over the same axes. Bytes are on the wire, per device."""

    name: str
    where: str
    derived_bytes: float
    compiled_bytes: float

    @property
    def extra_bytes(self) -> float:
        """Compiled less derived bytes."""
        return self.compiled_bytes - self.derived_bytes


class TrafficRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective over some axes: arrays and bytes on the wire per device, derived and compiled.

    ``named_bytes`` is the part of the difference that has a name.
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
        """Absolute unnamed differences as a share of all bytes."""
        unnamed = sum(abs(row.compiled_bytes - row.derived_bytes - row.named_bytes) for row in self.rows)
        return unnamed / max(self.compiled_bytes, self.derived_bytes, 1.0)


class Amount(msgspec.Struct, frozen=True):
    """Traffic: elements of whole arrays, bytes on the wire, and number of arrays."""

    elements: float = 0.0
    wire: float = 0.0
    arrays: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.elements + other.elements, self.wire + other.wire, self.arrays + other.arrays)

    def __neg__(self) -> "Amount":
        return Amount(-self.elements, -self.wire, -self.arrays)


NOTHING = Amount()
_Amounts = Mapping[TrafficKey, Amount]


class _Sides:
    """Derived and compiled traffic by kind and axes, of one label or of the whole step."""

    def __init__(self) -> None:
        self.derived: dict[TrafficKey, Amount] = defaultdict(Amount)
        self.compiled: dict[TrafficKey, Amount] = defaultdict(Amount)
        self.windowed = False


def compare_traffic(
    expected: Iterable[Expected],
    found: Iterable[CompiledCollective],
    mesh: Mapping[str, int],
    *,
    remarks: Iterable[str] = (),
) -> TrafficComparison:
    """Compares both sides, and names every difference that matches one of `CLASSES`.

    ``remarks`` are the partitioner's messages about arrays that it replicated.
    """
    shapes = [match[1] for remark in remarks if (match := _COPIED.search(remark))]
    copied = max((math.prod(parse_shapes(shape)[0].dims) for shape in shapes), default=0)
    table = _Table(expected, found, mesh, copied * math.prod(mesh.values()))
    table.take_tied()
    for key in table.rows.derived:
        table.take_joined(key)
    for label, sides in list(table.labels.items()):
        table.take_unlabelled(label, sides)
        table.take_label(label, sides)
    table.pair_rows()
    return table.result()


def _amount_of(found: CompiledCollective, size: int) -> Amount:
    """Returns the traffic of a collective over axes of ``size`` devices.

    A collective over axes that span slices is compiled as one inside and one between them. The one between them adds
    its bytes; elements and arrays count once, with the one inside.
    """
    group = found.group_size if 1 < found.group_size < size else size
    wire = found.total_bytes * received_share(found.kind, group)
    if found.dcn and group < size:
        return Amount(wire=wire)
    return Amount(found.total_bytes * 8 / ELEMENT_BITS.get(found.dtype, 32), wire, found.trips * found.num_arrays)


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(one, other)


class _Table:
    """Names differences row by row. ``left`` is compiled less derived traffic of each row that has no name yet.

    ``copied`` is the number of elements of the largest array that the partitioner replicated.
    """

    def __init__(
        self, expected: Iterable[Expected], found: Iterable[CompiledCollective], mesh: Mapping[str, int], copied: int
    ) -> None:
        self.mesh, self.copied = mesh, copied
        self.rows = _Sides()
        self.labels: dict[StepLabel | None, _Sides] = defaultdict(_Sides)
        self.taken: set[StepLabel | None] = set()
        self.named: dict[TrafficKey, float] = defaultdict(float)
        self.repeated_bytes: dict[TrafficKey, float] = defaultdict(float)
        self.differences: list[Difference] = []
        self.left: dict[TrafficKey, Amount] = defaultdict(Amount)
        self.most_padding: dict[StepLabel | None, float] = defaultdict(lambda: MOST_PADDING)
        for e in expected:
            if e.axes:
                shard_bytes = e.full_bytes / e.num_arrays / e.group_size
                self.most_padding[e.label] = max(self.most_padding[e.label], TILE_BYTES / shard_bytes)
                share = received_share(e.kind, e.group_size)
                amount = Amount(e.full_bytes / e.element_bytes, e.full_bytes * share, e.num_arrays)
                for side in (self.labels[e.label].derived, self.rows.derived):
                    side[e.kind, e.axes] += amount
        for c in found:
            if axes := active_axes(c.axes, mesh):
                amount = _amount_of(c, math.prod(mesh[axis] for axis in axes))
                for side in (self.labels[c.label].compiled, self.rows.compiled):
                    side[c.kind, axes] += amount
                self.labels[c.label].windowed |= c.windowed
                if _REPEATED in c.name:
                    self.repeated_bytes[c.kind, axes] += amount.wire
        for key in (*self.rows.compiled, *self.rows.derived):
            self.left[key] = self.rows.compiled.get(key, NOTHING) + -self.rows.derived.get(key, NOTHING)

    def is_even(self, key: TrafficKey) -> bool:
        """True if the row's unnamed difference is negligible."""
        return abs(self.left[key].wire) <= TOLERANCE / 4 * self.rows.derived[key].wire

    def take_unlabelled(self, label: StepLabel | None, sides: _Sides) -> None:
        """Names a step's scatter that is not there, where a sum without a label has all of its elements."""
        if label is None or sides.compiled or len(sides.derived) != 1:
            return
        ((kind, axes), derived), nobody = *sides.derived.items(), self.labels[None].compiled
        whole = nobody.get(("all_reduce", axes), NOTHING)
        if kind == "reduce_scatter" and _same(whole.elements, derived.elements) and not self.is_even((kind, axes)):
            self.taken.add(label)
            self._name("full all-reduce", str(label), sides.derived, {("all_reduce", axes): whole})
            nobody.pop(("all_reduce", axes))

    def take_label(self, label: StepLabel | None, sides: _Sides) -> None:
        """Names a step's difference, unless its rows are even already."""
        if label in self.taken or all(self.is_even(key) for key in (*sides.derived, *sides.compiled)):
            return
        most = self.most_padding[label]
        if name := _name_of(label, sides, most):
            self._name(name, str(label), sides.derived, sides.compiled)
            return
        for key in sides.derived.keys() & sides.compiled.keys() if label else ():
            # a leg of several
            one, other = {key: sides.derived[key]}, {key: sides.compiled[key]}
            if not self.is_even(key) and (name := _of_size(one[key], other[key], {key[0]}, most_padding=most)):
                self._name(name, str(label), one, other)

    def take_tied(self) -> None:
        """Names what one end of the program does not send of a weight because the other end sends it."""
        for label, sides in self.labels.items():
            if label is None or sides.compiled or label.block.startswith("layer"):
                continue
            others = [
                other
                for at, other in self.labels.items()
                if at is not None and (at.result, at.op) == (label.result, label.op) and at.block != label.block
            ]
            if any(other.derived == sides.derived and other.compiled for other in others):
                self.taken.add(label)
                self._name("shared", str(label), sides.derived, {})

    def take_joined(self, key: TrafficKey) -> None:
        """Names the common difference of several steps that the compiler combined under the label of one."""
        of_row = [
            (label, sides)
            for label, sides in self.labels.items()
            if {*sides.derived, *sides.compiled} == {key}
            and sides.derived.get(key, NOTHING).arrays != sides.compiled.get(key, NOTHING).arrays
        ]
        derived = sum((sides.derived.get(key, NOTHING) for _, sides in of_row), NOTHING)
        compiled = sum((sides.compiled.get(key, NOTHING) for _, sides in of_row), NOTHING)
        if self.is_even(key) or derived.arrays != compiled.arrays or not _same(derived.elements, compiled.elements):
            return
        if len(of_row) > 1 and (name := _of_size(derived, compiled, {key[0]})):
            self.taken |= {label for label, _ in of_row}
            self._name(name, _words(key), {key: derived}, {key: compiled})

    def _name(self, name: str, where: str, derived: _Amounts, compiled: _Amounts) -> None:
        for key in {**derived, **compiled}:
            extra = compiled.get(key, NOTHING) + -derived.get(key, NOTHING)
            self.named[key] += extra.wire
            self.left[key] += -extra
        less, more = (sum(side.values(), NOTHING).wire for side in (derived, compiled))
        self.differences.append(Difference(name=name, where=where, derived_bytes=less, compiled_bytes=more))

    def pair_rows(self) -> None:
        """Names differences of collectives without labels, by comparing rows."""
        for key in list(self.left):
            kind, axes = key
            if kind != "reduce_scatter" or self.left[key].elements >= 0 or self.is_even(key):
                continue
            # all-reduces over the same axes, or also over those that sum the replicas afterwards
            whole = [other for other in self.left if other[0] == "all_reduce" and set(axes) <= set(other[1])]
            same = (other for other in whole if _same(self.left[other].elements, -self.left[key].elements))
            if found := next(same, None):
                self._pair(key, found)
        for key in [key for key in self.left if key[0] == "all_reduce"]:
            self._pair_sums(key)
        for key, left in list(self.left.items()):
            if self.is_even(key):
                continue
            if left.wire > 0:
                again = self.repeated_bytes[key] >= (1 - TOLERANCE) * left.wire
                if again or 0 < left.elements <= left.arrays * self.copied:
                    name = "repeated" if again else "involuntary rematerialisation"
                    self._name(name, _words(key), {}, {key: left})
            elif key[0] == "permute" and left.arrays < 0 and self._is_one_round(key, left):
                self._name("dropped", _words(key), {key: -left}, {})
            elif self._is_of_a_tied_weight(key, left):
                self._name("shared", _words(key), {key: -left}, {})
            # as many arrays as derived, of up to half as many more elements
            left, most = self.left[key], MOST_PADDING * self.rows.derived[key].elements
            if left.arrays == 0 and 0 < left.elements < most and not self.is_even(key):
                self._name("padding", _words(key), {}, {key: left})

    def _pair_sums(self, key: TrafficKey) -> None:
        """Names sums over the axes of a row that were sent in another form: as a scatter and a gather, or together with
        the sums over further axes that follow."""
        left = self.left[key]
        if left.wire >= 0 or self.is_even(key):
            return
        parts = [(kind, key[1]) for kind in ("reduce_scatter", "all_gather")]
        if all(self.left.get(part, NOTHING).wire > 0 for part in parts):
            found = {part: self.left[part] for part in parts}
            # parts of small arrays are padded
            if (sum(found.values(), NOTHING) + left).wire <= MOST_PADDING * -left.wire:
                self._name("scattered all-reduce", _words(key), {key: -left}, found)
            return
        for whole in [other for other in self.left if other[0] == "all_reduce" and set(key[1]) < set(other[1])]:
            rest = "all_reduce", tuple(axis for axis in whole[1] if axis not in key[1])
            alike = all(_same(-self.left.get(one, NOTHING).elements, self.left[whole].elements) for one in (key, rest))
            if alike and self.left[whole].wire > 0:
                self._name(
                    "joined", _words(whole), {one: -self.left[one] for one in (key, rest)}, {whole: self.left[whole]}
                )
                return

    def _is_of_a_tied_weight(self, key: TrafficKey, left: Amount) -> bool:
        """True if a row lacks what one end of the program sends of an array that embedding and head both gather or
        sum."""
        sent = {
            label: sides.derived[key]
            for label, sides in self.labels.items()
            if label is not None and key in sides.derived and not label.block.startswith("layer")
        }
        alike = [label for label, one in sent.items() if _same(one.elements, -left.elements)]
        blocks = {(label.result, label.block) for label in alike if sent[label].arrays == -left.arrays}
        return len(blocks) > len({result for result, _ in blocks})

    def _is_one_round(self, key: TrafficKey, left: Amount) -> bool:
        """True if a row lacks whole arrays of its own size, at most one of a ring's n - 1 rounds."""
        derived, compiled = self.rows.derived[key], self.rows.compiled[key]
        rounds = math.prod(self.mesh[axis] for axis in key[1]) - 1
        whole = _same(left.elements / left.arrays, derived.elements / derived.arrays)
        return whole and compiled.arrays > 0 and -left.arrays * rounds <= derived.arrays

    def _pair(self, scattered: TrafficKey, whole: TrafficKey) -> None:
        """Names a reduce-scatter compiled as an all-reduce, which may also include the sum over replicas."""
        derived = {scattered: -self.left[scattered]}
        rest = "all_reduce", tuple(axis for axis in whole[1] if axis not in scattered[1])
        replicas = self.left.get(rest, NOTHING)
        if rest[1] and replicas.wire < 0:
            derived[rest] = -replicas
        self._name("full all-reduce", _words(scattered), derived, {whole: self.left[whole]})

    def result(self) -> TrafficComparison:
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
            differences=tuple(sorted(self.differences, key=lambda one: -abs(one.extra_bytes))),
        )


def _words(key: TrafficKey) -> str:
    return f"{key[0]} over {','.join(key[1])}"


def _name_of(label: StepLabel | None, sides: _Sides, most_padding: float) -> str:
    """Returns the name of a step's difference; empty if one side is missing or no name matches."""
    if label is None or not sides.derived or not sides.compiled:
        return ""
    if sides.windowed:
        return "windowed matmul"
    derived, compiled = {kind for kind, _ in sides.derived}, {kind for kind, _ in sides.compiled}
    if derived == {"reduce_scatter"} and "all_reduce" in compiled:
        return "full all-reduce"
    if derived == {"all_reduce"} and "reduce_scatter" in compiled:
        return "scattered all-reduce"
    if set(sides.derived) != set(sides.compiled):
        return ""
    return _of_size(
        sum(sides.derived.values(), NOTHING), sum(sides.compiled.values(), NOTHING), derived, most_padding=most_padding
    )


def _of_size(derived: Amount, compiled: Amount, kinds: set[str], *, most_padding: float = MOST_PADDING) -> str:
    """Returns the name of a difference in bytes alone, where kinds and axes agree."""
    if _same(derived.elements, compiled.elements):
        return "float32" if _same(compiled.wire, 2 * derived.wire) else ""
    if derived.arrays == compiled.arrays:
        # rows of one number, such as weights of slots, are sent as rows that fill the lanes
        of_numbers = _same(compiled.elements, LANES * derived.elements)
        more = compiled.elements - derived.elements
        return "padding" if of_numbers or 0 < more < most_padding * derived.elements else ""
    # combined arrays carry one label: their mean size then differs from that of the step's own
    if not _same(compiled.elements / max(compiled.arrays, 1), derived.elements / max(derived.arrays, 1)):
        return ""
    if compiled.arrays > derived.arrays:
        return "repeated"
    # a missing sum is a fault, even if an equal one is present
    return "shared" if kinds == {"all_gather"} else ""
