"""`meshwright roofline`: what bounds one product on one chip."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from meshwright.algebra.notation import ShardedArray
from meshwright.calculators.chips.anatomy import tile_expansion
from meshwright.calculators.sharding.parsing import parse_einsum
from meshwright.calculators.verbs.roofline_attention import attention_answer
from meshwright.calculators.verbs.roofline_sweep import SweptSizes, parse_sweep, sweep_answer, sweep_points
from meshwright.cli.output import format_flop_count, four_digits
from meshwright.cli.verb import DimSizes, Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_flops, format_rate, format_seconds
from meshwright.cost.formulas.roofline import (
    Channel,
    Operand,
    Roofline,
    chip_roofline,
    critical_batch,
    critical_size,
    dtype_bytes,
    einsum_work,
)
from meshwright.report.answer import Answer, Fact, Paragraph, Piece, Table
from meshwright.spec.chip import Chip, chip, compute_dtype

CHANNELS: tuple[Channel, ...] = ("hbm", "vmem", "pcie", "ici", "dcn", "nvlink")
TPU_TILE = (8, 128)
"""Rows and columns of a tile: how a TPU lays the last two dims of an array out in memory."""


class Given(Options):
    product: str | None = argument()
    dims: DimSizes | None = option("Sizes, such as B=128,D=8192,F=32768.")
    on: str = option("A chip, such as v5e or h100 (meshwright show chips).")
    channel: Channel = option(type=click.Choice(CHANNELS), default="hbm", needs={"product": "a product"})
    sweeps: tuple[str, ...] = option(
        "Many sizes: B=1..4096 doubles, D,F=1024,4096 sets both; repeatable.", "--sweep", metavar="DIMS=SIZES"
    )
    attention_of: str | None = option("Compare attention and feed-forward of a model.", "--attention", metavar="MODEL")
    batch_seqs: int = option(
        "Sequences that generate at once.", "--batch", default=1, needs={"attention_of": "--attention"}
    )
    png: Path | None = option("Draw the roofline to this file (.png or .svg).")


@verb(Given)
def command(given: Given) -> Answer:
    """Show intensity, both bounds and what binds for a PRODUCT such as "bf16[B,D] * int8[D,F] -> bf16[B,F]"."""
    unit, swept = chip(given.on), [parse_sweep(text) for text in given.sweeps]
    sizes = given.dims or {}
    if given.attention_of is not None:
        if given.product is not None or sizes or len(swept) > 1:
            raise InputError(
                "--attention takes its sizes from the model. Leave PRODUCT and --dims out, --sweep T alone."
            )
        return attention_answer(given.attention_of, unit, given, swept[0] if swept else None)
    if given.product is None:
        raise InputError("there is no product. Write bf16[B,D] * int8[D,F] -> bf16[B,F], or give --attention MODEL.")
    if not swept and not sizes:
        raise InputError("the product has no sizes. Give --dims B=128,D=8192,F=32768, or --sweep.")
    if not swept:
        return product_answer(given.product, unit, sizes, given)
    lhs, rhs, out = (Operand(a.dims, _dtype(a)) for a in parse_einsum(given.product))
    dtype = compute_dtype(unit, lhs.dtype, rhs.dtype)

    def price(sizes: SweptSizes) -> Roofline:
        return chip_roofline(einsum_work((lhs, rhs), out, sizes), unit, dtype=dtype, channel=given.channel)

    points = sweep_points(price, dict.fromkeys((*lhs.dims, *rhs.dims)), sizes, swept)
    return sweep_answer(f"{given.product} on {unit.name}", unit, given, dtype, swept, points)


def product_answer(product: str, unit: Chip, sizes: dict[str, int], given: Given) -> Answer:
    """Returns the roofline of one product in one size, and the batch from which it is compute-bound."""
    named = parse_einsum(product)
    lhs, rhs, out = (Operand(a.dims, _dtype(a)) for a in named)
    dtype = compute_dtype(unit, lhs.dtype, rhs.dtype)
    if not lhs.dims:
        raise InputError(f"the left array of {product!r} has no dims. Write for example x[B,D] * W[D,F] -> y[B,F].")
    # the batch is the first dim of the left array that the right one lacks
    dim = next((d for d in lhs.dims if d not in rhs.dims), lhs.dims[0])
    line = chip_roofline(einsum_work((lhs, rhs), out, sizes), unit, dtype=dtype, channel=given.channel)
    rates = {"peak_flops": line.peak_flops, "bytes_per_s": line.bytes_per_s}
    facts = {
        "flops": line.work.flops,
        "bytes": line.work.num_bytes,
        "intensity": line.work.intensity,
        "critical_intensity": line.critical_intensity,
        "compute_dtype": dtype,
        **rates,
        "channel": line.channel,
        "math_s": line.math_s,
        "transfer_s": line.transfer_s,
        "time_s_lower": line.lower_s,
        "time_s_upper": line.upper_s,
        "bound_by": line.bound_by,
        "critical_dim": dim,
        "critical_batch": critical_size((lhs, rhs), out, sizes, dim=dim, **rates),
        "flops_per_s": line.reached_flops_per_s,
        # if every other dim were infinite, only the weight's bytes would count
        "critical_batch_wide": None if dim in rhs.dims else critical_batch(
            **rates, weight_bytes=dtype_bytes(rhs.dtype)
        ),
        "tile_expansion": _tiles(unit, named, sizes),
    }  # fmt: skip
    return Answer(facts, _text(product, unit, facts), {given.png: lambda: _figure(product, unit, line)}, [[facts]])


def _tiles(unit: Chip, arrays: tuple[ShardedArray, ...], sizes: dict[str, int]) -> dict[str, float] | None:
    """Returns for each array its bytes in tiles over those of its elements; None for a chip that is no TPU."""
    if unit.vendor != "Google":
        return None
    shapes = {a.name: [1] * (2 - len(a.dims)) + [sizes[d] for d in a.dims] for a in arrays}
    return {name: tile_expansion(shape, TPU_TILE) for name, shape in shapes.items()}


def _dtype(array: ShardedArray) -> str:
    if array.spread or array.unreduced:
        raise InputError(f"{array} is sharded; roofline is for one chip. Use meshwright shard for a mesh.")
    return array.dtype or "bf16"


def _text(product: str, unit: Chip, r: dict[str, Any]) -> Iterator[Piece]:
    dim, batch, wide = r["critical_dim"], r["critical_batch"], r["critical_batch_wide"]
    rows = [
        ["compute", format_flop_count(r["flops"]), format_flops(r["peak_flops"]), format_seconds(r["math_s"])],
        [r["channel"], format_bytes(r["bytes"]), format_rate(r["bytes_per_s"]),
         format_seconds(r["transfer_s"])],
    ]  # fmt: skip
    yield Table(["", "amount", f"{unit.name} rate", "time"], rows, f"{product} on {unit.name} in {r['compute_dtype']}")
    yield Paragraph(
        f"intensity       {four_digits(r['intensity'])} FLOPs/byte (critical {four_digits(r['critical_intensity'])})",
        None,
    )
    yield Paragraph(f"bound by        {r['bound_by']}", None)
    yield Paragraph(f"time            {format_seconds(r['time_s_lower'])} with perfect overlap, "
               f"{format_seconds(r['time_s_upper'])} with none", None)  # fmt: skip
    near = "" if wide is None else f"; {wide:,.1f} by the weight's alone"
    reach = f"{dim} > {batch:,.1f} (every byte counted{near})"
    if batch == float("inf"):
        reach = f"never, whatever {dim} (every byte counted)"
    yield Fact("compute-bound", reach, column=16)
    if r["tile_expansion"]:
        padded = ", ".join(
            f"{name} {times:,.0f}" if times >= 100 else f"{name} {times:.3g}"
            for name, times in r["tile_expansion"].items()
        )
        tile = ",".join(map(str, TPU_TILE))
        yield Fact("padded memory", f"{padded} times what the elements need, in tiles of ({tile})", column=16)


def _figure(product: str, unit: Chip, line: Roofline) -> Any:
    from meshwright.report.roofline import RooflinePoint, roofline_figure

    rates = {"HBM": unit.hbm_bytes_per_s, "VMEM": unit.vmem_bytes_per_s, line.channel.upper(): line.bytes_per_s}
    links = {name: rate for name, rate in rates.items() if rate is not None}
    point = RooflinePoint(label=product, intensity=line.work.intensity, flops_per_s=line.reached_flops_per_s)
    return roofline_figure(
        peak_flops_per_s=line.peak_flops, link_bytes_per_s=links, points=[point], title=f"Roofline of {unit.name}"
    )
