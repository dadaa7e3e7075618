"""`meshwright sweep MODEL`: the best plan as one or two fields change: clusters, models, batch, any choice."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, ClassVar, Literal

import msgspec

from meshwright.api.rates import rates_for
from meshwright.cli.output import width
from meshwright.cli.sweeps.fields import OWN, SweptFields, describe, read_fields
from meshwright.cli.sweeps.points import records, sweep_points
from meshwright.cli.verb import CALIBRATION, PNG, Options, argument, option, verb
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_bytes, format_count, format_params, format_seconds
from meshwright.plan.planner import assumption_notes, slots_note
from meshwright.report.answer import Answer, Condition, Facts, Piece, Symbols, Table
from meshwright.report.bars import memory_figure
from meshwright.report.figure import Figure, si_scale
from meshwright.report.sweeps import HeatCell, heatmap_figure, scaling_figure
from meshwright.spec.strategy import short_mesh
from meshwright.spec.weights import num_params

WIDE = 100
"""Width of the terminal from which the table has more columns."""
CELL_WIDTH = 13
"""Columns of one column of a grid, the gap included."""
TOO_LARGE = "(!)"
"""Mark of a value in a cell of a grid whose plan does not fit."""
FULLEST = "items are of the fullest moment, while the loss head, the layers or the embedding run"
NOTE = "exposed: communication without overlap, as a share of the step; scaling: tokens/s per chip over the first row's"
CHANGING = {"remat": "remat", "microbatches": "num_microbatches", "schedule": "schedule", "zero": "zero"}
"""What may differ between the plans of points, besides their meshes: words -> the field."""
AXES = {"pp": "pipeline", "dp": "data", "ep": "expert", "cp": "context", "tp": "tensor"}


class Figures(msgspec.Struct, frozen=True):
    """A figure of every point: its title, its format, its unit in a picture, and the factor to that unit."""

    title: str
    show: Callable[[Any], str]
    unit: str | None = None
    times: float = 1.0


def refusals(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns ``"2 of 8 points do not run: does not fit (2, nearest remat full: 130 GB of 80 GB)"``; "" if all run."""
    rows_of: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["reason"]:
            rows_of.setdefault(row["reason"].partition(":")[0], []).append(row)
    texts = []
    for kind, refused_rows in rows_of.items():
        nearest_row = min(refused_rows, key=lambda row: row["least_bytes"] or 0)
        nearest_word = "such as" if nearest_row["least_bytes"] is None else "nearest"
        detail_text = nearest_row["reason"].removeprefix(kind).rstrip(".")
        texts.append(f"{kind} ({len(refused_rows)}, {nearest_word} {nearest_row['label']}{detail_text})")
    return f"{sum(map(len, rows_of.values()))} of {len(rows)} points do not run: {'; '.join(texts)}" if texts else ""


PERCENT = "{:.0%}".format
FIGURES: dict[str, Figures] = {
    "mfu": Figures("MFU", PERCENT, "%"),
    "step_s": Figures("time per step", format_seconds, "s"),
    "tokens_per_s": Figures("tokens per second", format_params, ""),
    "hbm_bytes_per_chip": Figures("memory of a chip", format_bytes, "B"),
    "usd_per_token": Figures("dollars per million tokens", lambda usd: f"${1e6 * usd:.3g}", None, 1e6),
}
COLUMNS: Facts = {
    "step": "step_s",
    "tokens/s": ("tokens_per_s", format_params),
    "scaling": ("scaling", PERCENT),
    "MFU": ("mfu", PERCENT),
    "unmasked": ("mfu_causal", PERCENT),
    "exposed": ("exposed_share", PERCENT),
    "memory": "hbm_bytes_per_chip",
    "best mesh": ("axes", short_mesh),
}
MORE_COLUMNS: Facts = {
    "remat": ("remat", lambda remat: remat if isinstance(remat, str) else "own"),
    "microbatches": "num_microbatches",
    "$/Mtoken": (lambda row: row["usd_per_token"] and 1e6 * row["usd_per_token"], "{:.3g}".format),
    "bound by": "bound_by",
}
SHARED: dict[str, Callable[[Any], str]] = {
    "tokens_per_step": lambda tokens: f"{format_count(tokens)} tokens a step",
    "tokens_per_chip": lambda tokens: f"{format_count(tokens)} tokens a step and chip",
    "seq_len": lambda tokens: f"sequences of {format_count(tokens)}",
    "axes": short_mesh,
    "remat": lambda remat: f"remat {remat}",
    "state": lambda state: f"training state {state}",
}
"""Values that the points of a sweep can share, besides model and cluster, and their words."""
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
    batch: str | None = option("Tokens a step (4Mi) or sequences (1024seq), as batch=4Mi; several for a sweep.")
    seq_len: str | None = option("Tokens of a sequence, as seq_len=8Ki; several for a sweep.", "--seq")
    weak: bool = option("Keep the batch per chip of the first cluster, not the batch.")
    figure: Literal["mfu", "step_s", "tokens_per_s", "hbm_bytes_per_chip", "usd_per_token", "memory"] = option(
        "What a grid of two fields and the picture show; memory: by item.", default="mfu"
    )
    calibration: Path | None = CALIBRATION
    png: Path | None = PNG


@verb(Given)
def command(given: Given) -> Answer:
    """Find the best plan of MODEL as one or two fields change: step time, tokens/s, MFU, memory, cost.

    A MODEL is a name, a config.json or a size in the proportions of Llama 3 (7B). Several models or clusters are a
    field as well. A field with one value is fixed: batch=4Mi (tokens a step, or 64seq), seq_len=8Ki, a mesh axis
    (tensor=4), and every key of --set (remat=block). With micro=1 and no batch, strategies are priced as given: fsdp
    takes the chips that are left, each replica that many sequences at a time. Numbers double in batch=1Mi..16Mi. remat,
    state, schedule, zero, context_attention, seq_len and tensor need no values: they have usual ones.
    """
    text_by_option = {"batch": given.batch, "seq_len": given.seq_len}
    field_texts = (*(f"{name}={text}" for name, text in text_by_option.items() if text is not None), *given.texts)
    fields = read_fields(given.models, given.on, field_texts)
    varied_names = varied_fields(fields)
    largest_by_chip = {cluster.chip.name: cluster for cluster in fields["on"].values()}
    rates_of = {name: rates_for(cluster, given.calibration, fitted=True) for name, cluster in largest_by_chip.items()}
    points = sweep_points(fields, varied_names, rates_of, weak=given.weak)
    rows = records(points)
    if all(row["axes"] is None for row in rows):
        raise CannotRunError(f"{', '.join(fields['model'])}: {refusals(rows)}. Change them, or take more chips.")
    pairs = [(point.setting, point.best.strategy) for point in points if point.best]
    notes = dict.fromkeys(
        note for setting, strategy in pairs for note in (*assumption_notes(setting), *slots_note(setting, strategy))
    )
    figure_name = "hbm_bytes_per_chip" if len(varied_names) > 1 and given.figure == "memory" else given.figure
    sweep = Swept(rows=rows, varied=varied_names, figure=figure_name, weak=given.weak, held="micro" in fields)
    model_rows = [{"name": name, "params": num_params(model)} for name, model in fields["model"].items()]
    facts = {
        **{name: sweep.same(name) for name in ("model", "cluster", "seq_len", "tokens_per_step", "limit_bytes")},
        "axis": varied_names[0],
        "fields": {name: list(fields[name]) for name in varied_names},
        "scaling": "weak" if given.weak else "strong",
        "models": model_rows,
        "clusters": [cluster.short_name for cluster in fields["on"].values()],
        "points" if len(varied_names) == 1 else "cells": rows,
    }
    texts = [*map(describe, fields["model"].values()), *notes]
    raw = [{"memory_bytes" if name == "memory" else name: value for name, value in row.items()} for row in rows]
    return Answer(facts, [*sweep.text(), *map(Condition, filter(None, texts))], {given.png: sweep.picture}, [raw])


def varied_fields(fields: SweptFields) -> list[str]:
    """Returns the one or two fields that have several values, "on" if none has. Raises InputError for more."""
    varied_names = [name for name, values in fields.items() if len(values) > 1] or ["on"]
    if len(varied_names) > 2:
        raise InputError(f"{', '.join(varied_names)} are {len(varied_names)} fields. Sweep at most two at a time.")
    return varied_names


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a sweep; ``varied`` are the one or two fields that change. With ``held`` strategies are priced as
    given, and no plan is searched."""

    rows: Sequence[Mapping[str, Any]]
    varied: Sequence[str]
    figure: str
    weak: bool = False
    held: bool = False

    figures: ClassVar[Mapping[str, Figures]] = FIGURES
    words: ClassVar[Mapping[str, Callable[[Any], str]]] = SHARED
    noun: ClassVar[str] = "plans"
    symbols: ClassVar[Mapping[str, str]] = AXES

    def same(self, name: str) -> Any:
        """Returns the value of a figure that all points with this figure share; None if they differ."""
        values = [row[name] for row in self.rows if row[name] is not None]
        return values[0] if values and all(value == values[0] for value in values) else None

    # -- text -------------------------------------------------------------------------------------------

    def header(self, name: str) -> str:
        """Returns the name of a field in a table or on an axis."""
        if name != "on":
            return name
        return "chips" if all(row["values"]["on"][0].isdigit() for row in self.rows) else "cluster"

    @property
    def title(self) -> str:
        """``"llama3-8b on h100: strong scaling"``, ``"h100: MFU by model and chips"``."""
        place_text = " on ".join(filter(None, (self.same("model"), self.same("cluster") or self.same("chip"))))
        if self.varied == ["on"] and self.noun == "plans":
            subject = f"{'weak' if self.weak else 'strong'} scaling"
        else:
            label = self.figures[self.figure].title if len(self.varied) > 1 else self.figure == "memory" and "memory"
            subject = f"{label or self.noun} by {' and '.join(map(self.header, self.varied))}"
        return f"{place_text}: {subject}" if place_text else subject

    @property
    def shared(self) -> str:
        """Values that all points that run share, besides model and cluster."""
        names = [name for name in self.words if name != ("tokens_per_step" if self.weak else "tokens_per_chip")]
        return ", ".join(self.words[name](self.same(name)) for name in names if self.same(name) is not None)

    @property
    def changing(self) -> str:
        """What differs between the plans of the points besides the swept fields of the plan; "" if nothing does."""
        if self.noun != "plans" or {*self.varied} & {*OWN}:
            return ""
        rows = [row for row in self.rows if row["axes"] is not None]
        meshes = {short_mesh({axis: n for axis, n in row["axes"].items() if axis not in self.varied}) for row in rows}
        changed_words = [words for words, name in CHANGING.items() if len({str(row[name]) for row in rows}) > 1]
        changed_words = [words for words in ("axes", *changed_words) if words not in self.varied][len(meshes) < 2 :]
        if self.held:
            fsdp_varies = len({row["axes"].get("fsdp") for row in rows}) > 1
            return "fsdp takes the chips that are left; with fsdp=1 data takes them" if fsdp_varies else ""
        opening = "each value has its own best plan, with other"
        return f"{opening} {', '.join(changed_words)}; micro=1 in place of a batch holds them" if changed_words else ""

    def text(self) -> Iterator[Piece]:
        """Yields the figures as a table or a grid, and why a point does not run."""
        yield f"{self.title}; {self.shared}"
        yield from filter(None, [self.changing])
        if self.figure != "memory":
            yield Symbols(self.symbols)
        if len(self.varied) > 1:
            yield from self.grid()
            return
        (name,) = self.varied
        first_column = {self.header(name): f"values/{name}"}
        yield from self.memory(first_column) if self.figure == "memory" else self.table(first_column)
        for row in self.rows:
            if row["reason"]:
                yield f"{self.header(name)} {row['values'][name]}: {row['reason']}"

    def table(self, first: Facts) -> Iterator[Piece]:
        """Yields the figures of every point."""
        exceeds_peak = any((row["mfu"] or 0) > 1 for row in self.rows)
        shown_columns = {key: column for key, column in COLUMNS.items() if key != "unmasked" or exceeds_peak}
        yield Table.of(self.rows, {**first, **shown_columns, **(MORE_COLUMNS if width() >= WIDE else {})})
        yield Condition(NOTE)

    def memory(self, first: Facts) -> Iterator[Piece]:
        """Yields the memory of a chip by item at every point."""
        unit_bytes, unit_name = si_scale(max(row["hbm_bytes_per_chip"] or 0.0 for row in self.rows), "B")

        def scaled(size: float) -> str:
            return f"{size / unit_bytes:.3g}"

        item_columns = {header: (f"memory/{item}", scaled) for header, item in ITEMS.items()}
        total_cols = {"total": ("hbm_bytes_per_chip", scaled), "fits": ("fits", lambda fits: "yes" if fits else "no")}
        yield Table.of(self.rows, first | item_columns | total_cols, f"memory of a chip in {unit_name}")
        limit_bytes = self.same("limit_bytes")
        yield f"a chip holds {format_bytes(limit_bytes)}" if limit_bytes else "the memory of a chip is not known"
        yield Condition(f"{FULLEST}, so that an item can jump from row to row")

    def grid(self) -> Iterator[Piece]:
        """Yields one figure with the mesh below it: rows are values of the second field, columns of the first."""
        col_key, row_key = self.varied
        cells = {}
        for row in self.rows:
            headline, *mesh_lines = self.lines(row)
            mark = f" {TOO_LARGE}" if row["axes"] is not None and row.get("fits") is False else ""
            cells[row["values"][col_key], row["values"][row_key]] = "\n".join([headline + mark, *mesh_lines])
        columns, rows = (list(dict.fromkeys(row["values"][name] for row in self.rows)) for name in self.varied)
        num_cols = max(1, (width() - max(map(len, (*rows, row_key))) - 2) // CELL_WIDTH)
        for start_col in range(0, len(columns), num_cols):
            names = columns[start_col : start_col + num_cols]
            yield Table([self.header(row_key), *names], [[row, *(cells[name, row] for name in names)] for row in rows])
        mark = f"{TOO_LARGE} does not fit; " * any(TOO_LARGE in text for text in cells.values())
        yield f"columns are values of {self.header(col_key)}; {mark}{refusals(self.rows) or 'all run'}"

    def lines(self, row: Mapping[str, Any]) -> list[str]:
        """Returns a figure and, below, the mesh in short form, broken between axes; or why nothing runs."""
        if row["axes"] is None:
            return [row["reason"].partition(":")[0].replace("does not", "no")[: CELL_WIDTH - 1]]
        value = row[self.figure]
        value_text = "-" if value is None else self.figures[self.figure].show(value)
        return [value_text, *wrap(self.mesh(row), CELL_WIDTH - 1)]

    def mesh(self, row: Mapping[str, Any]) -> str:
        """Returns the mesh in short form."""
        return short_mesh(row["axes"])

    # -- picture ----------------------------------------------------------------------------------------

    def picture(self) -> Figure:
        """Returns curves over one field, bars of memory, or the heatmap of two fields."""
        rows = [row for row in self.rows if row["axes"] is not None]
        notes = [self.shared, self.changing, FULLEST if self.figure == "memory" else ""]
        words, limit_bytes = {"title": self.title, "subtitle": "; ".join(filter(None, notes))}, self.same("limit_bytes")
        if len(self.varied) > 1:
            return self.heatmap()
        if self.figure == "memory":
            bytes_of = {row["label"]: {item.replace("_", " "): v for item, v in row["memory"].items()} for row in rows}
            return memory_figure(bytes_of, limit_bytes=limit_bytes, **words)
        return scaling_figure(rows, over=self.varied[0], limit_bytes=limit_bytes, **words)

    def heatmap(self) -> Figure:
        """Returns a heatmap: rows are values of the first field, columns of the second."""
        figure, (col_key, row_key) = self.figures[self.figure], self.varied
        cells = []
        for row in self.rows:
            value = None if row[self.figure] is None else row[self.figure] * figure.times
            cell_values, is_fitting = (row["values"][col_key], row["values"][row_key]), row.get("fits") is not False
            cells.append(HeatCell(*cell_values, value, self.lines(row), is_fitting or value is None))
        return heatmap_figure(
            cells,
            axes=[self.header(name) for name in self.varied],
            value_title=figure.title,
            unit=figure.unit,
            title=self.title,
            subtitle="; ".join([self.shared, ", ".join(map(" ".join, AXES.items()))]),
        )
