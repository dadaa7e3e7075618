"""`meshwright stream`: a tiled product or flash attention step by step: bytes moved, FLOPs, and what binds.

Sources: How to Scale Your Model, sections 1 and 2; Dao, FlashAttention-2 (2023). docs/flash.md derives the loops.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.calculators.chips.stream import LoopName, TiledArray, TiledLoop, tiled_loop, untiled_attention
from meshwright.cli.output import four_digits
from meshwright.cli.verb import SEQ, Count, Options, argument, option, verb
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import counted, format_bytes, format_flops, format_seconds
from meshwright.cost.formulas.roofline import Work, channel_rate, chip_roofline, critical_intensity
from meshwright.report.answer import Answer, Condition, Fact, Facts, Piece, Table, TableColumns
from meshwright.report.arrays.canvas import shown
from meshwright.report.arrays.stream import MOST_A_SIDE, StreamFrame, stream_figure
from meshwright.report.roofline import RooflinePoint, roofline_figure
from meshwright.spec.chip import Chip, known, peak

BLOCKS = tuple(2**power for power in range(6, 11))
ROWS = 17
"""Steps that are listed: the first ones and the last two."""
ROWS_SHOWN = 10
SUM = "accumulating"
FLOPS = partial(format_flops, unit="FLOPs")


class Given(Options):
    loop: LoopName = argument()
    seq_len: Count = SEQ
    block: Count | None = option(
        "Rows and columns of a tile [default: 128; for --png a 16th of --seq if that is more]."
    )
    width: Count | None = option("Head dim of flash [default: 128]; D and F of matmul [default: --seq].")
    on: Chip = option("A TPU of the catalogue, such as v5e.")
    causal: bool = option("Leave out tiles that no query sees.")
    png: Path | None = option("Draw the first and last steps to this file (.png or .svg).")
    roofline: Path | None = option("Draw the tiles' sizes on the chip's roofline.")


@verb(Given)
def command(given: Given) -> Answer:
    """Stream the tiles of one loop through VMEM: matmul (x[T,D] w[D,F]), flash or flash-backward (one head, bf16)."""
    chip, name, vmem_bytes = given.on, given.loop, known(given.on, "vmem_bytes")
    if name == "matmul" and given.causal:
        raise InputError("--causal: a product leaves out no tile. Use it with flash or flash-backward.")
    block = given.block or max(128, given.seq_len // MOST_A_SIDE if given.png else 0)
    sizes = {"seq": given.seq_len, "width": given.width or (given.seq_len if name == "matmul" else 128)}
    loop = tiled_loop(name, **sizes, block=block, causal=given.causal)
    loops = {block: loop}
    if loop.vmem_bytes > vmem_bytes:
        needed_text, room_text = format_bytes(loop.vmem_bytes), f"{chip.name} has {format_bytes(vmem_bytes)}"
        raise CannotRunError(f"tiles of {block} need {needed_text} of VMEM, {room_text}. Use a smaller --block.")
    for size in BLOCKS:
        with suppress(InputError):
            loops[size] = tiled_loop(name, **sizes, block=size, causal=given.causal)
    facts = {
        **{"loop": name, "chip": chip.name, **sizes, "causal": given.causal, "num_steps": loop.num_steps},
        "critical_intensity": critical_intensity(peak(chip, "bf16"), channel_rate(chip, "hbm")),
        **_totals(loop, block, chip),
        "arrays_bytes": sum(math.prod(array.shape) * array.itemsize for array in (*loop.operands, *loop.results)),
        "untiled": None if name == "matmul" else _bounds(*untiled_attention(name, **sizes), chip),
        "steps": _steps(loop, chip, shown(loop.num_steps, ROWS, 2)),
        "blocks": [_totals(each, size, chip) for size, each in sorted(loops.items()) if each.vmem_bytes <= vmem_bytes],
    }
    tiles_text = f"tiles of {block}{', causal' * given.causal}"
    title = f"{name} of {given.seq_len:,} x {sizes['width']:,} in bf16, {tiles_text}, on {chip.name}"
    pictures = {given.png: lambda: _figure(loop, chip, title), given.roofline: lambda: _roofline(facts, chip)}
    return Answer(facts, _text(facts, title), pictures, [facts["steps"], facts["blocks"]])


def _bounds(num_bytes: int, flops: int, chip: Chip) -> Facts:
    line = chip_roofline(Work(flops=flops, num_bytes=num_bytes), chip, dtype="bf16")
    bounds = {"intensity": line.work.intensity, "math_s": line.math_s, "transfer_s": line.transfer_s}
    return {"hbm_bytes": num_bytes, "flops": flops, **bounds, "bound_by": line.bound_by}


def _totals(loop: TiledLoop, block: int, chip: Chip) -> Facts:
    end_s, _ = loop.times(peak(chip, "bf16"), channel_rate(chip, "hbm"))
    moved_bytes = int(loop.moved_bytes((*loop.operands, *loop.results)).sum())
    bounds = _bounds(moved_bytes, loop.flops_per_step * loop.num_steps, chip)
    return {"block": block, **bounds, "vmem_bytes": loop.vmem_bytes, "time_s": float(end_s[-1])}


def _steps(loop: TiledLoop, chip: Chip, step_indices: Iterable[int | None]) -> list[Facts]:
    """Returns the steps with these numbers: the tiles that each moves, and the totals when it finishes."""
    end_s, is_compute_bound = loop.times(peak(chip, "bf16"), channel_rate(chip, "hbm"))
    moved_bytes = np.cumsum(loop.moved_bytes((*loop.operands, *loop.results)))
    return [
        {
            "step": step + 1,
            "fetched": loop.titles(loop.operands, step, moving=True),
            "written": loop.titles(loop.results, step, moving=True),
            "hbm_bytes": int(moved_bytes[step]),
            "flops": loop.flops_per_step * (step + 1),
            "end_s": float(end_s[step]),
            "bound_by": "compute" if is_compute_bound[step] else "hbm",
        }
        for step in step_indices
        if step is not None
    ]


def _text(facts: Facts, title: str) -> Iterator[Piece]:
    yield f"{title}: {counted(facts['num_steps'], 'step')}"
    total, copies, compute = (format_seconds(facts[name]) for name in ("time_s", "transfer_s", "math_s"))
    yield Fact("time", f"{total}, bound by {facts['bound_by']}: copies {copies}, products {compute}")
    moved_text, least_text = format_bytes(facts["hbm_bytes"]), format_bytes(facts["arrays_bytes"])
    yield Fact("HBM", f"{moved_text} moved; {least_text} if every array were moved once")
    if (untiled := facts["untiled"]) is not None:
        least_text = format_seconds(max(untiled["math_s"], untiled["transfer_s"]))
        hbm_text = f"{format_bytes(untiled['hbm_bytes'])}, {untiled['intensity']:.3g} FLOPs/byte, at least {least_text}"
        yield Fact("without tiles", f"{hbm_text}: scores in fp32 go through HBM")
    yield Fact("VMEM", f"{format_bytes(facts['vmem_bytes'])}: two buffers of each tile, and the accumulators")
    bytes_column, flops_column = ("hbm_bytes", format_bytes), ("flops", FLOPS)
    columns: TableColumns = {"tile": "block", "HBM": bytes_column, "FLOPs": flops_column, "FLOPs/byte": "intensity"}
    times: TableColumns = {"VMEM": "vmem_bytes", "time": "time_s", "bound by": "bound_by"}
    critical_text = four_digits(facts["critical_intensity"])
    yield Table.of(facts["blocks"], {**columns, **times}, f"By tile; compute-bound from {critical_text} FLOPs/byte")
    steps: TableColumns = {
        "step": "step", "fetched before": ("fetched", " ".join), "written after": ("written", " ".join),
        "HBM so far": bytes_column, "FLOPs so far": flops_column, "ends at": "end_s", "bound by": "bound_by",
    }  # fmt: skip
    yield Table.of(facts["steps"], steps, "steps", first=ROWS_SHOWN)
    yield Condition("counted: matrix products at the bf16 peak; exponentials and sums over rows take no time")


# -- the picture ----------------------------------------------------------------------------------------


def _roofline(facts: Facts, chip: Chip) -> Any:
    points = [(f"b = {row['block']:,}", row, row["time_s"]) for row in facts["blocks"]]
    if (untiled := facts["untiled"]) is not None:
        points.append(("without tiles", untiled, max(untiled["math_s"], untiled["transfer_s"])))
    return roofline_figure(
        peak_flops_per_s=peak(chip, "bf16"),
        link_bytes_per_s={"HBM": channel_rate(chip, "hbm")},
        points=[RooflinePoint(name, row["intensity"], row["flops"] / time_s) for name, row, time_s in points],
        title=f"{facts['loop']}{', causal' * facts['causal']}: tiles of b rows on the roofline of {chip.name}",
    )


def _figure(loop: TiledLoop, chip: Chip, title: str) -> Any:
    """Draws the first three steps, three from the first complete result on, and the last two."""
    last, first = loop.num_steps - 1, max(3, int(np.flatnonzero(loop.moves[loop.results[0].name])[0]))
    steps_shown = sorted({step for step in (0, 1, 2, first, first + 1, first + 2, last - 1, last) if 0 <= step <= last})
    frames = [_frame(loop, row) for row in _steps(loop, chip, steps_shown)]
    return stream_figure(frames, title=title, subtitle="Bytes and FLOPs so far, when the step ends, and what binds it.")


def _frame(loop: TiledLoop, row: Facts) -> StreamFrame:
    step_index, arrays = row["step"] - 1, (*loop.operands, *loop.results)
    written = [loop.titles(loop.results, past_step, moving=True) for past_step in range(-1, step_index)]
    in_use, titles = loop.titles(loop.operands, step_index), loop.titles(arrays, step_index)
    arriving = [name for name in loop.titles(loop.operands, step_index + 1, moving=True) if name not in in_use]
    sum_names = [*loop.titles(loop.results, step_index), *(name for name in loop.sums if name not in loop.moves)]
    titles_in = {"in use": in_use, "arriving": arriving, "leaving": written[-1], "in HBM": chain(*written[:-1])}
    state_of = {name: state for state, names in titles_in.items() for name in names}
    tile_of = {name: (title, state_of.get(title, SUM)) for name, title in zip(loop.moves, titles, strict=True)}

    def grid(array: TiledArray) -> list[list[str]]:
        other_state = "in HBM" if array in loop.operands else "not in HBM yet"
        num_rows, num_cols = (size // tile for size, tile in zip(array.shape, array.tile, strict=True))
        return [[state_of.get(array.title((i, j)), other_state) for j in range(num_cols)] for i in range(num_rows)]

    moved_text, flops_text, end_text = format_bytes(row["hbm_bytes"]), FLOPS(row["flops"]), format_seconds(row["end_s"])
    return StreamFrame(
        title=f"step {row['step']:,} of {loop.num_steps:,}",
        note=f"{moved_text}, {flops_text}, {end_text}: {row['bound_by']}",
        hbm={array.name: grid(array) for array in arrays},
        vmem=[(name, state_of.get(name, SUM)) for name in (*in_use, *arriving, *sum_names, *written[-1])],
        products=[[tile_of.get(name, (name, "in registers alone")) for name in product] for product in loop.products],
    )
