"""`meshwright accuracy`: predictions beside published measurements."""

from collections.abc import Sequence
from pathlib import Path

import click

from meshwright.accuracy.errors import Accuracy, Prediction, accuracy
from meshwright.accuracy.records import read_records
from meshwright.cli.output import emit_json, json_option, print_table, say
from meshwright.cli.verbs.accuracy_text import print_accuracy
from meshwright.core.errors import InputError, nearest
from meshwright.core.units import format_seconds


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--worst", type=click.IntRange(min=0), default=0, help="How many of the worst predictions to list.")
@click.option("--group", "only", help="Only this group of records.")
@click.option("--datasheet", is_flag=True, help="Data-sheet rates alone, without the fitted numbers.")
@click.option("--png", type=click.Path(path_type=Path), help="Draw measured against predicted.")
@click.option("--cross-validate", is_flag=True, help="Fit anew and predict what each fit has not seen (minutes).")
@click.option("--fit", "out", type=click.Path(path_type=Path), help="Write numbers fitted on FILE (TOML; minutes).")
@click.option("--write", "page", type=click.Path(path_type=Path), help="Write the tables into this page.")
@json_option
def command(
    file: Path,
    worst: int,
    only: str | None,
    datasheet: bool,
    png: Path | None,
    cross_validate: bool,
    out: Path | None,
    page: Path | None,
    as_json: bool,
) -> None:
    """Predict every measurement of FILE (one JSON object a line, see docs/accuracy.md) and compare."""
    records = read_records(file)
    chosen = tuple(record for record in records if only is None or record.group == only)
    if not chosen:
        groups = dict.fromkeys(record.group for record in records)
        raise InputError(f"{file} has no group {only!r}.{nearest(str(only), groups)}")
    if cross_validate or out or page:
        from meshwright.cli.verbs.accuracy_fit import validate

        validate(chosen, out=out, page=page, as_json=as_json)
        return
    found = accuracy(chosen, datasheet=datasheet)
    if png:
        _draw(found, png, datasheet=datasheet)
    if as_json:
        emit_json(found.to_json())
        return
    print_accuracy(found, title="data-sheet rates" if datasheet else "fitted numbers")
    if worst:
        _print_worst(found.predictions, worst)


def _print_worst(predictions: Sequence[Prediction], number: int) -> None:
    worst = sorted(predictions, key=lambda one: -abs(one.error))[:number]
    print_table(
        ["worst", "measured", "predicted", "error"],
        [
            [one.id, format_seconds(one.measured_s), format_seconds(one.predicted_s), f"{one.error:+.0%}"]
            for one in worst
        ],
    )


def _draw(found: Accuracy, png: Path, *, datasheet: bool) -> None:
    from meshwright.report.figure import save
    from meshwright.report.plans.accuracy import accuracy_figure

    at = found.summary()
    if not at.n:
        raise InputError("no record is predicted, so there is nothing to draw. Leave out --png, or name another file.")
    how = "data-sheet rates" if datasheet else "fitted numbers"
    subtitle = f"{at.n:,} published training steps, {how}; grey: within 20%"
    save(accuracy_figure(found.predictions, title="Predicted against measured", subtitle=subtitle), png)
    say(f"wrote {png}")
