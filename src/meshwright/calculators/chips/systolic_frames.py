"""Snapshots of a systolic array: what every cell holds in a cycle, and what is about to enter or has just left."""

from collections.abc import Collection

from meshwright.calculators.chips.systolic import Matrix, SystolicArray, SystolicCycles
from meshwright.report.arrays.systolic import REACH, BoundaryValue, SystolicFrame


def telling_cycles(counted: SystolicCycles, *, count: int = 9) -> tuple[int, ...]:
    """So many cycles, or all, that show each phase: weights entering, the first product, fronts, stream, drain."""
    load, last = counted.load, counted.total - 1
    entered = load + counted.fill + counted.stream
    far = load + counted.drain
    wanted = [load, far, last, load // 2, load + counted.fill // 2, entered + counted.drain // 2, (entered + far) // 2]
    evenly = [round(last * part / count) for part in range(1, count)]
    chosen = dict.fromkeys(min(last, at) for at in (*wanted, load - 1, *evenly, *range(last)))
    return tuple(sorted(list(chosen)[:count]))


def frames(
    inputs: Matrix, weights: Matrix, *, rows: int, cols: int, cycles: Collection[int] | None = None
) -> tuple[SystolicFrame, ...]:
    """The array in these cycles, or in all of them; cycle 0 is the first in which a weight enters."""
    array = SystolicArray(inputs, weights, rows=rows, cols=cols)
    found: list[SystolicFrame] = []
    left: list[tuple[int, int, int]] = []
    for cycle in range(array.last_cycle):
        array.step()
        if cycles is None or cycle in cycles:
            found.append(_frame(array, cycle, left))
        left += [(cycle, col, int(array.sums[-1, col])) for col in range(cols) if array.tag[-1, col] >= 0]
    return tuple(found)


def _frame(array: SystolicArray, cycle: int, left: list[tuple[int, int, int]]) -> SystolicFrame:
    inside = [(row, col) for row in range(array.rows) for col in range(array.cols)]
    weight = {at: _weight(array, cycle, *at) for at in inside}
    busy = {at: int(array.activation[at]) if array.tag[at] >= 0 else None for at in inside}
    return SystolicFrame(
        cycle=cycle,
        weights=tuple(tuple(weight[row, col] for col in range(array.cols)) for row in range(array.rows)),
        activations=tuple(tuple(busy[row, col] for col in range(array.cols)) for row in range(array.rows)),
        inputs=tuple(_waiting(array, cycle)),
        coming=tuple(_coming(array, cycle)),
        results=tuple(
            BoundaryValue(lane=col, distance=cycle - at, value=value) for at, col, value in left if cycle - at <= REACH
        ),
    )


def _weight(array: SystolicArray, cycle: int, row: int, col: int) -> int | None:
    """The weight that a cell works with, or the one that lies in it; None before the first has come by."""
    if array.tag[row, col] >= 0:
        return int(array.held[row, col])
    return int(array.moving[row, col]) if cycle >= row + col else None


def _waiting(array: SystolicArray, cycle: int) -> list[BoundaryValue]:
    found = []
    for row in range(array.rows):
        for distance in range(1, REACH + 1):
            value = array.input_at(cycle + distance, row)
            if value is not None:
                found.append(BoundaryValue(lane=row, distance=distance, value=value))
    return found


def _coming(array: SystolicArray, cycle: int) -> list[BoundaryValue]:
    found = []
    for col in range(array.cols):
        for distance in range(1, REACH + 1):
            value = array.weight_at(cycle + distance, col)
            if value is not None:
                found.append(BoundaryValue(lane=col, distance=distance, value=value))
    return found
