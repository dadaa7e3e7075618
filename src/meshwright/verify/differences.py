"""What the compiled collectives differ in from the derived ones, by name, and how much is left without a name.

What a compiled collective came from is known by its step's label. Several that the compiler has combined carry the
label of one or none: they are found again by the number of elements that they move over the same axes.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from meshwright.core.labels import OPTIMIZER, StepLabel
from meshwright.hlo.collectives import Collective
from meshwright.hlo.shapes import ELEMENT_BITS, parse_shapes
from meshwright.verify.expected import Expected, active_axes

CLASSES: dict[str, str] = {
    "windowed matmul": "gathers and scatters cut into permutes that run beside the blocks of a product",
    "full all-reduce": "sums of which a device keeps a part, sent whole: twice the bytes of a reduce-scatter",
    "scattered all-reduce": "sums sent as a reduce-scatter, and gathered where they are used",
    "float32": "sent in float32 where two bytes are derived",
    "narrowed": "sent in fewer bytes than derived",
    "padding": "rows or columns added to fill tiles or to make equal parts",
    "repeated": "done again, to keep less in memory",
    "shared": "done once for several uses",
    "dropped": "sends of a ring that are not there: nothing uses the block any more, or it is there already",
    "optimizer": "the optimizer's own, on whole matrices",
    "involuntary rematerialisation": "arrays copied whole by the partitioner to bring them to another sharding",
}
"""Names of differences, and what each is."""

TOLERANCE = 0.02
"""Differences up to this share of a row's bytes need no name, and numbers of elements this close are the same."""

Axes = tuple[str, ...]
Key = tuple[str, Axes]
"""(kind, mesh axes in the mesh's order)."""

_REPEATED = ".remat"
"""Part of the name of what XLA does again to keep less in memory."""

_COPIED = re.compile(r"for HLO operation %\S+ = (\w+\[[0-9,]*\])")
"""A device's part of the array that the partitioner says it copied whole."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One named difference: of a step, or of several over some axes. Bytes are on the wire and per device."""

    name: str
    where: str
    derived_bytes: float
    compiled_bytes: float

    @property
    def extra_bytes(self) -> float:
        """How much more is sent than derived; less where negative."""
        return self.compiled_bytes - self.derived_bytes


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective over some axes: arrays and bytes on the wire per device, derived and compiled.

    ``named_bytes`` of the difference have a name.
    """

    kind: str
    axes: Axes
    derived_arrays: int
    compiled_arrays: int
    derived_bytes: float
    compiled_bytes: float
    named_bytes: float = 0.0

    @property
    def remainder_bytes(self) -> float:
        """What is left of the difference without a name."""
        return self.compiled_bytes - self.derived_bytes - self.named_bytes


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All rows, the most bytes first, and the named differences."""

    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]

    @property
    def compiled_bytes(self) -> float:
        return sum(row.compiled_bytes for row in self.rows)

    @property
    def derived_bytes(self) -> float:
        return sum(row.derived_bytes for row in self.rows)

    @property
    def remainder(self) -> float:
        """Bytes of differences without a name, both signs counted, over all bytes."""
        unnamed = sum(abs(row.remainder_bytes) for row in self.rows)
        return unnamed / max(self.compiled_bytes, self.derived_bytes, 1.0)


class Amount(msgspec.Struct):
    """What is moved: elements of whole arrays, bytes on the wire, and arrays."""

    elements: float = 0.0
    wire: float = 0.0
    arrays: int = 0

    def add(self, elements: float, wire: float, arrays: int) -> None:
        self.elements += elements
        self.wire += wire
        self.arrays += arrays


class _Sides:
    """Both sides of one label, or of all that labels do not explain, by kind and axes."""

    def __init__(self) -> None:
        self.derived: dict[Key, Amount] = defaultdict(Amount)
        self.compiled: dict[Key, Amount] = defaultdict(Amount)
        self.repeated: dict[Key, Amount] = defaultdict(Amount)
        self.windowed = False

    def total(self, side: str) -> Amount:
        found = Amount()
        for amount in getattr(self, side).values():
            found.add(amount.elements, amount.wire, amount.arrays)
        return found


def wire_bytes(kind: str, full_bytes: float, size: int) -> float:
    """Bytes that each of ``size`` devices must receive: those of a ring, (n-1)/n of the array, twice that for an
    all-reduce."""
    once = (size - 1) / size
    return full_bytes * {"all_reduce": 2 * once, "all_to_all": once / size, "permute": 1.0}.get(kind, once)


def compare(
    expected: Iterable[Expected],
    found: Iterable[Collective],
    mesh: Mapping[str, int],
    *,
    remarks: Iterable[str] = (),
) -> Comparison:
    """Both beside each other, with a name for every difference that can be shown to be one of `CLASSES`.

    ``remarks`` are lines of the partitioner about arrays that it copied whole.
    """
    labels, rows = _sides(expected, found, mesh)
    table = _Table(rows, mesh, _copied_elements(remarks) * math.prod(mesh.values()))
    for key in rows.derived:
        table.take_joined(key, labels)
    for label, sides in labels.items():
        table.take_label(label, sides)
    table.pair_rows()
    return table.result()


def _sides(
    expected: Iterable[Expected], found: Iterable[Collective], mesh: Mapping[str, int]
) -> tuple[dict[StepLabel | None, _Sides], _Sides]:
    labels: dict[StepLabel | None, _Sides] = defaultdict(_Sides)
    rows = _Sides()
    for e in expected:
        if e.axes:
            size = math.prod(mesh[axis] for axis in e.axes)
            amount = (e.full_bytes / e.element_bytes, wire_bytes(e.kind, e.full_bytes, size), e.num_arrays)
            labels[e.label].derived[e.kind, e.axes].add(*amount)
            rows.derived[e.kind, e.axes].add(*amount)
    for c in found:
        axes = active_axes(c.axes, mesh)
        if axes:
            amount = _amount_of(c, math.prod(mesh[axis] for axis in axes))
            labels[c.label].compiled[c.kind, axes].add(*amount)
            labels[c.label].windowed = labels[c.label].windowed or c.windowed
            rows.compiled[c.kind, axes].add(*amount)
            if _REPEATED in c.name:
                rows.repeated[c.kind, axes].add(*amount)
    return labels, rows


def _amount_of(found: Collective, size: int) -> tuple[float, float, int]:
    """(elements, bytes on the wire, arrays) of a collective over axes of ``size`` devices.

    One over axes that reach across slices is compiled as one inside of them and one between them: the latter adds its
    bytes, and the array is counted with the former.
    """
    group = found.group_size if 1 < found.group_size < size else size
    wire = wire_bytes(found.kind, found.total_bytes, group)
    if found.dcn and group < size:
        return 0.0, wire, 0
    return found.total_bytes * 8 / ELEMENT_BITS.get(found.dtype, 32), wire, found.trips * found.num_arrays


def _copied_elements(remarks: Iterable[str]) -> int:
    """Elements of the largest part of an array that the partitioner says it copied whole; 0 where none."""
    shapes = [match[1] for remark in remarks if (match := _COPIED.search(remark))]
    return max((math.prod(parse_shapes(shape)[0].dims) for shape in shapes), default=0)


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(one, other)


class _Table:
    """The rows while their differences find names. ``left`` is, per row, what is compiled and not derived so far.

    ``copied`` elements has the largest array that the partitioner copied whole.
    """

    def __init__(self, rows: _Sides, mesh: Mapping[str, int], copied: int) -> None:
        self.rows, self.mesh, self.copied = rows, mesh, copied
        self.taken: set[StepLabel | None] = set()
        self.named: dict[Key, float] = defaultdict(float)
        self.differences: list[Difference] = []
        self.left: dict[Key, Amount] = defaultdict(Amount)
        for sign, side in ((1, rows.compiled), (-1, rows.derived)):
            for key, amount in side.items():
                self.left[key].add(sign * amount.elements, sign * amount.wire, sign * amount.arrays)

    def is_even(self, key: Key) -> bool:
        """Whether the row needs no name any more."""
        return abs(self.left[key].wire) <= TOLERANCE / 4 * self.rows.derived[key].wire

    def take_label(self, label: StepLabel | None, sides: _Sides) -> None:
        """Name a step's difference in the rows that are not even, where it is there on both sides."""
        keys = {*sides.derived, *sides.compiled}
        if label in self.taken or all(self.is_even(key) for key in keys):
            return
        name = _name_of(label, sides)
        if name:
            self._name(name, str(label), keys, sides)

    def take_joined(self, key: Key, labels: Mapping[StepLabel | None, _Sides]) -> None:
        """Name together what several steps differ in where the compiler has combined them under one's label."""
        of_row = [
            (label, sides)
            for label, sides in labels.items()
            if {*sides.derived, *sides.compiled} == {key}
            and sides.derived.get(key, Amount()).arrays != sides.compiled.get(key, Amount()).arrays
        ]
        joined = _Sides()
        for _, sides in of_row:
            for one, other in ((joined.derived[key], sides.derived), (joined.compiled[key], sides.compiled)):
                amount = other.get(key, Amount())
                one.add(amount.elements, amount.wire, amount.arrays)
        derived, compiled = joined.derived[key], joined.compiled[key]
        if self.is_even(key) or derived.arrays != compiled.arrays or not _same(derived.elements, compiled.elements):
            return
        if len(of_row) > 1 and (name := _of_size(joined)):
            self.taken |= {label for label, _ in of_row}
            self._name(name, _words(key), (key,), joined)

    def _name(self, name: str, where: str, keys: Iterable[Key], sides: _Sides) -> None:
        for key in keys:
            more, less = sides.compiled.get(key, Amount()), sides.derived.get(key, Amount())
            self.named[key] += more.wire - less.wire
            self.left[key].add(less.elements - more.elements, less.wire - more.wire, less.arrays - more.arrays)
        derived, compiled = sides.total("derived").wire, sides.total("compiled").wire
        self.differences.append(Difference(name=name, where=where, derived_bytes=derived, compiled_bytes=compiled))

    def pair_rows(self) -> None:
        """Name what combined collectives carry without a label: a sum sent whole in place of a scattered one."""
        for key in list(self.left):
            kind, axes = key
            if kind != "reduce_scatter" or self.left[key].elements >= 0 or self.is_even(key):
                continue
            missing = -self.left[key].elements
            for other in self._whole_sums(axes):
                if _same(self.left[other].elements, missing):
                    self._pair(key, other)
                    break
        for key, left in list(self.left.items()):
            if left.wire > 0 and not self.is_even(key):
                again = self.rows.repeated[key].wire >= (1 - TOLERANCE) * left.wire
                if again or 0 < left.elements <= left.arrays * self.copied:
                    self._name_rest("repeated" if again else "involuntary rematerialisation", key, left)
            elif key[0] == "permute" and left.arrays < 0 and not self.is_even(key) and self._is_one_round(key, left):
                self._name_rest("dropped", key, left)

    def _is_one_round(self, key: Key, left: Amount) -> bool:
        """Whether what a row lacks are whole arrays of the size of its own, one of a ring's n - 1 rounds at most."""
        derived, compiled = self.rows.derived[key], self.rows.compiled[key]
        rounds = math.prod(self.mesh[axis] for axis in key[1]) - 1
        whole = _same(left.elements / left.arrays, derived.elements / derived.arrays)
        return whole and compiled.arrays > 0 and -left.arrays * rounds <= derived.arrays

    def _name_rest(self, name: str, key: Key, left: Amount) -> None:
        """Name all that is left of a row: compiled and not derived, or the other way round."""
        sides, sign = _Sides(), 1 if left.wire > 0 else -1
        side = sides.compiled if left.wire > 0 else sides.derived
        side[key].add(sign * left.elements, sign * left.wire, sign * left.arrays)
        self._name(name, _words(key), (key,), sides)

    def _whole_sums(self, axes: Axes) -> list[Key]:
        """Rows of all-reduces over the axes, or over them and those that replicas are then summed over."""
        return [(kind, over) for kind, over in self.left if kind == "all_reduce" and set(axes) <= set(over)]

    def _pair(self, scattered: Key, whole: Key) -> None:
        """A reduce-scatter that is compiled as an all-reduce; over more axes it has also summed the replicas."""
        sides = _Sides()
        left = self.left[scattered]
        sides.derived[scattered].add(-left.elements, -left.wire, -left.arrays)
        extra = self.left[whole]
        sides.compiled[whole].add(extra.elements, extra.wire, extra.arrays)
        keys = [scattered, whole]
        rest = tuple(axis for axis in whole[1] if axis not in scattered[1])
        replicas = self.left.get(("all_reduce", rest))
        if rest and replicas is not None and replicas.wire < 0:
            sides.derived["all_reduce", rest].add(-replicas.elements, -replicas.wire, -replicas.arrays)
            keys.append(("all_reduce", rest))
        self._name("full all-reduce", _words(scattered), keys, sides)

    def result(self) -> Comparison:
        rows = [
            Row(
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
        return Comparison(
            rows=tuple(sorted(rows, key=lambda row: -max(row.compiled_bytes, row.derived_bytes))),
            differences=tuple(sorted(self.differences, key=lambda one: -abs(one.extra_bytes))),
        )


def _words(key: Key) -> str:
    return f"{key[0]} over {','.join(key[1])}"


def _name_of(label: StepLabel | None, sides: _Sides) -> str:
    """What the difference of a step is called; empty where nothing of it is on both sides, or it is none of them."""
    if str(label) == OPTIMIZER:
        return "optimizer"
    if label is None or not sides.derived or not sides.compiled:
        return ""
    if sides.windowed:
        return "windowed matmul"
    derived, compiled = {kind for kind, _ in sides.derived}, {kind for kind, _ in sides.compiled}
    if derived == {"reduce_scatter"} and "all_reduce" in compiled:
        return "full all-reduce"
    if derived == {"all_reduce"} and "reduce_scatter" in compiled:
        return "scattered all-reduce"
    return _of_size(sides) if set(sides.derived) == set(sides.compiled) else ""


def _of_size(sides: _Sides) -> str:
    """A name where kinds and axes agree and bytes do not."""
    derived, compiled = sides.total("derived"), sides.total("compiled")
    if _same(derived.elements, compiled.elements):
        if _same(compiled.wire, 2 * derived.wire):
            return "float32"
        return "narrowed" if compiled.wire < derived.wire else ""
    if derived.arrays == compiled.arrays:
        return "padding" if derived.elements < compiled.elements < 1.5 * derived.elements else ""
    # of combined arrays only one has its label here: then they are not of the step's own size
    if not _same(compiled.elements / max(compiled.arrays, 1), derived.elements / max(derived.arrays, 1)):
        return ""
    if compiled.arrays > derived.arrays:
        return "repeated"
    # a sum that is missing is a fault, whatever else is like it
    return "shared" if {kind for kind, _ in sides.derived} == {"all_gather"} else ""
