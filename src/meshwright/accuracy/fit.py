"""Fits the efficiency numbers of `spec.efficiency` to published step times, and cross-validates them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from scipy.optimize import least_squares

from meshwright.accuracy.batches import CaseBatch, batches, calibrations
from meshwright.accuracy.cases import NUM_FOLDS, Case
from meshwright.core.progress import tracked
from meshwright.spec.calibration import SHARES

PRIORS: dict[str, tuple[float, float]] = {
    "compute.a100": (0.80, 0.08),
    "compute.h100": (0.74, 0.08),
    "compute.blackwell": (0.5, 0.15),
    "compute.v4p": (0.8, 0.12),
    "compute.v5e": (0.8, 0.12),
    "compute.v5p": (0.8, 0.12),
    "compute.v6e": (0.8, 0.12),
    "narrow.fp8.h100": (0.9, 0.12),
    "narrow.fp8.blackwell": (1.0, 0.15),
    "narrow.fp4.blackwell": (0.7, 0.25),
    "attention.a100": (0.5, 0.2),
    "attention.h100": (0.45, 0.2),
    "attention.blackwell": (0.5, 0.2),
    "attention.tpu": (0.4, 0.3),
    "portable.h100": (0.6, 0.25),
    "hbm.gpu": (0.8, 0.12),
    "hbm.tpu": (0.8, 0.15),
    "nvlink": (0.78, 0.08),
    "network": (0.7, 0.15),
    "ici": (0.85, 0.1),
    "dcn": (0.5, 0.4),
    "hop_s.nvlink": (7e-6, 0.2),
    "hop_s.network": (15e-6, 0.25),
    "contraction_half.gpu": (80.0, 0.5),
    "contraction_half.tpu": (200.0, 0.5),
    "tile_tail": (0.3, 0.4),
    "head_half": (32.0, 0.2),
    "rows_half": (500.0, 0.3),
    "kernel_s.gpu": (4.5e-6, 0.3),
    "host_kernel_s": (4e-5, 0.4),
    "host_microbatch_s": (4e-3, 0.6),
    "overlap": (1.5, 0.1),
    "straggler_s": (0.004, 0.4),
    "overlap_weights": (1.5, 0.2),
}
"""Fitted number -> (prior value, standard deviation of its logarithm). `docs/accuracy.md` says which priors rest on
measured kernels; the others are estimates."""

ERROR_SCALE = 0.03
"""Error of log step time above which errors count linearly, no longer squared."""

COVERED = (0.1, 0.9)
"""Quantiles of measured over predicted seconds that bound a printed interval."""

OUTSIDE_CORE, LARGE_GROUP = 0.35, 40
"""Weight of a record outside its group's core; largest total squared weight of a group without a core."""

USUAL_SIZE, SIZE_POWER, SIZE_FACTORS = 15, 0.25, (0.7, 1.6)
"""Weights of a group whose squares sum to s are multiplied by (15 / s)^0.25, at least 0.7 and at most 1.6."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Cases with the measured seconds and the weight of each; ``seconds`` predicts them for several sets of numbers
    [points, cases], and ``priors`` has the numbers that are fitted."""

    cases: tuple[Case, ...]
    seconds: Callable[[Sequence[Mapping[str, float]]], np.ndarray]
    measured_s: np.ndarray
    weights: np.ndarray
    priors: Mapping[str, tuple[float, float]]


def make_problem(cases: Sequence[Case]) -> Problem:
    """Batches the cases and weights them: cases of large groups, and cases outside a group's core, count less."""
    group_of_case = np.array([case.record.group for case in cases])
    is_core = np.array([case.record.core for case in cases])
    weights = np.ones(len(cases))
    for group in set(group_of_case.tolist()):
        is_in_group = group_of_case == group
        num_core_cases = int((is_core & is_in_group).sum())
        is_large = num_core_cases == 0 and is_in_group.sum() > LARGE_GROUP
        weights[is_in_group] = np.sqrt(LARGE_GROUP / is_in_group.sum()) if is_large else 1.0
        weights[is_in_group & ~is_core] *= OUTSIDE_CORE if num_core_cases else 1.0
        squared_sum = float((weights[is_in_group] ** 2).sum())
        weights[is_in_group] *= np.clip((USUAL_SIZE / squared_sum) ** SIZE_POWER, *SIZE_FACTORS)
    return Problem(
        cases=tuple(cases),
        seconds=partial(_step_seconds, cases, batches(cases)),
        measured_s=np.array([case.measured_s for case in cases]),
        weights=weights,
        priors=PRIORS,
    )


def _step_seconds(
    cases: Sequence[Case], case_batches: Sequence[CaseBatch], points: Sequence[Mapping[str, float]]
) -> np.ndarray:
    """Returns predicted seconds of all cases for several sets of numbers [points, cases], each batch priced once."""
    all_tables = [calibrations(cases, numbers) for numbers in points]
    predicted_s = np.empty((len(points), len(cases)))
    for batch in case_batches:
        chip_names = {case.chip.name for case in batch.cases}
        point_tables = [{chip_name: table[chip_name] for chip_name in chip_names} for table in all_tables]
        # most numbers change nothing for most batches
        distinct_tables = [table for index, table in enumerate(point_tables) if table not in point_tables[:index]]
        priced_s = batch.seconds(*distinct_tables)
        predicted_s[:, batch.numbers] = priced_s[[distinct_tables.index(table) for table in point_tables]]
    return predicted_s


def fit(
    problem: Problem,
    chosen: np.ndarray,
    *,
    start: Mapping[str, float] | None = None,
    rounds: int = 12,
) -> dict[str, float]:
    """Returns the numbers that best predict the cases of the mask ``chosen``, with penalties for leaving the priors.

    Minimises errors of log times (see `ERROR_SCALE`) from ``start`` (default: priors) in at most ``rounds`` iterations.
    Numbers that are shares of a data-sheet rate are at most 1."""
    prior_names, measured_s, weights = list(problem.priors), problem.measured_s, problem.weights[chosen]
    log_priors = np.log([problem.priors[name][0] for name in prior_names])
    log_spread = np.array([problem.priors[name][1] for name in prior_names])

    def residuals(*points: np.ndarray) -> np.ndarray:
        logs = np.stack(points)
        predicted_s = problem.seconds([dict(zip(prior_names, values, strict=True)) for values in np.exp(logs).tolist()])
        scaled_errors = np.log(predicted_s / measured_s)[:, chosen] / ERROR_SCALE
        soft_errors = np.sign(scaled_errors) * np.sqrt(2 * (np.sqrt(1 + scaled_errors**2) - 1))
        return np.concatenate([soft_errors * weights, (logs - log_priors) / log_spread], axis=1)

    def slopes(point: np.ndarray) -> np.ndarray:
        base_residuals, *moved_residuals = residuals(point, *(point + 1e-3 * np.eye(len(prior_names))))
        return np.asarray((np.array(moved_residuals) - base_residuals).T / 1e-3)

    x0 = log_priors if start is None else np.log([start[name] for name in prior_names])
    solution = least_squares(lambda x: residuals(x)[0], x0, slopes, x_scale=log_spread, ftol=1e-4, max_nfev=rounds + 1)
    # nothing is faster than its data sheet: a calibration takes shares above 1 as 1
    max_values = np.array([1.0 if name.split(".")[0] in SHARES else np.inf for name in prior_names])
    return dict(zip(prior_names, np.minimum(np.exp(solution.x), max_values).tolist(), strict=True))


def folds(cases: Sequence[Case]) -> np.ndarray:
    """Returns each case's fold, an integer below ``NUM_FOLDS`` [cases].

    Near duplicates (same group, model, chip, number of chips, mesh) are in the same fold.
    """
    return folds_of([configuration(case) for case in cases])


def folds_of(keys: Sequence[tuple[Any, ...]]) -> np.ndarray:
    """Returns each key's fold, an integer below ``NUM_FOLDS`` [keys]. Equal keys are in one fold; keys with an equal
    first entry, the group, are spread over all folds."""
    fold_by_key: dict[tuple[object, ...], int] = {}
    for group_name in sorted({key[0] for key in keys}):
        group_keys = sorted({key for key in keys if key[0] == group_name}, key=str)
        key_order = np.random.default_rng(0).permutation(len(group_keys))
        first_fold = len(fold_by_key)
        for position, key_index in enumerate(key_order.tolist()):
            fold_by_key[group_keys[key_index]] = (first_fold + position) % NUM_FOLDS
    return np.array([fold_by_key[key] for key in keys])


def configuration(case: Case) -> tuple[object, ...]:
    """Returns the key of near duplicates: group, model, chip, number of chips and mesh sizes."""
    record = case.record
    mesh_sizes = tuple(case.strategy.mesh.values())
    return (record.group, case.setting.model.name, case.chip.name, record.n_chips, mesh_sizes)


def held_out(
    problem: Problem, parts: np.ndarray, *, fitted: Mapping[object, Mapping[str, float]] | None = None, rounds: int = 12
) -> np.ndarray:
    """Returns predicted seconds of every case, with numbers fitted on all parts but the case's [cases]. ``parts`` has
    each case's part (its fold, or its group); ``fitted`` has the numbers by part, if already known.

    Every fit starts at the priors: numbers fitted on all cases would leak the held-out measurements.
    """
    predicted_s = np.empty(len(problem.cases))
    for part in tracked(np.unique(parts).tolist(), "fitting without each part"):
        is_in_part = parts == part
        numbers = fitted[part] if fitted else fit(problem, ~is_in_part, rounds=rounds)
        predicted_s[is_in_part] = problem.seconds([numbers])[0, is_in_part]
    return predicted_s


def interval(predicted_s: np.ndarray, measured_s: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Returns the weighted 10th and 90th percentiles of measured over predicted."""
    low_ratio, high_ratio = np.quantile(measured_s / predicted_s, COVERED, weights=weights, method="inverted_cdf")
    return float(low_ratio), float(high_ratio)


def with_intervals(
    predicted_s: np.ndarray, measured_s: np.ndarray, weights: np.ndarray, experts: np.ndarray
) -> dict[str, float]:
    """Returns `interval` of dense models (``low``, ``high``) and of models with experts (``low_experts``,
    ``high_experts``), for at least `NUM_FOLDS` cases each."""
    intervals: dict[str, float] = {}
    for suffix, is_chosen in (("", ~experts), ("_experts", experts)):
        if is_chosen.sum() >= NUM_FOLDS:
            ratios = interval(predicted_s[is_chosen], measured_s[is_chosen], weights[is_chosen])
            intervals |= {f"{name}{suffix}": round(end, 3) for name, end in zip(("low", "high"), ratios, strict=True)}
    return intervals


def rounded(numbers: Mapping[str, float], *, digits: int = 3) -> dict[str, float]:
    """Rounds numbers to ``digits`` significant digits; the measurements support three."""
    return {name: float(f"{value:.{digits}g}") for name, value in numbers.items()}
