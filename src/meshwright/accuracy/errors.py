"""Predictions beside published measurements: errors, bias, and how often the interval holds, per group."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.accuracy.batches import batches, calibrations
from meshwright.accuracy.cases import Case, Unpredicted, case_of
from meshwright.accuracy.records import Record
from meshwright.spec.calibration import Calibration


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One measured step and its prediction, in seconds; the interval is from the 10th to the 90th percentile.

    ``fitted`` is whether fitted numbers were used; data-sheet rates come without an interval.
    """

    id: str
    group: str
    core: bool
    chip: str
    fitted: bool
    measured_s: float
    predicted_s: float
    low_s: float | None
    high_s: float | None

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def covered(self) -> bool | None:
        """Whether the measurement lies in the interval; None without one."""
        if self.low_s is None or self.high_s is None:
            return None
        return self.low_s <= self.measured_s <= self.high_s


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of several predictions, as shares: mean and median of their size, mean with sign, and coverage."""

    n: int
    mape: float | None
    median: float | None
    bias: float | None
    coverage: float | None


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Every record of a file: predicted, or named with the reason why not."""

    predictions: tuple[Prediction, ...]
    unpredicted: tuple[Unpredicted, ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups in order of their first record, those without any prediction too."""
        found = [one.group for one in self.predictions] + [one.record.group for one in self.unpredicted]
        return tuple(dict.fromkeys(found))

    def summary(self, chosen: Callable[[Prediction], bool] = lambda one: True) -> Summary:
        """The errors of the chosen predictions."""
        return summarise([one for one in self.predictions if chosen(one)])

    def of_group(self, group: str) -> Summary:
        """The errors of one group's predictions."""
        return self.summary(lambda one: one.group == group)

    def reasons(self) -> dict[str, list[str]]:
        """Reason -> ids of the records that are not predicted for it."""
        found: dict[str, list[str]] = {}
        for one in self.unpredicted:
            found.setdefault(one.reason, []).append(one.record.id)
        return found

    def to_json(self) -> dict[str, Any]:
        """``overall``, ``core_train`` and one object per group, then the records that are not predicted."""
        table: dict[str, Any] = {"overall": self.summary(), "core_train": self.summary(lambda one: one.core)}
        table |= {group: self.of_group(group) for group in self.groups}
        counted = {name: msgspec.structs.asdict(found) for name, found in table.items()}
        return counted | {"unpredicted": self.reasons()}


def summarise(predictions: Sequence[Prediction]) -> Summary:
    """The errors of some predictions; None for numbers of nothing."""
    if not predictions:
        return Summary(n=0, mape=None, median=None, bias=None, coverage=None)
    errors = np.array([one.error for one in predictions])
    held = [one.covered for one in predictions if one.covered is not None]
    return Summary(
        n=len(predictions),
        mape=float(np.abs(errors).mean()),
        median=float(np.median(np.abs(errors))),
        bias=float(errors.mean()),
        coverage=sum(held) / len(held) if held else None,
    )


def cases_of(records: Sequence[Record]) -> tuple[tuple[Case, ...], tuple[Unpredicted, ...]]:
    """The records that can be predicted, and the others with their reasons."""
    every = [case_of(record) for record in records]
    cases = tuple(one for one in every if isinstance(one, Case))
    return cases, tuple(one for one in every if isinstance(one, Unpredicted))


def accuracy(records: Sequence[Record], *, datasheet: bool = False) -> Accuracy:
    """All records predicted with the fitted numbers, or with data-sheet rates alone."""
    cases, unpredicted = cases_of(records)
    found = calibrations(cases, datasheet=datasheet)
    seconds = np.empty(len(cases))
    for part in batches(cases):
        seconds[part.numbers] = part.seconds(found)
    return accuracy_of(cases, seconds, found, unpredicted)


def accuracy_of(
    cases: Sequence[Case],
    seconds: np.ndarray,
    calibrations: Mapping[str, Calibration],
    unpredicted: Sequence[Unpredicted],
) -> Accuracy:
    """The cases with their predicted seconds, each with the interval of its chip's calibration."""
    pairs = zip(cases, seconds.tolist(), strict=True)
    return Accuracy(
        predictions=tuple(_predicted(case, s, calibrations[case.setting.cluster.chip.name]) for case, s in pairs),
        unpredicted=tuple(unpredicted),
    )


def _predicted(case: Case, seconds: float, calibration: Calibration) -> Prediction:
    low, high = calibration.efficiency.interval(has_experts=case.setting.model.num_experts > 0)
    if not math.isfinite(seconds) or seconds <= 0:
        raise AssertionError(f"{case.record.id}: predicted {seconds} s")
    return Prediction(
        id=case.record.id,
        group=case.record.group,
        core=case.record.core,
        chip=case.setting.cluster.chip.name,
        fitted=not calibration.is_datasheet,
        measured_s=case.measured_s,
        predicted_s=seconds,
        low_s=None if low is None else seconds * low,
        high_s=None if high is None else seconds * high,
    )
