"""`meshwright sweep memory`: what fills a chip against tensor degree, sequence length or recomputation."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import click

from meshwright.api.rates import rates_for
from meshwright.calculators.sweeps.memory_sweep import SWEPT, Axis, MemoryPoint, memory_sweep
from meshwright.cli.fields import with_fields
from meshwright.cli.shared import AXES, CALIBRATION, PNG, SEQ, SET, read_choices
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.core.units import format_bytes, format_count, parse_count
from meshwright.cost.memory import memory_limit
from meshwright.report.answer import Answer, Piece, Table
from meshwright.report.bars import memory_figure
from meshwright.report.figure import si_scale
from meshwright.report.heatmap import short_mesh
from meshwright.report.tables import Cell
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.strategy import Strategy, make_mesh

COLUMNS: dict[str, str] = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim.",
    "activations": "activ.",
    "logits": "logits",
    "communication": "comms",
    "workspace": "work",
}
"""Item of memory -> its column."""


class Given(Options):
    model: str = argument()
    on: str = option("The cluster, such as h100:8x8.")
    axis: str = option("What changes from bar to bar.", type=click.Choice(SWEPT))
    values: str | None = option("Its values, such as 1,2,4,8 or 4Ki,8Ki or none,block.  [default: the usual ones]")
    seq_len: Count = SEQ
    micro: str = option("Sequences that a replica works on at a time.", default="1")
    axes: str | None = AXES
    pairs: tuple[str, ...] = SET
    calibration: Path | None = CALIBRATION
    png: Path | None = PNG


@verb(Given)
def command(given: Given) -> Answer:
    """Weights, gradients, optimizer, activations, logits and buffers of one chip as one thing changes."""
    cluster = parse_cluster(given.on)
    fixed, fields, assumed = read_choices(given.axes, given.pairs, sections=("strategy", "assumptions"))
    points = memory_sweep(
        find_model(given.model),
        cluster,
        cast(Axis, given.axis),
        seq_len=given.seq_len,
        template=with_fields(Strategy(mesh=make_mesh({})), "strategy", fields),
        axes=fixed,
        microbatch_seqs=parse_count(given.micro, what="micro"),
        values=_values(given.values, given.axis),
        assumptions=assumed,
    )
    limit = memory_limit(cluster, rates_for(cluster, given.calibration))
    title = f"{given.model} on {cluster.short_name}: memory of a chip"
    bars = {point.label: {k.replace("_", " "): v for k, v in point.items.items()} for point in points if point.items}
    known = None if limit == float("inf") else limit
    return Answer(
        {
            "model": given.model,
            "cluster": cluster.short_name,
            "axis": given.axis,
            "limit_bytes": known,
            "points": [_as_json(point) for point in points],
        },
        _text(title, points, limit, given.axis),
        {
            given.png: lambda: memory_figure(
                bars, limit_bytes=known, title=title, subtitle=_fixed_words(points, given.axis)
            )
        },
    )


def _values(values: str | None, axis: str) -> list[str]:
    parts = [part.strip() for part in values.split(",")] if values else []
    return parts if axis == "remat" else [str(parse_count(part, what=axis)) for part in parts]


def _as_json(point: MemoryPoint) -> dict[str, Any]:
    return {
        "label": point.label,
        "axes": point.strategy.mesh,
        "remat": point.strategy.remat,
        "seq_len": point.job.seq_len,
        "batch_seqs": point.job.batch_seqs,
        "memory": point.items or None,
        "hbm_bytes_per_chip": point.total_bytes if point.items else None,
        "reason": point.reason or None,
    }


def _fixed_words(points: Sequence[MemoryPoint], axis: str) -> str:
    """What stays the same."""
    first = next(point for point in points if point.items)
    words = []
    if axis != "tensor":
        words.append(short_mesh(first.strategy.mesh))
    if axis != "seq":
        words.append(f"sequences of {format_count(first.job.seq_len)} tokens")
    if axis != "remat":
        words.append(f"remat {first.strategy.remat}")
    words.append(f"training state {first.strategy.state}")
    if axis == "tensor":
        words.append("fsdp on the other chips")
    return ", ".join(words)


def _text(title: str, points: Sequence[MemoryPoint], limit: float, axis: str) -> Iterator[Piece]:
    unit, name = si_scale(max(point.total_bytes for point in points), "B")
    yield f"{title} in {name}, {_fixed_words(points, axis)}"
    rows = [_row(point, limit, unit) for point in points if point.items]
    yield Table([axis, *COLUMNS.values(), "total", "fits"], rows)
    yield f"a chip holds {format_bytes(limit)}" if limit < float("inf") else "the memory of a chip is not known"
    for point in points:
        if not point.items:
            yield f"{point.label}: {point.reason}"


def _row(point: MemoryPoint, limit: float, unit: float) -> list[Cell]:
    label = point.label.split(" ", 1)[1] if not point.label.endswith("tokens") else point.label.removesuffix(" tokens")
    sizes = [point.items[name] for name in COLUMNS]
    fits = "yes" if point.total_bytes <= limit else "no"
    return [label, *(f"{size / unit:.3g}" for size in (*sizes, point.total_bytes)), fits]
