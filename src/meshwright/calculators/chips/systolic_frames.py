"""Snapshots of a systolic array: the values in every cell in a cycle, and those about to enter or just out."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from meshwright.calculators.chips.systolic import Matrix, SystolicArray, SystolicCycles
from meshwright.report.arrays.systolic import REACH, BoundaryValue, SystolicFrame

MAX_FRAMES = 9


def telling_cycles(counted: SystolicCycles) -> tuple[int, ...]:
    """Returns up to ``MAX_FRAMES`` cycles that show each phase: weights, first product, fronts, stream, drain."""
    load, last = counted.load, counted.total - 1
    entered = load + counted.fill + counted.stream
    far = load + counted.drain
    wanted = [load, far, last, load // 2, load + counted.fill // 2, entered + counted.drain // 2, (entered + far) // 2]
    evenly = [round(last * part / MAX_FRAMES) for part in range(1, MAX_FRAMES)]
    chosen = dict.fromkeys(min(last, at) for at in (*wanted, load - 1, *evenly, *range(last)))
    return tuple(sorted(list(chosen)[:MAX_FRAMES]))


def frames(
    inputs: Matrix, weights: Matrix, *, rows: int, cols: int, cycles: Collection[int] | None = None
) -> tuple[SystolicFrame, ...]:
    """Returns the array in these cycles, or in all of them; cycle 0 is the first in which a weight enters."""
    array = SystolicArray(inputs, weights, rows=rows, cols=cols)
    found: list[SystolicFrame] = []
    left: list[tuple[int, int, int]] = []
    for cycle in range(array.last_cycle):
        array.step()
        if cycles is None or cycle in cycles:
            busy = array.tag >= 0
            # a cell has had a weight once the diagonal front of the weights has passed it
            arrived = busy | (np.add.outer(np.arange(rows), np.arange(cols)) <= cycle)
            near = range(cycle + 1, cycle + REACH + 1)
            found.append(
                SystolicFrame(
                    cycle=cycle,
                    weights=_cells(np.where(busy, array.held, array.moving), arrived),
                    activations=_cells(array.activation, busy),
                    inputs=_outside(list(map(array.inputs_at, near))),
                    coming=_outside(list(map(array.weights_at, near))),
                    results=tuple(
                        BoundaryValue(lane=col, distance=cycle - at, value=value)
                        for at, col, value in left
                        if cycle - at <= REACH
                    ),
                )
            )
        left += [(cycle, col, int(array.sums[-1, col])) for col in range(cols) if array.tag[-1, col] >= 0]
    return tuple(found)


def _cells(values: Matrix, shown: NDArray[np.bool_]) -> tuple[tuple[int | None, ...], ...]:
    return tuple(
        tuple(int(value) if here else None for value, here in zip(row, there, strict=True))
        for row, there in zip(values, shown, strict=True)
    )


def _outside(near: list[tuple[Matrix, Matrix]]) -> tuple[BoundaryValue, ...]:
    """Returns the values that wait at an edge, lane by lane; ``near`` has (tag, -1 for none; value) by distance."""
    return tuple(
        BoundaryValue(lane=lane, distance=distance, value=int(values[lane]))
        for lane in range(len(near[0][0]))
        for distance, (there, values) in enumerate(near, start=1)
        if there[lane] >= 0
    )
