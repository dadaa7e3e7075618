"""The slow half of `meshwright accuracy`: numbers fitted anew, and what each fit predicts of steps it has not seen."""

from collections.abc import Sequence

import numpy as np

from meshwright.accuracy.batches import calibrations
from meshwright.accuracy.cases import Case, Unpredicted
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
from meshwright.core.errors import InputError

NUM_FOLDS = 5


def fitted_cases(records: Sequence[Record]) -> tuple[Sequence[Case], Sequence[Unpredicted]]:
    """The records to fit on, and those that cannot be predicted; an InputError for too few."""
    cases, unpredicted = cases_of(records)
    if len({case.record.group for case in cases}) < 2 or len(cases) < 2 * NUM_FOLDS:
        raise InputError(f"{len(cases)} records can be predicted; a fit needs at least {2 * NUM_FOLDS} of two groups.")
    return cases, unpredicted


def fit_anew(
    cases: Sequence[Case], unpredicted: Sequence[Unpredicted], *, with_groups: bool
) -> tuple[dict[str, float], dict[str, Accuracy]]:
    """Fitted numbers, and the errors of each way to predict: by other folds, by other groups, by the fit of all."""
    problem = make_problem(cases)
    say(f"fitting on {len(cases):,} records")
    predictor = Predictor(problem)
    numbers = rounded(fit(problem, np.ones(len(cases), dtype=bool), predictor=predictor))
    say("cross-validating")
    crossed = cross_validate(problem)
    numbers |= _intervals(problem, crossed)
    seconds = {"cross-validation": crossed}
    if with_groups:
        say("leaving out each group in turn")
        seconds["groups"] = leave_groups_out(problem)
    seconds["fitted"] = predictor(numbers)
    by = calibrations(cases, numbers)
    return numbers, {name: accuracy_of(cases, predicted, by, unpredicted) for name, predicted in seconds.items()}


def _intervals(problem: Problem, predicted_s: np.ndarray) -> dict[str, float]:
    """Percentiles of measured over predicted for dense models and for those with experts, where there are enough."""
    experts = np.array([case.setting.model.num_experts > 0 for case in problem.cases])
    found: dict[str, float] = {}
    for suffix, chosen in (("", ~experts), ("_experts", experts)):
        if chosen.sum() >= NUM_FOLDS:
            at = interval(predicted_s[chosen], problem.measured_s[chosen], problem.weights[chosen])
            found |= {f"{name}{suffix}": round(value, 3) for name, value in zip(("low", "high"), at, strict=True)}
    return found
