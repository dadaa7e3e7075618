"""`meshwright systolic`: a product on a systolic array, cycle by cycle, with proof that it is right."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.calculators.chips.systolic import (
    MAX_CELL_UPDATES,
    Matrix,
    SystolicArray,
    SystolicCycles,
    simulate,
    systolic_cycles,
)
from meshwright.cli.output import say
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.core.units import format_flops, format_seconds
from meshwright.report.answer import Answer, Condition, Fact, Facts, Piece, Symbols, Table
from meshwright.report.arrays.systolic import REACH, BoundaryValue, SystolicFrame, systolic_figure
from meshwright.report.figure import save
from meshwright.spec.chip import chip, known

MAX_PANELS, MAX_FRAMES = 9, 200
"""Cycles of the one picture, and pictures of the folder."""


class Given(Options):
    shape: str | None = argument()
    num_inputs: Count = option("Rows of the input: the batch that streams by.", "--input")
    weights_shape: str | None = option(
        "Shape of the whole weight matrix, such as 512x256 [default: SHAPE].", "--weights"
    )
    on: str | None = option("A TPU: its MXU gives the shape where none is given, its clock the time.")
    seed: int = option("Seed of the integers.", default=0, needs={"png": "--png", "folder": "--frames"})
    png: Path | None = option("Draw a few cycles of each phase to this file (.png or .svg).", extra="draw")
    folder: Path | None = option("Draw every cycle into this folder.", "--frames", extra="draw")


@verb(Given)
def command(given: Given) -> Answer:
    """Multiply on an array of SHAPE cells (rows x columns, such as 8x8): cycles, utilisation, bubble."""
    rows, cols = array_shape = _array_shape(given.shape, given.on)
    depth, width = _shape(given.weights_shape, "--weights") if given.weights_shape else array_shape
    cycles = systolic_cycles(given.num_inputs, depth, width, rows=rows, cols=cols)
    facts: Facts = {
        "rows": rows,
        "cols": cols,
        "inputs": given.num_inputs,
        "weights": [depth, width],
        **msgspec.structs.asdict(cycles),
        "bubble_share": 1 - cycles.useful_share,
        "simulated_cycles": None,
        "product_is_right": None,
        "busy_cells": None,
        **_speed(cycles, array_shape, given.on),
    }
    if max(cycles.total * rows * cols, given.num_inputs * depth * width) <= MAX_CELL_UPDATES:
        inputs, weights = _matrices(given, depth, width)
        product, busy_cells = simulate(inputs, weights, rows=rows, cols=cols)
        facts |= {"simulated_cycles": len(busy_cells), "busy_cells": busy_cells}
        facts["product_is_right"] = bool((product == inputs @ weights).all())
    if given.png or given.folder:
        facts["files"] = _draw(given, _matrices(given, depth, width, low=1), cycles, array_shape)
    facts_without_busy = {name: value for name, value in facts.items() if name != "busy_cells"}
    return Answer(facts, _text(facts, cycles), raw=[[facts_without_busy]])


def _array_shape(shape: str | None, on: str | None) -> tuple[int, int]:
    if shape is not None:
        return _shape(shape, "SHAPE")
    if on is None:
        raise InputError("an array needs a shape. Give one such as 8x8, or a TPU with --on v5e.")
    mxu_dim = int(known(chip(on), "mxu_dim"))
    return mxu_dim, mxu_dim


def _shape(text: str, what: str) -> tuple[int, int]:
    shape_match = re.fullmatch(r"(\d{1,7})x(\d{1,7})", text.strip())
    if shape_match is None or "0" in shape_match.groups():
        raise InputError(f"{what} {text!r} is not rows x columns. Write for example 8x8.")
    return int(shape_match[1]), int(shape_match[2])


def _matrices(given: Given, depth: int, width: int, *, low: int = -9) -> tuple[Matrix, Matrix]:
    rng = np.random.default_rng(given.seed)
    return rng.integers(low, 10, (given.num_inputs, depth)), rng.integers(low, 10, (depth, width))


def _speed(cycles: SystolicCycles, shape: tuple[int, int], chip_name: str | None) -> Facts:
    """Returns seconds and FLOP/s of one array at a chip's clock; None if no clock is published."""
    one_chip = None if chip_name is None else chip(chip_name)
    clock_hz = one_chip and one_chip.clock_hz
    peak_flops = clock_hz and 2 * shape[0] * shape[1] * clock_hz
    return {
        "chip": one_chip and one_chip.name,
        "time_s": clock_hz and cycles.total / clock_hz,
        "peak_flops": peak_flops,
        "flops_per_s": peak_flops and peak_flops * cycles.useful_share,
    }


def _text(facts: Facts, cycles: SystolicCycles) -> Iterator[Piece]:
    rows, cols, num_tiles = facts["rows"], facts["cols"], cycles.num_tiles
    depth, width = facts["weights"]
    tiles_text = f", in {num_tiles:,} tiles" if num_tiles > 1 else ""
    yield Table(
        ["phase", "cycles", "what happens"],
        [
            ["load", cycles.load, "weights move down, until the first column is full"],
            ["fill", cycles.fill, "inputs enter, until the far corner works"],
            ["stream", cycles.stream, "inputs enter while the far corner works"],
            ["drain", cycles.drain, "the last inputs reach the far corner"],
            ["total", cycles.total, f"M + (t - 1) max(B, M) + B + M + N - 2, t = {num_tiles:,}"],
        ],
        f"[{facts['inputs']:,}, {depth:,}] x [{depth:,}, {width:,}] on {rows} x {cols} cells{tiles_text}",
    )
    steady_text = (
        f"bubble {facts['bubble_share']:.1%}; {cycles.steady_share:.1%} used with many tiles, which load meanwhile"
    )
    yield Fact("utilisation", f"{cycles.useful_share:.1%} of cells x cycles, {steady_text}")
    if facts["time_s"] is not None:
        rate_text = f"{format_flops(facts['flops_per_s'])} of {format_flops(facts['peak_flops'])}"
        yield Fact(f"one MXU of {facts['chip']}", f"{format_seconds(facts['time_s'])}, {rate_text}")
    elif facts["chip"]:
        yield Fact("time", f"not known: no clock of {facts['chip']} is published (clock_hz)")
    if facts["product_is_right"] is None:
        yield Condition("not proven: too large to run cell by cell here")
    else:
        how = "equal to" if facts["product_is_right"] else "NOT equal to"
        yield Condition(
            f"proof: {facts['simulated_cycles']:,} cycles on integers gave a result {how} the matrix product"
        )
    yield Symbols({"M": "rows of cells", "N": "columns of cells", "B": "rows of the input", "t": "tiles"})


# -- pictures -------------------------------------------------------------------------------------------


def _draw(given: Given, matrices: tuple[Matrix, Matrix], cycles: SystolicCycles, shape: tuple[int, int]) -> list[str]:
    """Draws a few cycles in one picture, or every cycle in a folder, or both; returns the files."""
    rows, cols = shape
    if given.folder and cycles.total > MAX_FRAMES:
        raise InputError(f"{cycles.total:,} cycles are too many pictures. Draw at most {MAX_FRAMES}, or use --png.")
    title = f"{rows} x {cols} systolic array, {given.num_inputs} inputs"
    written_paths = []
    if given.png:
        chosen_frames = frames(*matrices, rows=rows, cols=cols, cycles=telling_cycles(cycles))
        cycles_text = f"{cycles.total} cycles in all, {cycles.useful_share:.0%} of cells x cycles multiply"
        written_paths.append(save(systolic_figure(chosen_frames, title=title, subtitle=cycles_text), given.png))
    if given.folder:
        for frame in frames(*matrices, rows=rows, cols=cols):
            figure = systolic_figure([frame], title=title)
            written_paths.append(save(figure, given.folder / f"cycle_{frame.cycle + 1:03}.png"))
    say(f"wrote {written_paths[0]}" + (f" and {len(written_paths) - 1} more" if len(written_paths) > 1 else ""))
    return [str(path) for path in written_paths]


def telling_cycles(counted: SystolicCycles) -> tuple[int, ...]:
    """Returns up to ``MAX_PANELS`` cycles that show each phase: weights, first product, fronts, stream, drain."""
    load, last = counted.load, counted.total - 1
    entered = load + counted.fill + counted.stream
    far = load + counted.drain
    cycles = [load, far, last, load // 2, load + counted.fill // 2, entered + counted.drain // 2, (entered + far) // 2]
    even_cycles = [round(last * part / MAX_PANELS) for part in range(1, MAX_PANELS)]
    ordered_cycles = dict.fromkeys(min(last, cycle) for cycle in (*cycles, load - 1, *even_cycles, *range(last)))
    return tuple(sorted(list(ordered_cycles)[:MAX_PANELS]))


def frames(
    inputs: Matrix, weights: Matrix, *, rows: int, cols: int, cycles: Collection[int] | None = None
) -> tuple[SystolicFrame, ...]:
    """Returns the array in these cycles, or in all of them; cycle 0 is the first in which a weight enters."""
    array = SystolicArray(inputs, weights, rows=rows, cols=cols)
    drawn_frames: list[SystolicFrame] = []
    results_left: list[tuple[int, int, int]] = []
    for cycle in range(array.last_cycle):
        array.step()
        if cycles is None or cycle in cycles:
            is_busy = array.tag >= 0
            # a cell has had a weight once the diagonal front of the weights has passed it
            has_weight = is_busy | (np.add.outer(np.arange(rows), np.arange(cols)) <= cycle)
            near_cycles = range(cycle + 1, cycle + REACH + 1)
            drawn_frames.append(
                SystolicFrame(
                    cycle=cycle,
                    weights=_cells(np.where(is_busy, array.held, array.moving), has_weight),
                    activations=_cells(array.activation, is_busy),
                    inputs=_outside(list(map(array.inputs_at, near_cycles))),
                    coming=_outside(list(map(array.weights_at, near_cycles))),
                    results=tuple(
                        BoundaryValue(lane=col, distance=cycle - exit_cycle, value=value)
                        for exit_cycle, col, value in results_left
                        if cycle - exit_cycle <= REACH
                    ),
                )
            )
        results_left += [(cycle, col, int(array.sums[-1, col])) for col in range(cols) if array.tag[-1, col] >= 0]
    return tuple(drawn_frames)


def _cells(values: Matrix, shown_cells: NDArray[np.bool_]) -> tuple[tuple[int | None, ...], ...]:
    return tuple(
        tuple(int(value) if is_shown else None for value, is_shown in zip(row, shown_row, strict=True))
        for row, shown_row in zip(values, shown_cells, strict=True)
    )


def _outside(near: list[tuple[Matrix, Matrix]]) -> tuple[BoundaryValue, ...]:
    """Returns the values that wait at an edge, lane by lane; ``near`` has (tag, -1 for none; value) by distance."""
    return tuple(
        BoundaryValue(lane=lane, distance=distance, value=int(values[lane]))
        for lane in range(len(near[0][0]))
        for distance, (tags, values) in enumerate(near, start=1)
        if tags[lane] >= 0
    )
