"""`meshwright accuracy`: predictions against published measurements."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from meshwright.accuracy.batches import calibrations
from meshwright.accuracy.cases import NUM_FOLDS, Case, Unpredicted, cases_of, training_case
from meshwright.accuracy.errors import Accuracy, accuracy, accuracy_of, summarise
from meshwright.accuracy.records import Record, read_records
from meshwright.cli.output import say
from meshwright.cli.verb import Options, argument, option, verb
from meshwright.core.errors import InputError, nearest
from meshwright.core.files import write_text_whole
from meshwright.core.toml_file import dump_toml
from meshwright.core.units import counted
from meshwright.report.answer import Answer, Condition, Piece, Table, TableColumns, as_markdown
from meshwright.spec.efficiency import KERNEL_NUMBERS, FittedNumbers, fitted_numbers
from meshwright.spec.weights import has_frozen_matrices

KERNELS = Path("benchmarks/data/kernels")
PUBLISHED = Path("benchmarks/data/published_training.jsonl")
BEGIN = "<!-- table: {} -->"
END = "<!-- end -->"
HEADINGS = {
    "cross-validation": f"{NUM_FOLDS}-fold cross-validation over configurations",
    "groups": "Leaving out each group in turn",
    "fitted": "The numbers of the product, fitted on all records",
}
GROUPS_SHOWN = 15
"""Groups that a text lists without ``--all``."""
MAX_NAMED = 6
"""Most records that a line of reasons names one by one."""


class Given(Options):
    file: Path = argument(default=PUBLISHED)
    worst: int = option("How many of the worst predictions to list.", type=click.IntRange(min=0), default=0)
    every: bool = option("List every record.", "--list")
    only: str | None = option("Only this group of records.", "--group")
    datasheet: bool = option("Data-sheet rates alone, without the fitted numbers.")
    png: Path | None = option("Draw measured against predicted.")
    cross_validate: bool = option("Fit again, and predict records that a fit has not seen (minutes).", extra="run")
    out: Path | None = option("Fit numbers on FILE and write them (TOML; minutes).", "-o", "--out", extra="run")
    page: Path | None = option("Fit, and write the tables into this page.", extra="run")
    kernels: bool = option("Kernels instead: FILE is a folder of tables [benchmarks/data/kernels].", extra="run")


@verb(Given)
def command(given: Given) -> Answer:
    """Predict every measurement of FILE and compare: one JSON object a line, see docs/accuracy.md.

    The default FILE has the published steps of this repository: benchmarks/data/published_training.jsonl.
    """
    default_path = KERNELS if given.kernels else PUBLISHED
    if given.file == PUBLISHED and not default_path.exists():
        raise InputError(f"{default_path}, the default, is in a checkout of meshwright. Work there, or give a FILE.")
    if given.kernels:
        return _kernels(given)
    records = read_records(given.file)
    chosen_records = tuple(record for record in records if given.only is None or record.group == given.only)
    if not chosen_records:
        groups = dict.fromkeys(record.group for record in records)
        raise InputError(f"{given.file} has no group {given.only!r}.{nearest(str(given.only), groups)}")
    if {record.kind for record in chosen_records} & {"decode", "train"} == {"decode"}:
        return _served(given, chosen_records)
    if given.cross_validate or given.out or given.page:
        return _fitted(given, chosen_records)
    result = accuracy(chosen_records, datasheet=given.datasheet)
    basis = "data-sheet rates" if given.datasheet else "fitted numbers"
    table = Table.of(result.predictions, RECORDS)
    pieces = [*_accuracy_text(result, title=basis)]
    if given.worst:
        worst_predictions = sorted(result.predictions, key=lambda prediction: -abs(prediction.error))[: given.worst]
        pieces.append(Table.of(worst_predictions, {"worst": "id", **{name: RECORDS[name] for name in SHOWN_OF_WORST}}))
    pieces += [table] if given.every else []
    return Answer(result.to_json(), pieces, {given.png: lambda: _figure(result, basis)}, [table, _summaries(result)])


RECORDS: TableColumns = {
    "record": "id",
    "job": "job",
    "measured": "measured_s",
    "predicted": "predicted_s",
    "P10": "low_s",
    "P90": "high_s",
    "error": ("error", "{:+.0%}".format),
}
SHOWN_OF_WORST = ("measured", "predicted", "error")


def _figure(result: Accuracy, basis: str) -> Any:
    from meshwright.report.plans.measured import accuracy_figure

    summary = result.summary()
    if not summary.n:
        raise InputError("no record is predicted, so there is nothing to draw. Leave out --png, or name another file.")
    subtitle = f"{summary.n:,} published training steps, {basis}; grey: within 20%"
    return accuracy_figure(result.predictions, title="Predicted against measured", subtitle=subtitle)


def _accuracy_text(result: Accuracy, *, title: str) -> Iterator[Piece]:
    """Yields the table by group, and the records that were not predicted."""
    yield _summaries(result, f"{title}: errors")
    pick = result.regret()
    if pick.regret is not None:
        yield (
            f"the configuration predicted fastest takes {pick.regret:.1%} longer than the fastest in the "
            f"mean of {counted(pick.num_jobs, 'job')}, and is right in {pick.right:.0%}; a random one takes "
            f"{pick.random:.0%} longer"
        )
    unadapted = [prediction for prediction in result.predictions if not prediction.adapters]
    if unadapted and (rest := len(result.predictions) - len(unadapted)):
        mape, runs_text = summarise(unadapted).mape, counted(rest, "run")
        yield Condition(
            f"all: with {runs_text} of adapters, in no fit; the other {len(unadapted):,} have MAPE {mape:.1%}"
        )
    unfitted_predictions = [prediction for prediction in result.predictions if not prediction.fitted]
    if unfitted_predictions and len(unfitted_predictions) < len(result.predictions):
        chips_text = ", ".join(dict.fromkeys(prediction.chip for prediction in unfitted_predictions))
        yield Condition(f"by data-sheet rates: {len(unfitted_predictions):,}, nothing is fitted for {chips_text}")
    for reason, ids in result.reasons().items():
        ids_text = ", ".join(ids[:MAX_NAMED]) if len(ids) <= MAX_NAMED else f"{ids[0]} and {len(ids) - 1:,} more"
        yield Condition(f"not predicted: {len(ids):,}, {reason} ({ids_text})")


def _summaries(result: Accuracy, title: str = "") -> Table:
    """Returns one row per group with a prediction, and rows of core training and of all records.

    With a title, for a text, the latter are first, and rows beyond `GROUPS_SHOWN` are printed with ``--all``.
    """
    groups = [(group or "no group", result.summary(group=group)) for group in result.groups]
    core_name = "core training" if result.what == "train" else f"core {result.what}"
    totals = [(f"{core_name}{' of ' * bool(date)}{date}", summary) for date, summary in result.cores.items()]
    totals += [("all", result.summary())]
    groups = [(group, summary) for group, summary in groups if summary.n]
    if result.what == "decode":
        kinds = {kind: [row for row in result.predictions if row.group.endswith(kind)] for kind in ("dense", "experts")}
        groups += [(kind, summarise(predictions)) for kind, predictions in kinds.items() if predictions]
    summaries = [*reversed(totals), *groups] if title else [*groups, *totals]
    format_percent, format_signed, format_whole = "{:.1%}".format, "{:+.1%}".format, "{:.0%}".format
    columns: TableColumns = {
        "group": "group",
        "records": "n",
        "MAPE": ("mape", format_percent),
        "median": ("median", format_percent),
        "bias": ("bias", format_signed),
        "interval holds": ("coverage", format_whole),
    }
    rows = ({"group": name, **msgspec.structs.asdict(summary)} for name, summary in summaries)
    return Table.of(rows, columns, title, GROUPS_SHOWN if title else None)


# -- kernels ---------------------------------------------------------------------------------------------


def _kernels(given: Given) -> Answer:
    """Compares measured kernels with predictions for shapes that were not fitted; -o fits the numbers again."""
    from meshwright.accuracy import kernels

    other_options = ("worst", "every", "only", "datasheet", "png", "cross_validate")
    if any(getattr(given, name) for name in other_options):
        raise InputError("--kernels goes with -o, --page and --json alone: its errors are cross-validated as they are.")
    folder = KERNELS if given.file == PUBLISHED else given.file
    if given.page:
        _with_tables(given.page, {"kernels": ""})
    kernel_groups, omitted = kernels.read_kernels(folder)
    num_rows = sum(len(group.measured_s) for group in kernel_groups)
    fitted = fitted_numbers(KERNEL_NUMBERS)
    if given.out:
        fitted = _fitted_numbers(f"{num_rows:,} measured kernels of {folder}", kernels.fit_kernels(kernel_groups))
    errors = kernels.kernel_errors(kernel_groups, fitted.numbers)
    _write(given, fitted, {"kernels": Table.of(errors, KERNEL_COLUMNS)})
    table = Table.of(errors, KERNEL_COLUMNS, f"kernels, on shapes held out in {NUM_FOLDS} folds")
    rows = [row for row in errors if row.goal]
    pieces: list[Piece] = [
        table,
        f"{sum(row.goal == 'yes' for row in rows)} of {len(rows)} chips and operations with {kernels.FEWEST_ROWS} rows "
        f"or more reach their goal: a median of {kernels.GOAL:.0%}, in token generation {kernels.GENERATION_GOAL:.0%}",
        f"{len(fitted.numbers)} numbers, {fitted.source}, {fitted.date}",
        *(f"left out: {num_omitted:,}, {reason}" for reason, num_omitted in omitted.items()),
    ]
    facts = {"kernels": [msgspec.structs.asdict(row) for row in errors], "left_out": omitted, "numbers": fitted.numbers}
    return Answer(facts, pieces)


KERNEL_COLUMNS: TableColumns = {
    "operation": "operation",
    "chip": "chip",
    "rows": "rows",
    "median": ("median", "{:.1%}".format),
    "MAPE": ("mape", "{:.1%}".format),
    "fitted": ("fitted", "{:.1%}".format),
    "goal": "goal",
    "source": "source",
}


# -- serving ---------------------------------------------------------------------------------------------

SERVED = {
    "served": f"{NUM_FOLDS}-fold cross-validation over configurations",
    "served-chips": "Leaving out each chip in turn",
    "served-engines": "Leaving out each engine in turn",
    "served-fitted": "The numbers of the product, fitted on all records",
    "served-ttft": "Times to the first token, simulated with queues by numbers of other folds",
    "served-tpot": "Times per output token of the same simulations",
    "pools-ttft": "Times to the first token of disaggregated services, by numbers fitted to engines alone",
    "pools-tpot": "Times per output token of disaggregated services",
}


def _served(given: Given, records: tuple[Record, ...]) -> Answer:
    """Compares times per output token with predictions, by the shipped numbers or by numbers fitted again."""
    from meshwright.accuracy.queueing import pooled_accuracy, queued_accuracy
    from meshwright.accuracy.served import fit_served, served_accuracy

    if not (given.cross_validate or given.out or given.page):
        if given.datasheet or given.png or given.every or given.worst:
            raise InputError("a FILE of serving goes with --group, -o, --page, --cross-validate and --json alone.")
        result = served_accuracy(records)
        return Answer(result.to_json(), [*_accuracy_text(result, title="fitted numbers")], {}, [_summaries(result)])
    if given.page:
        _with_tables(given.page, dict.fromkeys(SERVED, ""))
    refit = fit_served(records)
    say("simulating the queues of every client")
    numbers = refit.numbers
    accuracy_by_name = refit.errors | queued_accuracy(refit.cases, refit.held_out, refit.unpredicted)
    accuracy_by_name |= pooled_accuracy(records, numbers)
    num_records = accuracy_by_name["served"].summary().n
    return _refitted(given, f"{num_records:,} published times per output token", numbers, accuracy_by_name)


# -- fitting --------------------------------------------------------------------------------------------


def _fitted(given: Given, records: tuple[Record, ...]) -> Answer:
    """Fits the numbers again, and predicts every record by numbers that have not seen it."""
    all_cases, unpredicted_records = cases_of(records, training_case)
    # numbers are for steps that train all weights
    cases = [case for case in all_cases if not has_frozen_matrices(case.setting.model)]
    if len({case.record.group for case in cases}) < 2 or len(cases) < 2 * NUM_FOLDS:
        raise InputError(f"{len(cases)} records can be predicted; a fit needs at least {2 * NUM_FOLDS} of two groups.")
    # A page that cannot be written is refused before minutes are spent on the fit.
    if given.page:
        _with_tables(given.page, dict.fromkeys(HEADINGS, ""))
    suffix = f"; left out: {len(all_cases) - len(cases):,} that train adapters" if len(cases) < len(all_cases) else ""
    say(f"fitting on {len(cases):,} records{suffix}")
    numbers, result_by_name = _fit_anew(cases, unpredicted_records, with_groups=bool(given.page or not given.out))
    return _refitted(given, f"{len(cases):,} published training steps", numbers, result_by_name)


def _refitted(given: Given, data_text: str, numbers: dict[str, float], errors: Mapping[str, Accuracy]) -> Answer:
    """Returns numbers fitted on ``data_text`` and the errors by heading, which it writes to -o and --page."""
    _write(given, _fitted_numbers(data_text, numbers), {name: _summaries(fit) for name, fit in errors.items()})
    pieces = [piece for name, fit in errors.items() for piece in _accuracy_text(fit, title=(HEADINGS | SERVED)[name])]
    facts = {name: fit.to_json() for name, fit in errors.items()} | {"numbers": numbers}
    return Answer(facts, [*pieces, Table(["number", "value"], [*numbers.items()])])


def _fitted_numbers(data_text: str, numbers: dict[str, float]) -> FittedNumbers:
    source = f"fitted on {data_text}, see docs/accuracy.md"
    return FittedNumbers(date=date.today().isoformat(), source=source, numbers=numbers)


def _write(given: Given, fitted: FittedNumbers, table_by_name: Mapping[str, Table]) -> None:
    """Writes numbers to -o and tables into --page, where these are given, and says so."""
    if given.out:
        write_text_whole(given.out, dump_toml(fitted))
        fitted_numbers.cache_clear()
        say(f"wrote {given.out}")
    if given.page:
        markdown_by_name = {name: as_markdown(table) for name, table in table_by_name.items()}
        write_text_whole(given.page, _with_tables(given.page, markdown_by_name))
        say(f"wrote {given.page}")


def _with_tables(page: Path, table_by_name: Mapping[str, str]) -> str:
    """Returns the text of the page with these tables between their marks. Raises InputError for missing marks."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {page}: {error.strerror}. Name the page that the tables go into.") from None
    for name, table in table_by_name.items():
        opening = BEGIN.format(name)
        head_text, found_mark, rest_text = text.partition(opening)
        _, end_mark, tail_text = rest_text.partition(END)
        if not found_mark or not end_mark:
            raise InputError(f"{page} has no place for the table {name!r}. Put '{opening}' and '{END}' where it goes.")
        text = f"{head_text}{opening}\n{table}{end_mark}{tail_text}"
    return text


def _fit_anew(
    cases: Sequence[Case], unpredicted: Sequence[Unpredicted], *, with_groups: bool
) -> tuple[dict[str, float], dict[str, Accuracy]]:
    """Returns the numbers fitted on all, and errors by heading: predicted by other folds, other groups, or all."""
    from meshwright.accuracy import fit

    problem = fit.make_problem(cases)
    numbers = fit.rounded(fit.fit(problem, np.ones(len(cases), dtype=bool)))
    say("cross-validating")
    held_out_s = fit.held_out(problem, fit.folds(cases))
    has_experts = np.array([case.setting.model.num_experts > 0 for case in cases])
    numbers |= fit.with_intervals(held_out_s, problem.measured_s, problem.weights, has_experts)
    seconds_by_name = {"cross-validation": held_out_s}
    if with_groups:
        say("leaving out each group in turn")
        seconds_by_name["groups"] = fit.held_out(problem, np.array([case.record.group for case in cases]), rounds=10)
    seconds_by_name["fitted"] = problem.seconds([numbers])[0]
    rates = calibrations(cases, numbers)
    return numbers, {name: accuracy_of(cases, step_s, rates, unpredicted) for name, step_s in seconds_by_name.items()}
