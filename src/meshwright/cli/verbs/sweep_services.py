"""`meshwright sweep services MODEL`: the best service as one or two fields change: lengths, targets, load, clusters."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from meshwright.api.rates import rates_for
from meshwright.cli.fields import field_value, parse_fields, take_axes, with_fields
from meshwright.cli.output import three_digits, width
from meshwright.cli.sweeps.fields import combinations, read_fields
from meshwright.cli.verb import CALIBRATION, PNG, Options, argument, option, verb
from meshwright.cli.verbs.sweep_plans import WIDE, Figures, Swept, refusals, varied_fields
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.progress import tracked
from meshwright.core.units import format_count, format_seconds, parse_count
from meshwright.plan.serving.fleet import ENGINE_SYMBOLS
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.service import Service, parse_load, parse_target
from meshwright.plan.serving.storing import StoredDtypes, stored_dtypes
from meshwright.report.answer import Answer, Facts, Piece, Table
from meshwright.report.figure import Figure
from meshwright.report.sweeps import service_figure
from meshwright.spec.calibration import Calibration

SERVED: dict[str, tuple[str, Callable[..., Any]]] = {
    "prompt": ("prompt_len", lambda text, what: parse_count(text, what=what, least=1)),
    "output": ("output_len", lambda text, what: parse_count(text, what=what, least=1)),
    "ttft": ("ttft_s", parse_target),
    "tpot": ("tpot_s", parse_target),
    "rate": ("requests_per_s", parse_load),
    "prefix_hits": ("prefix_share", lambda text, what: field_value(text)),
}
"""Field of a sweep -> the field of `Service`, and the function that parses its value."""
OWN = ("model", "on", *SERVED, "weights", "kv")

FIGURES: dict[str, Figures] = {
    "tokens_per_s_per_chip": Figures("output tokens/s per chip", three_digits, ""),
    "tpot_s": Figures("time per output token", format_seconds, "s"),
    "ttft_s": Figures("time to the first token", format_seconds, "s"),
    "usd_per_m_output": Figures("dollars per million output tokens", lambda usd: f"${usd:.3g}"),
    "num_chips": Figures("chips", format_count),
}
OF_PLAN = (*FIGURES, "usd_per_m_input", "bound_by", "weights", "has_pools")
COLUMNS: Facts = {
    "engines": "engines",
    "batch": "batch_seqs",
    "stored": lambda row: row["axes"] and StoredDtypes(row["weights"], row["kv"]).words.replace(", KV", ","),
    "prefill": "prefill_engines",
    "TTFT": "ttft_s",
    "TPOT": "tpot_s",
    "tok/s per chip": ("tokens_per_s_per_chip", three_digits),
    "$/M out": ("usd_per_m_output", "{:.3g}".format),
}
MORE_COLUMNS: Facts = {
    "$/M in": ("usd_per_m_input", "{:.3g}".format),
    "chips used": "num_chips",
    "bound by": "bound_by",
}
REFUSED = {"does not fit": "does not fit", "misses": "none meets", "few chips": "need at least", "too long": "longer"}
"""Kind of a refusal -> words of its message."""


class Given(Options):
    models: str = argument(metavar="MODEL[,MODEL...]")
    texts: tuple[str, ...] = argument(metavar="[FIELD=VALUES]...")
    on: str = option("Clusters: v5e:4x4..16x16 (doubling), or h100:8x4,8x8.")
    figure: Literal["tokens_per_s_per_chip", "tpot_s", "ttft_s", "usd_per_m_output", "num_chips"] = option(
        "What a grid of two fields and its picture show.", default="tokens_per_s_per_chip"
    )
    calibration: Path | None = CALIBRATION
    png: Path | None = PNG


@verb(Given)
def command(given: Given) -> Answer:
    """Find the best service of MODEL as one or two fields change: TTFT, TPOT, tokens/s per chip, cost, what binds it.

    Fields: prompt and output (tokens, needed), ttft, tpot, rate, prefix_hits, weights and kv (dtypes), sizes of
    engines (tensor=8, expert=8), and fields of the model (model.num_kv_heads=1,8). Numbers double in prompt=1Ki..64Ki.
    """
    fields = read_fields(given.models, given.on, given.texts, OWN)
    for name in ("prompt", "output"):
        if name not in fields:
            raise InputError(f"a sweep of services needs {name}. Write {name}=512, or several values.")
    varied_names, points = varied_fields(fields), combinations(fields)
    rates = {cluster.chip.name: rates_for(cluster, given.calibration, fitted=True) for cluster in fields["on"].values()}
    rows = [_point(texts, values, varied_names, rates) for texts, values in tracked(points, "pricing points")]
    if all(row["axes"] is None for row in rows):
        raise CannotRunError(f"{', '.join(fields['model'])}: {refusals(rows)}. Change them, or take more chips.")
    sweep = SweptServices(rows=rows, varied=varied_names, figure=given.figure)
    facts = {
        **{name: sweep.same(name) for name in ("model", "cluster")},
        "fields": {name: list(fields[name]) for name in varied_names},
        "points" if len(varied_names) == 1 else "cells": rows,
    }
    return Answer(facts, list(sweep.text()), {given.png: sweep.picture}, [rows])


class SweptServices(Swept, frozen=True, kw_only=True):
    """The records of a sweep of services."""

    figures = FIGURES
    words: ClassVar = {"held": "{}".format}
    noun = "services"
    symbols: ClassVar = ENGINE_SYMBOLS

    def mesh(self, row: Mapping[str, Any]) -> str:
        """Returns the axes and the layout of the engines that generate."""
        return str(row["engines"]).partition(" x ")[2]

    def table(self, first: Facts) -> Iterator[Piece]:
        """Yields the figures of every point."""
        has_rate = "rate" in self.rows[0]["values"] or "rate " in self.rows[0]["held"]
        columns = {name: column for name, column in COLUMNS.items() if not (has_rate and name == "tok/s per chip")}
        columns |= {"chips used": "num_chips"} if has_rate else {}
        yield Table.of(self.rows, {**first, **columns, **(MORE_COLUMNS if width() >= WIDE else {})}).known()

    def picture(self) -> Figure:
        """Returns curves over one field, or the heatmap of two."""
        if len(self.varied) > 1:
            return self.heatmap()
        served_rows = [row for row in self.rows if row["axes"] is not None]
        return service_figure(served_rows, over=self.varied[0], title=self.title, subtitle=self.shared)


def _point(text_of: dict[str, str], point: Facts, varied: list[str], rates: Mapping[str, Calibration | None]) -> Facts:
    """Returns the best service of one combination of values, or why there is none."""
    fields_by_section = parse_fields(
        [f"{name}={value}" for name, value in point.items() if name not in OWN], sections=("model", "strategy")
    )
    mesh_axes = take_axes(None, fields_by_section["strategy"])
    for name in fields_by_section["strategy"]:
        raise InputError(f"{name} is no field of a service. Sweep {', '.join(SERVED)}, weights, kv, tensor or expert.")
    service = Service(**{field: read(point[key], what=key) for key, (field, read) in SERVED.items() if key in point})
    cluster, model = point["on"], with_fields(point["model"], "model", fields_by_section["model"])
    varied_texts = {name: text_of[name] for name in varied}
    row: Facts = {
        "label": ", ".join(f"{name} {value}" for name, value in varied_texts.items()),
        "values": varied_texts,
        "model": model.name,
        "cluster": cluster.short_name,
        "chip": cluster.chip.name,
        "held": ", ".join(f"{name} {text_of[name]}" for name in point if name not in (*varied, "model", "on")),
        **dict.fromkeys(
            ("reason", "least_bytes", "kv", "batch_seqs", "axes", "engines", "num_engines", "prefill_engines", *OF_PLAN)
        ),
    }
    dtypes = stored_dtypes(*((point[name],) if name in point else () for name in ("weights", "kv")), chip=cluster.chip)
    try:
        setting = service_setting(model, cluster, rates.get(cluster.chip.name))
        best_plan = plan_service(setting, service, stored=dtypes, axes=mesh_axes).plans[0]
    except (CannotRunError, InputError) as error:
        reason_kind = next((reason_kind for reason_kind, words in REFUSED.items() if words in str(error)), "no engine")
        return {**row, "reason": f"{reason_kind}: {error}"}
    generate, prefill = best_plan.generate, best_plan.prefill
    figure_of = {**best_plan.to_json(), "bound_by": generate.bound_by}
    return {
        **row,
        **{name: figure_of[name] for name in OF_PLAN},
        "kv": best_plan.cache,
        "batch_seqs": generate.batch_seqs,
        "axes": dict(generate.strategy.mesh),
        "engines": generate.words,
        "prefill_engines": prefill.words if best_plan.has_pools else "same",
    }
