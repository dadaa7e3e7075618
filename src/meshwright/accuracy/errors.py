"""Compares predictions with published measurements: errors, bias, and coverage of the interval, per group."""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from meshwright.accuracy.batches import batches, calibrations
from meshwright.accuracy.cases import Case, Unpredicted, cases_of, training_case
from meshwright.accuracy.records import Record
from meshwright.core.progress import tracked
from meshwright.spec.calibration import Calibration
from meshwright.spec.weights import has_frozen_matrices


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One measured step and its prediction, in seconds; ``low_s`` and ``high_s`` are the prediction's 10th and 90th
    percentile, None with data-sheet rates.

    ``fitted`` is true if fitted numbers were used. ``job`` names model, cluster and batch, so that it is equal for
    different strategies. ``adapters`` is true if only LoRA adapters were trained."""

    id: str
    group: str
    job: str
    core: bool
    adapters: bool = False
    added: str = ""
    chip: str
    fitted: bool
    measured_s: float
    predicted_s: float
    low_s: float | None
    high_s: float | None

    @property
    def error(self) -> float:
        """Relative error: predicted over measured seconds, minus 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def covered(self) -> bool | None:
        """True if the measurement is inside the interval; None without an interval."""
        if self.low_s is None or self.high_s is None:
            return None
        return self.low_s <= self.measured_s <= self.high_s


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of ``n`` predictions: mean (``mape``) and median absolute error, mean signed error (``bias``),
    and the share of measurements inside their prediction's interval (``coverage``)."""

    n: int
    mape: float | None
    median: float | None
    bias: float | None
    coverage: float | None


class PickRegret(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of picking, among the configurations measured for one job, the one with the fastest prediction.

    ``regret`` is the pick's measured step over the fastest measured step, minus 1: a mean over ``num_jobs`` jobs.
    ``random`` is the mean regret of a random pick, ``right`` the share of jobs whose pick is the fastest."""

    num_jobs: int
    regret: float | None = None
    random: float | None = None
    right: float | None = None


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a file: comparisons of the predicted ones, and reasons why the rest is not predicted."""

    predictions: tuple[Comparison, ...]
    unpredicted: tuple[Unpredicted, ...]
    what: str = "train"

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of all groups: groups with predictions first, then groups without any."""
        group_names = [p.group for p in self.predictions] + [u.record.group for u in self.unpredicted]
        return tuple(dict.fromkeys(group_names))

    def summary(self, *, group: str | None = None) -> Summary:
        """Summarises the errors of all predictions, or of one group."""
        return summarise([prediction for prediction in self.predictions if group in (None, prediction.group)])

    @property
    def cores(self) -> dict[str, Summary]:
        """Maps each date of the collection ("" for its start) to the summary of the core records added then."""
        dates = ["", *sorted({p.added for p in self.predictions if p.core and p.added})]
        return {date: summarise([p for p in self.predictions if p.core and p.added == date]) for date in dates}

    def reasons(self) -> dict[str, list[str]]:
        """Maps each reason to the ids of the records that are not predicted for it."""
        ids_by_reason: dict[str, list[str]] = {}
        for refusal in self.unpredicted:
            ids_by_reason.setdefault(refusal.reason, []).append(refusal.record.id)
        return ids_by_reason

    def regret(self) -> PickRegret:
        """Returns the regret over all jobs with several measured configurations."""
        predictions_by_job: dict[str, list[Comparison]] = {}
        for prediction in self.predictions:
            predictions_by_job.setdefault(prediction.job, []).append(prediction)
        regrets, random_regrets = [], []
        for predictions in predictions_by_job.values():
            if len(predictions) > 1:
                measured_s = np.array([prediction.measured_s for prediction in predictions])
                pick_index = int(np.argmin([prediction.predicted_s for prediction in predictions]))
                regrets.append(measured_s[pick_index] / measured_s.min() - 1)
                random_regrets.append(measured_s.mean() / measured_s.min() - 1)
        if not regrets:
            return PickRegret(num_jobs=0)
        return PickRegret(
            num_jobs=len(regrets),
            regret=float(np.mean(regrets)),
            random=float(np.mean(random_regrets)),
            right=float(np.mean(np.array(regrets) == 0)),
        )

    def to_json(self) -> dict[str, object]:
        """Returns a dict for JSON: ``overall``, ``core_train`` or ``core_decode`` (``_DATE`` appended for later
        records), each group, ``pick`` (regret), ``records`` and ``unpredicted``."""
        sections = {
            "overall": self.summary(),
            **{f"core_{self.what}{'_' * bool(date)}{date}": summary for date, summary in self.cores.items()},
            **{group: self.summary(group=group) for group in self.groups},
            "pick": self.regret(),
            "records": [{**msgspec.structs.asdict(p), "error": p.error} for p in self.predictions],
            "unpredicted": self.reasons(),
        }
        return dict(msgspec.to_builtins(sections))


def summarise(predictions: Sequence[Comparison]) -> Summary:
    """Returns the summary of some predictions; without any its figures are None."""
    if not predictions:
        return Summary(n=0, mape=None, median=None, bias=None, coverage=None)
    relative_errors = np.array([prediction.error for prediction in predictions])
    covered_flags = [prediction.covered for prediction in predictions if prediction.covered is not None]
    return Summary(
        n=len(predictions),
        mape=float(np.abs(relative_errors).mean()),
        median=float(np.median(np.abs(relative_errors))),
        bias=float(relative_errors.mean()),
        coverage=sum(covered_flags) / len(covered_flags) if covered_flags else None,
    )


def accuracy(records: Sequence[Record], *, datasheet: bool = False) -> Accuracy:
    """Compares all training records with predictions from fitted numbers, or with ``datasheet`` from the data sheet."""
    cases, refusals = cases_of(records, training_case)
    calibration_by_chip = calibrations(cases, datasheet=datasheet)
    predicted_s = np.empty(len(cases))
    for batch in tracked(batches(cases), "predicting records"):
        predicted_s[batch.numbers] = batch.seconds(calibration_by_chip)[0]
    return accuracy_of(cases, predicted_s, calibration_by_chip, refusals)


def accuracy_of(
    cases: Sequence[Case],
    seconds: np.ndarray,
    calibrations: Mapping[str, Calibration],
    unpredicted: Sequence[Unpredicted],
    what: str = "train",
) -> Accuracy:
    """Compares cases with their predicted seconds, and adds intervals from the calibrations (by chip)."""
    pairs = zip(cases, seconds.tolist(), strict=True)
    return Accuracy(
        predictions=tuple(_predicted(case, predicted_s, calibrations[case.chip.name]) for case, predicted_s in pairs),
        unpredicted=tuple(unpredicted),
        what=what,
    )


def _predicted(case: Case, predicted_s: float, calibration: Calibration) -> Comparison:
    setting = case.setting
    model, cluster, job = setting.model, setting.cluster, setting.job
    low_ratio, high_ratio = calibration.efficiency.interval(has_experts=model.num_experts > 0)
    if not math.isfinite(predicted_s) or predicted_s <= 0:
        raise AssertionError(f"{case.record.id}: predicted {predicted_s} s")
    return Comparison(
        id=case.record.id,
        group=case.record.group,
        job=f"{model.name} on {cluster.short_name}, {job.batch_seqs} x {job.seq_len}",
        core=case.record.core,
        adapters=has_frozen_matrices(model),
        added=case.record.added,
        chip=case.chip.name,
        fitted=not calibration.is_datasheet,
        measured_s=case.measured_s,
        predicted_s=predicted_s,
        low_s=None if low_ratio is None else predicted_s * low_ratio,
        high_s=None if high_ratio is None else predicted_s * high_ratio,
    )
