"""`meshwright sweep chips`: the best plan against the number of chips, with the batch or the batch per chip fixed."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.api.rates import rates_for
from meshwright.calculators.sweeps.sweep import SweepPoint, scaling_curve, sweep_clusters
from meshwright.cli.output import width
from meshwright.cli.shared import AXES, BATCH, CALIBRATION, OF_JOBS, PNG, SEQ, SET, read_choices, read_job
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.core.errors import CannotRunError
from meshwright.core.units import format_bytes, format_count, format_params, format_seconds
from meshwright.cost.memory import memory_limit
from meshwright.cost.setting import Setting
from meshwright.report.answer import Answer, Piece, Table
from meshwright.report.figure import Spec
from meshwright.report.heatmap import short_mesh
from meshwright.report.scaling import ScalingPoint, scaling_figure
from meshwright.report.tables import Cell
from meshwright.spec.calibration import Calibration
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.job import Job

WIDE = 100
"""Columns from which the table says more."""


class Given(Options):
    model: str = argument()
    on: str = option("Clusters: h100:8x1..8x512 (doubling), or h100:8x4,h100:8x8.")
    batch: str = BATCH
    seq_len: Count = SEQ
    weak: bool = option("Keep the batch per chip of the first cluster, not the batch.")
    axes: str | None = AXES
    pairs: tuple[str, ...] = SET
    calibration: Path | None = CALIBRATION
    png: Path | None = PNG


@verb(Given)
def command(given: Given) -> Answer:
    """Step time, tokens per second, MFU, exposed communication and memory of MODEL's best plan on each cluster."""
    clusters = sweep_clusters(given.on)
    rates = rates_for(clusters[-1], given.calibration, fitted=True)
    fixed, overrides, assumed = read_choices(given.axes, given.pairs, sections=OF_JOBS)
    job = read_job(given.batch, given.seq_len, given.pairs)
    setting = Setting(find_model(given.model), clusters[0], job, rates, assumptions=assumed)
    points = scaling_curve(setting, clusters, weak=given.weak, axes=fixed, overrides=overrides)
    if all(point.best is None for point in points):
        raise CannotRunError(
            f"{given.model} runs on none of the {len(points)} clusters: {points[-1].reason} "
            f"on {clusters[-1].short_name}."
        )
    scaling = "weak" if given.weak else "strong"
    return Answer(
        {"model": given.model, "seq_len": job.seq_len, "scaling": scaling, "points": [p.to_json() for p in points]},
        _text(given.model, points, job, given.weak),
        {given.png: lambda: _figure(given.model, points, job, given.weak, rates)},
    )


def _text(model: str, points: Sequence[SweepPoint], job: Job, weak: bool) -> Iterator[Piece]:
    scaling = "weak" if weak else "strong"
    yield f"{model} on {points[0].cluster.chip.name}, {scaling} scaling: {_batch_words(points, job, weak)}"
    wide = width() >= WIDE
    columns = ["chips", "step", "tokens/s", "scaling", "MFU", "exposed", "memory", "best mesh"]
    if wide:
        columns += ["remat", "micro", "bound by"]
    first = next(point for point in points if point.best is not None)
    yield Table(columns, [_row(point, first, wide) for point in points])
    yield "scaling: tokens/s per chip beside the first row's; exposed: share of the step that waits for links"
    for point in points:
        if point.best is None:
            yield f"{point.num_chips:,} chips: {point.reason}"


def _row(point: SweepPoint, first: SweepPoint, wide: bool) -> list[Cell]:
    found, parts, rate, base = point.best, point.parts, point.tokens_per_s, first.tokens_per_s
    if found is None or parts is None or rate is None or base is None:
        return [point.num_chips, *[None] * (6 + 4 * wide), *([] if wide else ["-"])]
    at, strategy = found.estimate, found.strategy
    scaling = rate / point.num_chips / (base / first.num_chips)
    cells: list[Cell] = [
        point.num_chips,
        format_seconds(at.step_s),
        format_params(rate),
        f"{scaling:.0%}",
        f"{at.mfu:.0%}",
        f"{parts.exposed_share:.0%}",
        format_bytes(at.hbm_bytes_per_chip),
        short_mesh(strategy.mesh),
    ]
    kept = strategy.remat if isinstance(strategy.remat, str) else "own"
    return [*cells, kept, strategy.num_microbatches, at.bound_by] if wide else cells


def _batch_words(points: Sequence[SweepPoint], job: Job, weak: bool) -> str:
    if weak:
        each = job.tokens_per_step / points[0].num_chips
        return f"{format_count(each)} tokens a step and chip in sequences of {job.seq_len:,}"
    return f"{format_count(job.tokens_per_step)} tokens a step in sequences of {job.seq_len:,}"


def _figure(model: str, points: Sequence[SweepPoint], job: Job, weak: bool, rates: Calibration | None) -> Spec:
    limit = memory_limit(points[0].cluster, rates)
    drawn = [
        ScalingPoint(
            num_chips=point.num_chips,
            step_s=point.best.estimate.step_s,
            tokens_per_s=point.tokens_per_s or 0.0,
            mfu=point.best.estimate.mfu,
            exposed_share=point.parts.exposed_share,
            bubble_share=point.parts.bubble_s / point.parts.step_s,
            hbm_bytes=point.best.estimate.hbm_bytes_per_chip,
            limit_bytes=None if limit == float("inf") else limit,
        )
        for point in points
        if point.best is not None and point.parts is not None
    ]
    return scaling_figure(
        drawn,
        title=f"{model} on {points[0].cluster.chip.name}: {'weak' if weak else 'strong'} scaling",
        subtitle=f"The best plan at each size; {_batch_words(points, job, weak)}.",
    )
