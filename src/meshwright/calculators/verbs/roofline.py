"""`meshwright roofline`: what bounds one product on one chip."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from meshwright.calculators.chips.local_op import LocalOp, parse_op
from meshwright.calculators.verbs.roofline_attention import attention_answer
from meshwright.calculators.verbs.roofline_sweep import parse_sweep, sweep_answer
from meshwright.cli.output import format_flop_count, four_digits, three_digits
from meshwright.cli.verb import Count, DimSizes, Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_flops, format_rate, format_seconds
from meshwright.cost.formulas.anatomy import tile_expansion
from meshwright.cost.formulas.roofline import Channel, Roofline, critical_batch, critical_size, dtype_bytes, vector_peak
from meshwright.report.answer import Answer, Fact, Facts, Piece, Table
from meshwright.spec.chip import Chip, chip

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
    batch_seqs: Count = option(
        "Sequences that generate at once.", "--batch", default=1, needs={"attention_of": "--attention"}
    )
    png: Path | None = option("Draw the roofline to this file (.png or .svg).")


@verb(Given)
def command(given: Given) -> Answer:
    """Show intensity, both bounds and what binds for a PRODUCT such as "bf16[B,D] * int8[D,F] -> bf16[B,F]".

    PRODUCT may also be a sum, "A[B,D] + B[D] -> C[B,D]", or softmax(A[B,S]), rms_norm(A[B,D]) or layer_norm(A[B,D]).
    """
    chip_given, sweeps = chip(given.on), [parse_sweep(text) for text in given.sweeps]
    sizes = given.dims or {}
    if given.attention_of is not None:
        if given.product is not None or sizes or len(sweeps) > 1:
            raise InputError("--attention takes sizes from the model. Leave PRODUCT and --dims out, --sweep T alone.")
        return attention_answer(given.attention_of, chip_given, given, sweeps[0] if sweeps else None)
    if given.product is None:
        raise InputError("there is no product. Write bf16[B,D] * int8[D,F] -> bf16[B,F], or give --attention MODEL.")
    if not sweeps and not sizes:
        raise InputError("the product has no sizes. Give --dims B=128,D=8192,F=32768, or --sweep.")
    if not sweeps:
        return product_answer(given.product, chip_given, sizes, given)
    return sweep_answer(parse_op(given.product), chip_given, given, sizes, sweeps)


def product_answer(product: str, unit: Chip, sizes: dict[str, int], given: Given) -> Answer:
    """Returns the roofline of one operation in one size, and the batch from which a product is compute-bound."""
    op = parse_op(product)
    if not op.arrays[0].dims:
        raise InputError(f"the left array of {product!r} has no dims. Write for example x[B,D] * W[D,F] -> y[B,F].")
    roof = op.roofline(unit, sizes, given.channel)
    rates = {"peak_flops": roof.peak_flops, "bytes_per_s": roof.bytes_per_s}
    facts = {
        "flops": roof.work.flops,
        "bytes": roof.work.num_bytes,
        "intensity": roof.work.intensity,
        "critical_intensity": roof.critical_intensity,
        "compute_dtype": op.dtype(unit),
        "units": "matrix" if op.matrix else "vector",
        "steps": op.steps,
        "padding": roof.padding,
        **rates,
        "channel": roof.channel,
        "math_s": roof.math_s,
        "transfer_s": roof.transfer_s,
        "time_s_lower": roof.lower_s,
        "time_s_upper": roof.upper_s,
        "bound_by": roof.bound_by,
        "flops_per_s": roof.reached_flops_per_s,
        **_critical(op, unit, roof, sizes),
        # bytes in tiles over those of the elements, on a TPU
        "tile_expansion": None if unit.vendor != "Google" else {
            a.name: tile_expansion([1] * (2 - len(a.dims)) + [sizes[d] for d in a.dims], TPU_TILE) for a in op.arrays
        },
    }  # fmt: skip
    return Answer(facts, _text(product, unit, facts), {given.png: lambda: _figure(product, unit, roof)}, [[facts]])


def _critical(op: LocalOp, chip: Chip, roof: Roofline, sizes: dict[str, int]) -> Facts:
    """Returns the batch from which a product on matrix units is compute-bound; else intensity hardly depends on sizes.

    The batch is the first dim of the left array that the right one lacks, taken as whole tiles.
    """
    if not op.matrix:
        return dict.fromkeys(("critical_dim", "critical_batch", "critical_batch_wide"))
    lhs, rhs, out = op.operands
    dim = next((d for d in lhs.dims if d not in rhs.dims), lhs.dims[0])
    rates = {"bytes_per_s": roof.bytes_per_s, "peak_flops": roof.peak_flops}
    padded_peak = roof.peak_flops / op.padding(chip, {**sizes, dim: 2048 * sizes[dim]})
    # if every other dim were infinite, only the weight's bytes would count
    wide_batch = None if dim in rhs.dims else critical_batch(**rates, weight_bytes=dtype_bytes(rhs.dtype))
    exact_batch = critical_size((lhs, rhs), out, sizes, dim=dim, **rates | {"peak_flops": padded_peak})
    return {"critical_dim": dim, "critical_batch": exact_batch, "critical_batch_wide": wide_batch}


def _text(product: str, chip: Chip, facts: Facts) -> Iterator[Piece]:
    dim, exact_batch, wide_batch = facts["critical_dim"], facts["critical_batch"], facts["critical_batch_wide"]
    rows = [
        ["compute", format_flop_count(facts["flops"]), format_flops(facts["peak_flops"]),
         format_seconds(facts["math_s"])],
        [facts["channel"], format_bytes(facts["bytes"]), format_rate(facts["bytes_per_s"]),
         format_seconds(facts["transfer_s"])],
    ]  # fmt: skip
    yield Table(
        ["", "amount", f"{chip.name} rate", "time"], rows, f"{product} on {chip.name} in {facts['compute_dtype']}"
    )
    intensity_text, critical_text = four_digits(facts["intensity"]), four_digits(facts["critical_intensity"])
    lower_text, upper_text = format_seconds(facts["time_s_lower"]), format_seconds(facts["time_s_upper"])
    yield Fact("time", f"{lower_text} with perfect overlap, {upper_text} without")
    bound_text = f"{intensity_text} FLOPs/byte, compute-bound from {critical_text}"
    yield Fact("bound by", f"{facts['bound_by']}: {bound_text}")
    if facts["padding"] > 1:
        tiles_text = f"whole tiles of {chip.mxu_dim} x {chip.mxu_dim}, rows by 8"
        yield Fact(
            "padded compute", f"{facts['padding']:.3g} times the FLOPs ({tiles_text}), counted in the time", column=16
        )
    if facts["units"] == "vector":
        units = "vector units" if vector_peak(chip) else "vector units, whose rate is not known: compute takes longer"
        yield Fact("computed by", f"{units}; FLOPs an element: {', '.join(facts['steps'])}")
    if dim is not None:
        wide_text = "" if wide_batch is None else f"; > {wide_batch:,.1f} if only the weight's bytes counted"
        reach_text = f"from {dim} > {exact_batch:,.1f}{wide_text}"
        if exact_batch == float("inf"):
            reach_text = f"never, at any {dim}"
        yield Fact("compute-bound", reach_text)
    if max((facts["tile_expansion"] or {"": 1}).values()) > 1:
        padded_text = ", ".join(
            f"{name} {three_digits(expansion)}" for name, expansion in facts["tile_expansion"].items()
        )
        tile_text = ",".join(map(str, TPU_TILE))
        yield Fact(
            "padded memory", f"{padded_text} times the bytes of the elements, in tiles of ({tile_text})", column=16
        )


def _figure(product: str, chip: Chip, roof: Roofline) -> Any:
    from meshwright.report.roofline import RooflinePoint, roofline_figure

    rate_by_link = {"HBM": chip.hbm_bytes_per_s, "VMEM": chip.vmem_bytes_per_s, roof.channel.upper(): roof.bytes_per_s}
    known_links = {name: rate for name, rate in rate_by_link.items() if rate is not None}
    point = RooflinePoint(label=product, intensity=roof.work.intensity, flops_per_s=roof.reached_flops_per_s)
    return roofline_figure(
        peak_flops_per_s=roof.peak_flops, link_bytes_per_s=known_links, points=[point], title=f"Roofline of {chip.name}"
    )
