"""`meshwright sweep grid`: the best plan of every model on every number of nodes, as a heatmap of MFU."""

from collections.abc import Iterator
from pathlib import Path

from meshwright.api.rates import rates_for
from meshwright.calculators.sweeps.grid import Grid, describe, llama_like, plan_grid
from meshwright.calculators.sweeps.sweep import SweepPoint, node_clusters, sweep_clusters
from meshwright.cli.output import width
from meshwright.cli.shared import AXES, BATCH, CALIBRATION, OF_JOBS, PNG, SEQ, SET, read_choices, read_job
from meshwright.cli.verb import Count, Options, option, verb
from meshwright.core.errors import InputError
from meshwright.core.units import format_count, format_params, parse_count
from meshwright.cost.setting import Setting
from meshwright.report.answer import Answer, Piece, Table
from meshwright.report.figure import Spec
from meshwright.report.heatmap import HeatCell, heatmap_figure, short_mesh
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.chip import chip as find_chip
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.model import Model
from meshwright.spec.weights import num_params

CELL_WIDTH = 13
"""Columns of one model in the table, the gap included."""


class Given(Options):
    models: str | None = option("Names or config.json files, separated by commas.")
    sizes: str | None = option("Parameters of models in the proportions of Llama 3, such as 1B,7B,70B.")
    chip: str | None = option("The chip of the nodes, such as h100; with --nodes.")
    nodes: str | None = option("Numbers of nodes, such as 1,2,4,8.")
    on: str | None = option("The clusters instead of --chip and --nodes: v5p:4x4x4..16x16x16.")
    batch: str = BATCH
    seq_len: Count = SEQ
    axes: str | None = AXES
    pairs: tuple[str, ...] = SET
    calibration: Path | None = CALIBRATION
    png: Path | None = PNG


@verb(Given)
def command(given: Given) -> Answer:
    """The best mesh and its MFU for every model and number of nodes, at one batch."""
    chosen, clusters = _models(given.models, given.sizes), _clusters(given.chip, given.nodes, given.on)
    job = read_job(given.batch, given.seq_len, given.pairs)
    fixed, overrides, assumed = read_choices(given.axes, given.pairs, sections=OF_JOBS)
    rates = rates_for(clusters[-1], given.calibration, fitted=True)
    settings = [Setting(one, clusters[0], job, rates, assumptions=assumed) for one in chosen]
    grid = plan_grid(settings, clusters, axes=fixed, overrides=overrides)
    return Answer(
        _as_json(grid, job),
        _text(grid, job, by_nodes=given.on is None),
        {given.png: lambda: _figure(grid, job, by_nodes=given.on is None)},
    )


def _models(models: str | None, sizes: str | None) -> list[Model]:
    found = [find_model(name.strip()) for name in models.split(",")] if models else []
    found += [llama_like(size.strip()) for size in sizes.split(",")] if sizes else []
    if not found:
        raise InputError("no model is named. Give --models llama3-8b,llama3-70b or --sizes 1B,7B,70B, or both.")
    return sorted(found, key=num_params)


def _clusters(chip: str | None, nodes: str | None, on: str | None) -> tuple[Cluster, ...]:
    if on is not None and not chip and not nodes:
        return sweep_clusters(on)
    if on is not None or not chip or not nodes:
        raise InputError("give --chip and --nodes, such as --chip h100 --nodes 1,2,4,8, or --on with the clusters.")
    return node_clusters(
        find_chip(chip), sorted({parse_count(count.strip(), what="nodes") for count in nodes.split(",")})
    )


def _as_json(grid: Grid, job: Job) -> dict[str, object]:
    return {
        "seq_len": job.seq_len,
        "tokens_per_step": job.tokens_per_step,
        "models": [{"name": model.name, "params": num_params(model)} for model in grid.models],
        "clusters": [cluster.short_name for cluster in grid.clusters],
        "cells": [
            {"model": model.name, **point.to_json()}
            for model, row in zip(grid.models, grid.cells, strict=True)
            for point in row
        ],
    }


def _size_words(cluster: Cluster, by_nodes: bool) -> str:
    return f"{cluster.nodes:,}" if by_nodes else f"{cluster.num_chips:,}"


def _text(grid: Grid, job: Job, *, by_nodes: bool) -> Iterator[Piece]:
    first = grid.clusters[0]
    what = f"nodes of {first.domain} chips" if by_nodes else "chips"
    yield (
        f"best plans on {first.chip.name}, {format_count(job.tokens_per_step)} tokens a step in sequences of "
        f"{job.seq_len:,}; rows are {what}"
    )
    per_table = max(1, (width() - 8) // CELL_WIDTH)
    for start in range(0, len(grid.models), per_table):
        models, cells = grid.models[start : start + per_table], grid.cells[start : start + per_table]
        rows = [
            [_size_words(cluster, by_nodes), *(_cell_words(row[number]) for row in cells)]
            for number, cluster in enumerate(grid.clusters)
        ]
        yield Table(["nodes" if by_nodes else "chips", *(model.name for model in models)], rows)
    for model in grid.models:
        if model.name.startswith("llama-"):
            yield describe(model)
    yield "MFU and mesh: pp pipeline, dp data, ep expert, cp context, tp tensor; a dash: see --json"


def _cell_words(point: SweepPoint) -> str:
    """MFU and, below, the mesh in lines of two axes."""
    if point.best is None:
        return point.reason.partition(":")[0].replace("does not", "no")
    return "\n".join([f"{point.best.estimate.mfu:.0%}", *_mesh_lines(point, CELL_WIDTH - 1)])


def _mesh_lines(point: SweepPoint, most: int) -> Iterator[str]:
    """The mesh in short form, broken between axes."""
    line = ""
    for axis in short_mesh(point.best.strategy.mesh if point.best else {}).split(" "):
        if line and len(line) + len(axis) + 1 > most:
            yield line
            line = axis
        else:
            line = f"{line} {axis}" if line else axis
    yield line


def _figure(grid: Grid, job: Job, *, by_nodes: bool) -> Spec:
    cells = [
        HeatCell(
            row=f"{model.name} ({format_params(num_params(model))})",
            column=_size_words(point.cluster, by_nodes),
            value=None if point.best is None else point.best.estimate.mfu,
            lines=_figure_lines(point),
        )
        for model, row in zip(grid.models, grid.cells, strict=True)
        for point in row
    ]
    first = grid.clusters[0]
    return heatmap_figure(
        cells,
        row_title="model",
        column_title=f"nodes of {first.domain} chips" if by_nodes else "chips",
        value_title="MFU",
        title=f"Best plans on {first.chip.name}: MFU and mesh",
        subtitle=f"{format_count(job.tokens_per_step)} tokens a step in sequences of {job.seq_len:,}. "
        f"pp pipeline, dp data, ep expert, cp context, tp tensor.",
    )


def _figure_lines(point: SweepPoint) -> tuple[str, ...]:
    return (point.reason.partition(":")[0],) if point.best is None else tuple(_mesh_lines(point, 12))
