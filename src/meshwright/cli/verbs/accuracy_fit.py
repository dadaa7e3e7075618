"""What `meshwright accuracy` does when numbers are fitted: cross-validation, the file of numbers, the page."""

from pathlib import Path

import numpy as np

from meshwright.accuracy.batches import calibrations
from meshwright.accuracy.errors import Accuracy, accuracy_of, cases_of
from meshwright.accuracy.fit import (
    Predictor,
    Problem,
    cross_validate,
    fit,
    interval,
    leave_groups_out,
    make_problem,
    rounded,
)
from meshwright.accuracy.records import Record
from meshwright.cli.output import say
from meshwright.cli.verbs.accuracy_text import accuracy_text, summary_rows
from meshwright.core.errors import InputError
from meshwright.core.files import write_text_whole
from meshwright.core.toml_file import dump_toml
from meshwright.report.answer import Answer, Table
from meshwright.spec.efficiency import FittedNumbers, fitted_numbers

BEGIN = "<!-- table: {} -->"
END = "<!-- end -->"
NUM_FOLDS = 5

HEADINGS = {
    "cross-validation": "Five-fold cross-validation over configurations",
    "groups": "Leaving out each group in turn",
    "fitted": "The numbers of the product, fitted on all records",
}


def validate(records: tuple[Record, ...], *, out: Path | None, page: Path | None) -> Answer:
    """Fit the numbers anew, and predict every record by numbers that have not seen it."""
    cases, unpredicted = cases_of(records)
    if len({case.record.group for case in cases}) < 2 or len(cases) < 2 * NUM_FOLDS:
        raise InputError(f"{len(cases)} records can be predicted; a fit needs at least {2 * NUM_FOLDS} of two groups.")
    _check_places(out, page)
    problem = make_problem(cases)
    say(f"fitting on {len(cases):,} records")
    predictor = Predictor(problem)
    numbers = rounded(fit(problem, np.ones(len(cases), dtype=bool), predictor=predictor))
    say("cross-validating")
    crossed = cross_validate(problem)
    numbers |= _intervals(problem, crossed)
    left = None
    if page or not out:
        say("leaving out each group in turn")
        left = leave_groups_out(problem)
    tables = {"cross-validation": crossed} | ({} if left is None else {"groups": left})
    tables["fitted"] = predictor(numbers)
    found = {
        name: accuracy_of(cases, seconds, calibrations(cases, numbers), unpredicted) for name, seconds in tables.items()
    }
    if out:
        _save(numbers, len(cases), out)
    if page:
        _write(page, found)
    text = [piece for name, one in found.items() for piece in accuracy_text(one, title=HEADINGS[name])]
    facts = {name: one.to_json() for name, one in found.items()} | {"numbers": numbers}
    return Answer(facts, [*text, Table(["number", ("value", lambda value: f"{value:.4g}")], [*numbers.items()])])


def _intervals(problem: Problem, predicted_s: np.ndarray) -> dict[str, float]:
    """Percentiles of measured over predicted for dense models and for those with experts, where there are enough."""
    experts = np.array([case.setting.model.num_experts > 0 for case in problem.cases])
    found: dict[str, float] = {}
    for suffix, chosen in (("", ~experts), ("_experts", experts)):
        if chosen.sum() >= NUM_FOLDS:
            at = interval(predicted_s[chosen], problem.measured_s[chosen], problem.weights[chosen])
            found |= {f"{name}{suffix}": round(value, 3) for name, value in zip(("low", "high"), at, strict=True)}
    return found


def _save(numbers: dict[str, float], count: int, out: Path) -> None:
    from datetime import date

    stored = FittedNumbers(
        date=date.today().isoformat(),
        source=f"fitted on {count:,} published training steps, see docs/accuracy.md",
        numbers=numbers,
    )
    write_text_whole(out, dump_toml(stored))
    fitted_numbers.cache_clear()
    say(f"wrote {out}")


def _check_places(out: Path | None, page: Path | None) -> None:
    """Refuse what cannot be written before minutes are spent on it."""
    if out and not out.parent.is_dir():
        raise InputError(f"cannot write {out}: the folder {out.parent} does not exist. Make it first.")
    if page:
        text = _read(page)
        for name in HEADINGS:
            text = _with_table(text, name, "", page)


def _read(page: Path) -> str:
    try:
        return page.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {page}: {error.strerror}. Name the page that the tables go into.") from None


def _write(page: Path, found: dict[str, Accuracy]) -> None:
    """The tables between their marks; the rest of the page stays."""
    text = _read(page)
    for name, one in found.items():
        text = _with_table(text, name, _markdown(one), page)
    write_text_whole(page, text)
    say(f"wrote {page}")


def _with_table(text: str, name: str, table: str, page: Path) -> str:
    begin = BEGIN.format(name)
    head, mark, rest = text.partition(begin)
    _, end, tail = rest.partition(END)
    if not mark or not end:
        raise InputError(f"{page} has no place for the table {name!r}. Put '{begin}' and '{END}' where it goes.")
    return f"{head}{begin}\n{table}\n{end}{tail}"


def _markdown(found: Accuracy) -> str:
    lines = [
        "| group | records | MAPE | median | bias | interval holds |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in summary_rows(found)]
    return "\n".join(lines)
