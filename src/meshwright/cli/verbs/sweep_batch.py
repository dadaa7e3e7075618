"""`meshwright sweep batch`: communication against compute by batch size, and the batches at which they cross."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.api.rates import rates_for
from meshwright.cli.sweeps.crossover import (
    Curve,
    SweptWork,
    closed_forms,
    crossing,
    mlp_work,
    model_work,
    scheme_curves,
)
from meshwright.cli.sweeps.fields import require_links
from meshwright.cli.verb import CALIBRATION, PNG, Count, MeshSizes, Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.core.units import format_count, format_params, format_seconds, parse_count
from meshwright.cost.network.legs import slice_turns_text
from meshwright.report.answer import Answer, Condition, Facts, Heading, Piece, Symbols, Table
from meshwright.report.figure import Figure
from meshwright.report.plans.comm_compute import CommsCurve, comm_compute_figure
from meshwright.spec.calibration import datasheet_calibration
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_clusters
from meshwright.spec.strategy import short_mesh

TOKENS_PER_CHIP = (32, 32 * 1024)
STEPS_PER_OCTAVE = 4
SHOWS: dict[str, Callable[[Any], str]] = {"compute / comms": "{:.2f}".format, "best mesh": short_mesh, "shape": str}
"""Formats of columns that are no times."""
FORMULAS = {"N": "chips", "alpha": "FLOP/s of a chip / bytes/s of an ICI axis", "F": "width of the feed-forward"}


class Given(Options):
    model: str = argument()
    on: str = option("A cluster: v5p:16x16x16, or v5p:4096chips for any of its shapes.")
    axes: MeshSizes | None = option("One mesh: tensor=8; fsdp takes the rest. Without: FSDP with every tensor size.")
    seq_len: Count = option("Tokens of a sequence.", "--seq", default="4096", needs={"is_model": "a model"})
    batches: str | None = option("The range of tokens a step, such as 256Ki..64Mi.  [default: 32 to 32 Ki a chip]")
    whole: bool = option("The whole training step, not the forward pass of the layers.", "--step")
    remat: str = option("Recomputation of the whole step.", default="none", needs={"whole": "--step"})
    whole_axes: bool = option("Keep each torus axis to one mesh axis, as the book counts them.")
    calibration: Path | None = CALIBRATION
    png: Path | None = PNG

    @property
    def is_model(self) -> bool:
        """True for a model with sequences, not mlp:DxF."""
        return not self.model.startswith("mlp:")


@verb(Given)
def command(given: Given) -> Answer:
    """Show compute and communication of MODEL at every batch size, for each mesh.

    MODEL is a name, a config.json, or mlp:8192x32768: a layer of two matrices D x F, as in the book's figures.
    """
    clusters = parse_clusters(given.on)
    require_links(given.on, clusters)
    rates = rates_for(clusters[0], given.calibration)
    work = mlp_work(given.model) or model_work(
        load_model(given.model), seq_len=given.seq_len, whole=given.whole, remat=given.remat
    )
    if work.model is None and given.whole:
        raise InputError(f"{given.model} is one layer without a loss: it has a forward pass only. Leave out --step.")
    token_grid = _tokens(given.batches, clusters[0].num_chips)
    curves = scheme_curves(work, clusters, token_grid, axes=given.axes, whole_axes=given.whole_axes, calibration=rates)
    form_by_name = closed_forms(work, clusters[0], rates)
    crossings = [crossing(curve, form_by_name) for curve in curves]
    facts = {
        "model": work.name,
        "cluster": given.on,
        "pass": "step" if work.whole else "forward",
        "seq_len": work.seq_len,
        "tokens": token_grid,
        "curves": [curve.to_json() for curve in curves],
        "crossings": crossings,
    }
    title = f"{work.name} on {given.on}"
    pictures = {given.png: lambda: _figure(title, _what(work), curves, crossings)}
    points = [
        {"name": curve.name, "tokens": batch, "compute_s": curve.compute_s[n], "total_s": curve.total_s[n],
         "axes": curve.meshes[n], **{f"comms_s.{k}": seconds[n] for k, seconds in curve.comms_s.items()}}
        for curve in curves for n, batch in enumerate(token_grid)
    ]  # fmt: skip
    notes = [f"rates: {(rates or datasheet_calibration(clusters[0].chip)).describe()}", slice_turns_text(clusters[0])]
    pieces = [*_text(work, given.on, curves, crossings), *map(Condition, filter(None, notes))]
    return Answer(facts, pieces, pictures, [points, crossings])


def _tokens(batches: str | None, num_chips: int) -> np.ndarray:
    """Returns batches in tokens, four to an octave."""
    low, high = (size * num_chips for size in TOKENS_PER_CHIP)
    if batches is not None:
        first_text, range_dots, last_text = batches.partition("..")
        low, high = parse_count(first_text, what="batches"), parse_count(last_text, what="batches") if range_dots else 0
        if not 0 < low < high:
            raise InputError(f"--batches {batches!r} is not a range. Write for example 256Ki..64Mi.")
    num_points = max(2, round(np.log2(high / low) * STEPS_PER_OCTAVE) + 1)
    return np.asarray(low * (high / low) ** (np.arange(num_points) / (num_points - 1)))


# -- text -----------------------------------------------------------------------------------------------


def _what(work: SweptWork) -> str:
    pass_text = "the whole training step" if work.whole else "the forward pass of the layers"
    return "one layer, forward pass" if work.model is None else pass_text


def _text(work: SweptWork, cluster_text: str, curves: Sequence[Curve], crossings: Sequence[Facts]) -> Iterator[Piece]:
    yield f"{work.name} on {cluster_text}, {_what(work)}: communication without overlap, against compute"
    first_curve, last_curve = curves[0], curves[-1]
    columns = {"compute": last_curve.compute_s}
    if len(curves) == 1:
        columns |= {f"{axis} comms": seconds for axis, seconds in last_curve.comms_s.items()}
        columns |= {"all comms": last_curve.total_s, "compute / comms": last_curve.ratio}
    else:
        columns |= {f"{first_curve.name} comms": first_curve.total_s, "best mesh comms": last_curve.total_s}
        columns |= {"compute / comms": last_curve.ratio, "best mesh": last_curve.meshes, "shape": last_curve.shapes}
    headings = [Heading("tokens", format_count), *(Heading(name, SHOWS.get(name, format_seconds)) for name in columns)]
    yield Table(headings, list(zip(map(round, last_curve.tokens), *columns.values(), strict=True))[::STEPS_PER_OCTAVE])
    crossing_columns: Facts = {"mesh": "name", "compute-bound": _crossing_words}
    if any(row["closed_form"] for row in crossings):
        crossing_columns["closed form"] = lambda row: (
            row["formula"] and "{} = {}".format(row["formula"], format_params(row["closed_form"]))
        )
        yield Symbols(FORMULAS)
        yield Condition("closed forms: How to Scale Your Model, section 5.1.4")
    yield Table.of(crossings, crossing_columns)
    if work.model is not None:
        yield Condition("below one sequence per data shard, a plan needs the axis context to cut a batch like this")


def _crossing_words(row: Facts) -> str:
    return "not crossed here" if row["tokens"] is None else f"from {format_params(row['tokens'])} tokens"


# -- picture --------------------------------------------------------------------------------------------


def _figure(title: str, work_text: str, curves: Sequence[Curve], crossings: Sequence[Facts]) -> Figure:
    comms_curves: list[CommsCurve] = []
    for curve, crossing_facts in zip(curves, crossings, strict=True):
        seconds_of = {curve.name: curve.total_s}
        if len(curves) == 1 and len(curve.comms_s) > 1:
            seconds_of = {**{f"over {axis}": seconds for axis, seconds in curve.comms_s.items()}, **seconds_of}
        for name, seconds in seconds_of.items():
            is_total = name == curve.name
            comms_curves.append(
                CommsCurve(
                    name=name,
                    seconds=seconds.tolist(),
                    compute_s=curve.compute_s.tolist(),
                    memory_bound=curve.memory_bound,
                    crossing=crossing_facts["tokens"] if is_total else None,
                    strong=is_total and curve is curves[-1],
                )
            )
    tokens_by_name = {row["name"]: row["tokens"] for row in (crossings[0], crossings[-1]) if row["tokens"] is not None}
    crossings_text = ", ".join(f"{name} {format_params(tokens)} tokens" for name, tokens in tokens_by_name.items())
    return comm_compute_figure(
        curves[0].tokens.tolist(),
        comms_curves,
        title=f"{title}: communication against compute",
        subtitle=f"{work_text.capitalize()}. Compute-bound from: {crossings_text or 'nowhere in this range'}.",
    )
