"""Names the differences between compiled and derived collectives, and counts what no name explains.

A compiled collective is matched to its step by label. A collective that the compiler has combined from several has one
of their labels or none: it is matched by the number of elements that it moves over the same axes.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping

from meshwright.algebra.sizes import LANES
from meshwright.core.labels import StepLabel
from meshwright.hlo.collectives import CompiledCollective
from meshwright.hlo.shapes import parse_shapes
from meshwright.verify.expected import Expected
from meshwright.verify.traffic import (
    MOST_PADDING,
    NOTHING,
    TOLERANCE,
    Amount,
    Sides,
    TrafficComparison,
    TrafficKey,
    TrafficTable,
    same,
)

CLASSES: dict[str, str] = {
    "windowed matmul": "gathers and scatters cut into permutes that overlap with the tiles of a product",
    "full all-reduce": "reduce-scatters compiled as all-reduces, of which a device keeps its shard: twice the bytes",
    "scattered all-reduce": "all-reduces compiled as a reduce-scatter, and an all-gather where the sum is used",
    "gathered exchange": "all-to-alls compiled as all-gathers, for a platform without ragged all-to-alls",
    "joined": "two all-reduces over different axes, compiled as one over all these axes",
    "float32": "sent in float32 where elements of two bytes are derived",
    "padding": "rows or columns added to fill tiles or to make equal parts",
    "repeated": "run again, to keep less in memory",
    "shared": "run once for several uses, or for several contributions to one gradient",
    "dropped": "ring sends that are not compiled: nothing uses the block any more, or it has arrived already",
    "involuntary rematerialisation": "arrays that the partitioner replicates to reshard them",
}
"""Name of a difference -> its explanation."""

_COPIED = re.compile(r"for HLO operation %\S+ = (\w+\[[0-9,]*\])")
"""Shape of a shard of an array that the partitioner reports as replicated."""


def compare_traffic(
    expected: Iterable[Expected],
    found: Iterable[CompiledCollective],
    mesh: Mapping[str, int],
    *,
    remarks: Iterable[str] = (),
) -> TrafficComparison:
    """Compares derived with compiled collectives, and names every difference that matches one of `CLASSES`.

    ``remarks`` are the partitioner's messages about arrays that it replicated.
    """
    copied_shapes = [match[1] for remark in remarks if (match := _COPIED.search(remark))]
    max_elements = max((math.prod(parse_shapes(shape)[0].dims) for shape in copied_shapes), default=0)
    table = TrafficTable(expected, found, mesh, max_elements * math.prod(mesh.values()))
    for rule in RULES:
        rule(table)
    return table.result()


# -- of steps, by their labels -----------------------------------------------------------------------------


def _tied_weights(table: TrafficTable) -> None:
    """Names the traffic of a tied weight that embedding or head skips because the other block sends it."""
    for label, sides in table.labels.items():
        if label is None or sides.compiled or label.block.startswith("layer"):
            continue
        sides_of_peers = [
            peer_sides
            for peer, peer_sides in table.labels.items()
            if peer is not None and (peer.result, peer.op) == (label.result, label.op) and peer.block != label.block
        ]
        if any(peer_sides.derived == sides.derived and peer_sides.compiled for peer_sides in sides_of_peers):
            table.taken.add(label)
            table.name("shared", str(label), sides.derived, {})


def _joined_steps(table: TrafficTable) -> None:
    """Names the total difference of several steps of one row whose collectives the compiler combined."""
    for key in table.rows.derived:
        steps_of_row = [
            (label, sides)
            for label, sides in table.labels.items()
            if {*sides.derived, *sides.compiled} == {key}
            and sides.derived.get(key, NOTHING).arrays != sides.compiled.get(key, NOTHING).arrays
        ]
        derived = sum((sides.derived.get(key, NOTHING) for _, sides in steps_of_row), NOTHING)
        compiled = sum((sides.compiled.get(key, NOTHING) for _, sides in steps_of_row), NOTHING)
        if table.is_even(key) or derived.arrays != compiled.arrays or not same(derived.elements, compiled.elements):
            continue
        if len(steps_of_row) > 1 and (name := _of_size(derived, compiled, {key[0]})):
            table.taken |= {label for label, _ in steps_of_row}
            table.name(name, _words(key), {key: derived}, {key: compiled})


def _labelled_steps(table: TrafficTable) -> None:
    for label, sides in list(table.labels.items()):
        _name_unlabelled(table, label, sides)
        _name_label(table, label, sides)


def _name_unlabelled(table: TrafficTable, label: StepLabel | None, sides: Sides) -> None:
    """Names a step's reduce-scatter that was compiled as an unlabelled all-reduce of as many elements."""
    if label is None or sides.compiled or len(sides.derived) != 1:
        return
    ((kind, axes), scatter), unlabelled_amounts = *sides.derived.items(), table.labels[None].compiled
    full_sum = unlabelled_amounts.get(("all_reduce", axes), NOTHING)
    if kind == "reduce_scatter" and same(full_sum.elements, scatter.elements) and not table.is_even((kind, axes)):
        table.taken.add(label)
        table.name("full all-reduce", str(label), sides.derived, {("all_reduce", axes): full_sum})
        unlabelled_amounts.pop(("all_reduce", axes))


def _name_label(table: TrafficTable, label: StepLabel | None, sides: Sides) -> None:
    """Names the difference of one label's traffic; skips labels already named and rows that already balance."""
    if label in table.taken or all(table.is_even(key) for key in (*sides.derived, *sides.compiled)):
        return
    max_pad = table.most_padding[label]
    if name := _name_of(label, sides, max_pad):
        table.name(name, str(label), sides.derived, sides.compiled)
        return
    for key in sides.derived.keys() & sides.compiled.keys() if label else ():
        # one leg of a collective over several physical axes
        derived, compiled = {key: sides.derived[key]}, {key: sides.compiled[key]}
        if not table.is_even(key) and (name := _of_size(derived[key], compiled[key], {key[0]}, most_padding=max_pad)):
            table.name(name, str(label), derived, compiled)


# -- of rows, whatever their labels ------------------------------------------------------------------------


def _scattered_rows(table: TrafficTable) -> None:
    """Names reduce-scatters that were compiled as all-reduces of as many elements, row by row."""
    for key in list(table.left):
        kind, axes = key
        if kind != "reduce_scatter" or table.left[key].elements >= 0 or table.is_even(key):
            continue
        # all-reduces over the same axes, or also over those that sum the replicas afterwards
        sum_keys = [sum_key for sum_key in table.left if sum_key[0] == "all_reduce" and set(axes) <= set(sum_key[1])]
        equal_keys = (sum_key for sum_key in sum_keys if same(table.left[sum_key].elements, -table.left[key].elements))
        if partner_key := next(equal_keys, None):
            _name_pair(table, key, partner_key)


def _summed_rows(table: TrafficTable) -> None:
    for key in [key for key in table.left if key[0] == "all_reduce"]:
        _name_sums(table, key)


def _name_sums(table: TrafficTable, key: TrafficKey) -> None:
    """Names a row's missing all-reduces that were compiled as a reduce-scatter and an all-gather, or combined with the
    all-reduce over further axes that follows."""
    amount = table.left[key]
    if amount.wire >= 0 or table.is_even(key):
        return
    part_keys = [(kind, key[1]) for kind in ("reduce_scatter", "all_gather")]
    if all(table.left.get(part_key, NOTHING).wire > 0 for part_key in part_keys):
        amount_by_part = {part_key: table.left[part_key] for part_key in part_keys}
        # parts of small arrays are padded
        if (sum(amount_by_part.values(), NOTHING) + amount).wire <= MOST_PADDING * -amount.wire:
            table.name("scattered all-reduce", _words(key), {key: -amount}, amount_by_part)
        return
    for joint in [row for row in table.left if row[0] == "all_reduce" and set(key[1]) < set(row[1])]:
        rest = "all_reduce", tuple(axis for axis in joint[1] if axis not in key[1])
        is_equal = all(same(-table.left.get(row, NOTHING).elements, table.left[joint].elements) for row in (key, rest))
        if is_equal and table.left[joint].wire > 0:
            table.name(
                "joined", _words(joint), {row: -table.left[row] for row in (key, rest)}, {joint: table.left[joint]}
            )
            return


def _name_pair(table: TrafficTable, scatter_key: TrafficKey, sum_key: TrafficKey) -> None:
    """Names a reduce-scatter compiled as an all-reduce, which may also include the following sum over replicas."""
    derived_amounts = {scatter_key: -table.left[scatter_key]}
    rest_key = "all_reduce", tuple(axis for axis in sum_key[1] if axis not in scatter_key[1])
    replica_sum = table.left.get(rest_key, NOTHING)
    if rest_key[1] and replica_sum.wire < 0:
        derived_amounts[rest_key] = -replica_sum
    table.name("full all-reduce", _words(scatter_key), derived_amounts, {sum_key: table.left[sum_key]})


def _left_rows(table: TrafficTable) -> None:
    """Names the rest of rows: surplus (repeated, replicated, padded) and missing traffic (shared, dropped)."""
    for key, amount in list(table.left.items()):
        if table.is_even(key):
            continue
        if amount.wire > 0:
            is_repeat = table.repeated_bytes[key] >= (1 - TOLERANCE) * amount.wire
            if is_repeat or 0 < amount.elements <= amount.arrays * table.copied:
                name = "repeated" if is_repeat else "involuntary rematerialisation"
                table.name(name, _words(key), {}, {key: amount})
        elif key[0] == "permute" and amount.arrays < 0 and _is_one_round(table, key, amount):
            table.name("dropped", _words(key), {key: -amount}, {})
        elif _is_of_a_tied_weight(table, key, amount):
            table.name("shared", _words(key), {key: -amount}, {})
        # as many arrays as derived, of up to half as many more elements
        amount, most_elements = table.left[key], MOST_PADDING * table.rows.derived[key].elements
        if amount.arrays == 0 and 0 < amount.elements < most_elements and not table.is_even(key):
            table.name("padding", _words(key), {}, {key: amount})


def _is_of_a_tied_weight(table: TrafficTable, key: TrafficKey, left_amount: Amount) -> bool:
    """True if a row's missing traffic equals the derived traffic of an array that embedding and head both gather or
    sum."""
    amount_of = {
        label: sides.derived[key]
        for label, sides in table.labels.items()
        if label is not None and key in sides.derived and not label.block.startswith("layer")
    }
    equal_labels = [label for label, amount in amount_of.items() if same(amount.elements, -left_amount.elements)]
    blocks = {(label.result, label.block) for label in equal_labels if amount_of[label].arrays == -left_amount.arrays}
    return len(blocks) > len({result for result, _ in blocks})


def _is_one_round(table: TrafficTable, key: TrafficKey, left_amount: Amount) -> bool:
    """True if the missing arrays are whole, and at most one of the n - 1 sends of each ring over n devices."""
    derived_amount, compiled_amount = table.rows.derived[key], table.rows.compiled[key]
    num_rounds = math.prod(table.mesh[axis] for axis in key[1]) - 1
    is_whole = same(left_amount.elements / left_amount.arrays, derived_amount.elements / derived_amount.arrays)
    return is_whole and compiled_amount.arrays > 0 and -left_amount.arrays * num_rounds <= derived_amount.arrays


RULES: tuple[Callable[[TrafficTable], None], ...] = (
    _tied_weights,
    _joined_steps,
    _labelled_steps,
    _scattered_rows,
    _summed_rows,
    _left_rows,
)
"""Rules that name differences, in this order: each sees only what the earlier ones left unnamed."""


# -- names -------------------------------------------------------------------------------------------------


def _words(key: TrafficKey) -> str:
    return f"{key[0]} over {','.join(key[1])}"


def _name_of(label: StepLabel | None, sides: Sides, most_padding: float) -> str:
    """Returns the name of a step's difference; empty if the derived or compiled side is missing or no name matches."""
    if label is None or not sides.derived or not sides.compiled:
        return ""
    if sides.windowed:
        return "windowed matmul"
    kinds, sent_kinds = {kind for kind, _ in sides.derived}, {kind for kind, _ in sides.compiled}
    if kinds == {"reduce_scatter"} and "all_reduce" in sent_kinds:
        return "full all-reduce"
    if kinds == {"all_reduce"} and "reduce_scatter" in sent_kinds:
        return "scattered all-reduce"
    if kinds == {"all_to_all"} and sent_kinds == {"all_gather"}:
        return "gathered exchange"
    if set(sides.derived) != set(sides.compiled):
        return ""
    return _of_size(
        sum(sides.derived.values(), NOTHING), sum(sides.compiled.values(), NOTHING), kinds, most_padding=most_padding
    )


def _of_size(derived: Amount, compiled: Amount, kinds: set[str], *, most_padding: float = MOST_PADDING) -> str:
    """Returns the name of a difference in size between collectives of equal kind and axes; empty if none matches."""
    if same(derived.elements, compiled.elements):
        return "float32" if same(compiled.wire, 2 * derived.wire) else ""
    if derived.arrays == compiled.arrays:
        # rows of one number, such as weights of slots, are sent as rows that fill the lanes
        is_lane_padded = same(compiled.elements, LANES * derived.elements)
        extra_elements = compiled.elements - derived.elements
        return "padding" if is_lane_padded or 0 < extra_elements < most_padding * derived.elements else ""
    # combined arrays carry one label: their mean size then differs from the step's
    if not same(compiled.elements / max(compiled.arrays, 1), derived.elements / max(derived.arrays, 1)):
        return ""
    if compiled.arrays > derived.arrays:
        return "repeated"
    # a missing sum is a fault, even if an equal one is present
    return "shared" if kinds == {"all_gather"} else ""
