"""`meshwright sweep MODEL`: the best plan as one or two fields change: clusters, models, batch, any choice."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.api.rates import rates_for
from meshwright.calculators.sweeps.fields import SweptFields, read_fields
from meshwright.calculators.sweeps.points import Fixed, SweepPoint, records, sweep_points
from meshwright.cli.output import width
from meshwright.cli.shared import AXES, CALIBRATION, PNG, SEQ, SET
from meshwright.cli.verb import Options, argument, option, verb
from meshwright.core.dims import MESH_AXES
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_bytes, format_count, format_params, format_seconds
from meshwright.report.answer import Answer, Piece, Table
from meshwright.report.bars import memory_figure
from meshwright.report.figure import Figure, si_scale
from meshwright.report.heatmap import HeatCell, heatmap_figure, short_mesh
from meshwright.report.scaling import scaling_figure
from meshwright.spec.weights import num_params

WIDE = 100
"""Columns from which the table says more."""
CELL_WIDTH = 13
"""Columns of one column of a grid, the gap included."""
ABBREVIATED = "pp pipeline, dp data, ep expert, cp context, tp tensor"


class Figures(msgspec.Struct, frozen=True):
    """A figure of every point: what a picture calls it, how a person reads it, its unit there, and times what."""

    title: str
    show: Callable[[Any], str]
    unit: str | None = None
    times: float = 1.0


def _percent(share: float) -> str:
    return f"{share:.0%}"


FIGURES: dict[str, Figures] = {
    "mfu": Figures("MFU", _percent, "%"),
    "step_s": Figures("time per step", format_seconds, "s"),
    "tokens_per_s": Figures("tokens per second", format_params, ""),
    "hbm_bytes_per_chip": Figures("memory of a chip", format_bytes, "B"),
    "usd_per_token": Figures("dollars per million tokens", lambda usd: f"${1e6 * usd:.3g}", None, 1e6),
}
COLUMNS: dict[str, Any] = {
    "step": ("step_s", format_seconds),
    "tokens/s": ("tokens_per_s", format_params),
    "scaling": ("scaling", _percent),
    "MFU": ("mfu", _percent),
    "exposed": ("exposed_share", _percent),
    "memory": ("hbm_bytes_per_chip", format_bytes),
    "best mesh": ("axes", short_mesh),
}
MORE_COLUMNS: dict[str, Any] = {
    "remat": ("remat", lambda remat: remat if isinstance(remat, str) else "own"),
    "microbatches": "num_microbatches",
    "$/Mtoken": ("usd_per_token", lambda usd: f"{1e6 * usd:.3g}"),
    "bound by": "bound_by",
}
ITEMS: dict[str, str] = {
    "weights": "weights",
    "grads": "gradients",
    "optim.": "optimizer",
    "activ.": "activations",
    "logits": "logits",
    "comms": "communication",
    "work": "workspace",
}
"""Columns of ``--figure memory``: header -> item of memory."""


class Given(Options):
    models: str = argument(metavar="MODEL[,MODEL...]")
    texts: tuple[str, ...] = argument(metavar="[FIELD=VALUES]...")
    on: str = option("Clusters: h100:8x1..8x512 (doubling), or h100:8x4,8x8.")
    batch: str | None = option("Tokens a step (4Mi) or sequences (1024seq): the best plan of each point.")
    micro: str | None = option("Instead: the strategy as given, each replica on so many sequences at a time.")
    seq_len: str = SEQ
    weak: bool = option("Keep the batch per chip of the first cluster, not the batch.")
    figure: Literal["mfu", "step_s", "tokens_per_s", "hbm_bytes_per_chip", "usd_per_token", "memory"] = option(
        "What a grid of two fields and the picture show; memory: by item.", default="mfu"
    )
    axes: str | None = AXES
    pairs: tuple[str, ...] = SET
    calibration: Path | None = CALIBRATION
    png: Path | None = PNG


@verb(Given)
def command(given: Given) -> Answer:
    """The best plan of MODEL as one or two fields change: step time, tokens/s, MFU, memory, cost.

    A MODEL is a name, a config.json or a size in the proportions of Llama 3 (7B). Several models or clusters are a
    field; other fields are batch, seq_len, micro, a mesh axis (tensor=1,2,4), and every key of --set: remat=none,block.
    Numbers double in batch=1Mi..16Mi. remat, state, schedule, zero, context_attention, seq_len and tensor have usual
    values and may stand alone.
    """
    fields = _fields(given)
    varied = [name for name, values in fields.items() if len(values) > 1] or ["on"]
    if len(varied) > 2:
        raise InputError(f"{', '.join(varied)} are {len(varied)} fields. Sweep at most two at a time.")
    largest = {cluster.chip.name: cluster for cluster in fields["on"].values()}
    rates = {name: rates_for(cluster, given.calibration, fitted=True) for name, cluster in largest.items()}
    fixed = Fixed(pairs=given.pairs, axes=given.axes, rates=rates, weak=given.weak)
    points = sweep_points(fields, varied, fixed)
    if all(point.best is None for point in points):
        last = points[-1]
        raise CannotRunError(
            f"{last.setting.model.name} runs on none of the {len(points)} points: {last.reason} on "
            f"{last.setting.cluster.short_name}."
        )
    figure = "hbm_bytes_per_chip" if len(varied) > 1 and given.figure == "memory" else given.figure
    swept = _Swept(points=points, rows=records(points), varied=varied, figure=figure, weak=given.weak)
    return Answer(
        swept.facts() | {"fields": {name: list(fields[name]) for name in varied}},
        list(swept.text()),
        {given.png: swept.picture},
        [swept.raw()],
    )


def _fields(given: Given) -> SweptFields:
    """All fields, those of options with one value; a FIELD=VALUES goes before its option."""
    fields = read_fields(given.models, given.on, given.texts)
    for name in ("batch", "micro", "seq_len"):
        if name not in fields and getattr(given, name) is not None:
            fields[name] = {getattr(given, name): getattr(given, name)}
    if ("batch" in fields) == ("micro" in fields):
        raise InputError("give --batch 4Mi for the best plans, or --micro 1 for the strategy as it is given.")
    return fields


def _same(values: Iterable[Any]) -> Any:
    """The one value, or None for several."""
    found = list(values)
    return found[0] if all(one == found[0] for one in found) else None


class _Swept(msgspec.Struct, frozen=True, kw_only=True):
    """The points of a sweep and their records; ``varied`` are the one or two fields that change."""

    points: Sequence[SweepPoint]
    rows: Sequence[Mapping[str, Any]]
    varied: Sequence[str]
    figure: str
    weak: bool

    @property
    def limit(self) -> float | None:
        """Bytes of a chip; None if unknown, or if chips differ."""
        found = _same(point.setting.memory_limit for point in self.points)
        return None if found == float("inf") else found

    def facts(self) -> dict[str, Any]:
        """What all points share, or None where they differ, and the points, of two fields as ``cells``."""
        settings = [point.setting for point in self.points]
        models = {setting.model.name: setting.model for setting in settings}
        shared = ("model", "cluster", "seq_len", "tokens_per_step")
        return {
            **{name: _same(row[name] for row in self.rows) for name in shared},
            "axis": self.varied[0],
            "scaling": "weak" if self.weak else "strong",
            "models": [{"name": name, "params": num_params(model)} for name, model in models.items()],
            "clusters": list(dict.fromkeys(setting.cluster.short_name for setting in settings)),
            "limit_bytes": self.limit,
            "points" if len(self.varied) == 1 else "cells": self.rows,
        }

    def raw(self) -> Table:
        """Every figure of every point as it is, mesh axes and items of memory in columns of their own."""
        flat = [
            dict(row["values"])
            | {name: value for name, value in row.items() if name not in ("values", "axes", "memory", "label")}
            | {axis: (row["axes"] or {}).get(axis) for axis in MESH_AXES}
            | {f"{item}_bytes": (row["memory"] or {}).get(item) for item in ITEMS.values()}
            for row in self.rows
        ]
        return Table.of(flat, {name: name for name in flat[0]})

    # -- text -------------------------------------------------------------------------------------------

    def header(self, name: str) -> str:
        """What a table or an axis calls a field."""
        if name != "on":
            return name
        return "chips" if all(point.values["on"][0].isdigit() for point in self.points) else "cluster"

    @property
    def title(self) -> str:
        """``"llama3-8b on h100: strong scaling"``, ``"h100: MFU by model and chips"``."""
        settings = [point.setting for point in self.points]
        cluster = _same(one.cluster.short_name for one in settings) or _same(one.cluster.chip.name for one in settings)
        where = " on ".join(filter(None, (_same(one.model.name for one in settings), cluster)))
        if self.varied == ["on"]:
            what = f"{'weak' if self.weak else 'strong'} scaling"
        else:
            shown = FIGURES[self.figure].title if len(self.varied) > 1 else self.figure == "memory" and "memory"
            what = f"{shown or 'plans'} by {' and '.join(map(self.header, self.varied))}"
        return f"{where}: {what}" if where else what

    @property
    def shared(self) -> str:
        """What all points that run have in common beside model and cluster."""
        found = [(point.setting.job, point.best.strategy, point.num_chips) for point in self.points if point.best]
        words = [
            _same(f"{format_count(job.tokens_per_step)} tokens a step" for job, _, _ in found)
            or _same(f"{format_count(job.tokens_per_step / chips)} tokens a step and chip" for job, _, chips in found),
            _same(f"sequences of {format_count(job.seq_len)}" for job, _, _ in found),
            _same(short_mesh(strategy.mesh) for _, strategy, _ in found),
            _same(f"remat {strategy.remat}" for _, strategy, _ in found),
            _same(f"training state {strategy.state}" for _, strategy, _ in found),
        ]
        return ", ".join(filter(None, words))

    def text(self) -> Iterator[Piece]:
        """The figures as a table or a grid, why a point does not run, and what models of a size are."""
        yield f"{self.title}; {self.shared}"
        if len(self.varied) > 1:
            yield from self.grid()
        else:
            yield from self.memory() if self.figure == "memory" else self.table()
            name = self.varied[0]
            yield from (f"{self.header(name)} {one.values[name]}: {one.reason}" for one in self.points if not one.best)
        for model in {point.setting.model.name: point.setting.model for point in self.points}.values():
            if model.name.startswith("llama-"):
                count = format_params(num_params(model))
                yield f"{model.name}: {count} parameters, {model.num_layers} layers of width {model.d_model:,}"

    def table(self) -> Iterator[Piece]:
        """The figures of every point."""
        name, columns = self.varied[0], {**COLUMNS, **(MORE_COLUMNS if width() >= WIDE else {})}
        rows = [{"shown": row["values"][name], **row} for row in self.rows]
        yield Table.of(rows, {self.header(name): "shown", **columns})
        yield "scaling: tokens/s per chip beside the first row's; exposed: share of the step that waits for links"

    def memory(self) -> Iterator[Piece]:
        """What fills a chip at every point."""
        name = self.varied[0]
        rows = [{"shown": row["values"][name], **row, **row["memory"]} for row in self.rows if row["memory"]]
        unit, unit_name = si_scale(max(row["hbm_bytes_per_chip"] for row in rows), "B")

        def scaled(size: float) -> str:
            return f"{size / unit:.3g}"

        items = {header: (item, scaled) for header, item in ITEMS.items()}
        ends = {"total": ("hbm_bytes_per_chip", scaled), "fits": ("fits", lambda fits: "yes" if fits else "no")}
        yield Table.of(rows, {self.header(name): "shown", **items, **ends}, f"memory of a chip in {unit_name}")
        yield f"a chip holds {format_bytes(self.limit)}" if self.limit else "the memory of a chip is not known"

    def grid(self) -> Iterator[Piece]:
        """One figure with the mesh below it: rows are values of the second field, columns of the first."""
        first, second = self.varied
        cells = {(row["values"][first], row["values"][second]): self.lines(row) for row in self.rows}
        across, down = (list(dict.fromkeys(row["values"][name] for row in self.rows)) for name in self.varied)
        per_table = max(1, (width() - max(map(len, (*down, second))) - 2) // CELL_WIDTH)
        for start in range(0, len(across), per_table):
            names = across[start : start + per_table]
            rows = [[one, *("\n".join(cells[name, one]) for name in names)] for one in down]
            yield Table([self.header(second), *names], rows)
        yield f"columns are values of {self.header(first)}; {ABBREVIATED}; why not: see --json"

    def lines(self, row: Mapping[str, Any]) -> list[str]:
        """A figure and, below, the mesh in short form, broken between axes; or why nothing runs."""
        if row["axes"] is None:
            return [row["reason"].partition(":")[0].replace("does not", "no")[: CELL_WIDTH - 1]]
        value = row[self.figure]
        lines = ["-" if value is None else FIGURES[self.figure].show(value), ""]
        for axis in short_mesh(row["axes"]).split(" "):
            if lines[-1] and len(lines[-1]) + len(axis) + 1 >= CELL_WIDTH:
                lines.append(axis)
            else:
                lines[-1] = f"{lines[-1]} {axis}".strip()
        return lines

    # -- picture ----------------------------------------------------------------------------------------

    def picture(self) -> Figure:
        """Curves over one field, bars of memory, or the heatmap of two fields."""
        ran = [row for row in self.rows if row["axes"] is not None]
        words = {"title": self.title, "subtitle": self.shared}
        if len(self.varied) > 1:
            return self.heatmap()
        if self.figure == "memory":
            bars = {row["label"]: {item.replace("_", " "): v for item, v in row["memory"].items()} for row in ran}
            return memory_figure(bars, limit_bytes=self.limit, **words)
        return scaling_figure(ran, over=self.varied[0], limit_bytes=self.limit, **words)

    def heatmap(self) -> Figure:
        """Rows are values of the first field, columns of the second."""
        (first, second), shown = self.varied, FIGURES[self.figure]
        cells = []
        for row in self.rows:
            value, (headline, *below) = row[self.figure], self.lines(row)
            cells.append(
                HeatCell(
                    row=row["values"][first],
                    column=row["values"][second],
                    value=None if value is None else value * shown.times,
                    headline=headline,
                    lines=(headline, *below) if value is None else tuple(below),
                )
            )
        return heatmap_figure(
            cells,
            axes=(self.header(first), self.header(second)),
            value_title=shown.title,
            unit=shown.unit,
            title=self.title,
            subtitle=f"{self.shared}; {ABBREVIATED}",
        )
