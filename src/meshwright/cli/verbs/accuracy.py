"""`meshwright accuracy`: predictions beside published measurements."""

from pathlib import Path
from typing import Any

import click

from meshwright.accuracy.errors import Accuracy, accuracy
from meshwright.accuracy.records import read_records
from meshwright.cli.verb import Options, argument, option, verb
from meshwright.cli.verbs.accuracy_text import accuracy_text
from meshwright.core.errors import InputError, nearest
from meshwright.core.units import format_seconds
from meshwright.report.answer import Answer, Table


class Given(Options):
    file: Path = argument()
    worst: int = option("How many of the worst predictions to list.", type=click.IntRange(min=0), default=0)
    every: bool = option("List every record.", "--list")
    only: str | None = option("Only this group of records.", "--group")
    datasheet: bool = option("Data-sheet rates alone, without the fitted numbers.")
    png: Path | None = option("Draw measured against predicted.")
    cross_validate: bool = option("Fit anew and predict what each fit has not seen (minutes).")
    out: Path | None = option("Write numbers fitted on FILE (TOML; minutes).", "--fit")
    page: Path | None = option("Write the tables into this page.", "--write")


@verb(Given)
def command(given: Given) -> Answer:
    """Predict every measurement of FILE (one JSON object a line, see docs/accuracy.md) and compare."""
    records = read_records(given.file)
    chosen = tuple(record for record in records if given.only is None or record.group == given.only)
    if not chosen:
        groups = dict.fromkeys(record.group for record in records)
        raise InputError(f"{given.file} has no group {given.only!r}.{nearest(str(given.only), groups)}")
    if given.cross_validate or given.out or given.page:
        from meshwright.cli.verbs.accuracy_fit import validate

        return validate(chosen, out=given.out, page=given.page)
    found = accuracy(chosen, datasheet=given.datasheet)
    how = "data-sheet rates" if given.datasheet else "fitted numbers"
    worst = sorted(found.predictions, key=lambda one: -abs(one.error))[: given.worst]
    listed = Table.of(found.predictions, RECORDS)
    text = [*accuracy_text(found, title=how), *([Table.of(worst, WORST)] if worst else [])]
    text += [listed] if given.every else []
    return Answer(found.to_json(), text, {given.png: lambda: _figure(found, how)}, [listed])


RECORDS: dict[str, Any] = {
    "record": "id",
    "job": "job",
    "measured": ("measured_s", format_seconds),
    "predicted": ("predicted_s", format_seconds),
    "P10": ("low_s", format_seconds),
    "P90": ("high_s", format_seconds),
    "error": ("error", lambda error: f"{error:+.0%}"),
}


WORST: dict[str, Any] = {
    "worst": "id",
    "measured": ("measured_s", format_seconds),
    "predicted": ("predicted_s", format_seconds),
    "error": ("error", lambda error: f"{error:+.0%}"),
}


def _figure(found: Accuracy, how: str) -> Any:
    from meshwright.report.plans.accuracy import accuracy_figure

    at = found.summary()
    if not at.n:
        raise InputError("no record is predicted, so there is nothing to draw. Leave out --png, or name another file.")
    subtitle = f"{at.n:,} published training steps, {how}; grey: within 20%"
    return accuracy_figure(found.predictions, title="Predicted against measured", subtitle=subtitle)
