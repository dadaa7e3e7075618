"""The fit on measurements that the model made itself, and what keeps a cross-validation honest."""

from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.accuracy.batches import calibrations
from meshwright.accuracy.cases import cases_of, training_case
from meshwright.accuracy.fit import (
    PRIORS,
    configuration,
    fit,
    folds,
    held_out,
    interval,
    make_problem,
    rounded,
)
from meshwright.spec.efficiency import fitted_numbers
from tests.accuracy.recorded import LLAMA, case, published

MIDDLE = {name: middle for name, (middle, _) in PRIORS.items()}
EXACT = 20.0
"""The weight of a measurement without errors."""

TRUE = MIDDLE | {"compute.h100": 0.55, "hbm.gpu": 0.7, "network": 0.45}


@cache
def made_up():
    """Steps of three widths on one and on many nodes, measured by the model itself with the numbers above.

    They have no errors, so each counts as much as many real ones: else the priors would hold the numbers back.
    """
    cases = []
    for width, chips, batch in ((1024, 8, 8), (2048, 8, 4), (4096, 8, 2), (2048, 256, 1), (4096, 512, 1)):
        model = LLAMA | {"d_model": width, "d_ff": 4 * width, "n_heads": width // 128, "name": f"w{width}"}
        same = {"model": model, "n_chips": chips, "hardware": "H100-SXM"}
        for group, length in (("a", 1024), ("b", 2048), ("a", 4096), ("b", 8192)):
            fields = {"seq_len": length, "global_batch_seqs": batch * chips, "micro_batch": batch}
            zero = {"dp": chips, "zero_stage": 3}
            cases.append(case(**same, **fields, parallelism=zero, group=f"maxtext-{group}"))
    problem = make_problem(cases)
    measured = problem.seconds([TRUE])[0]
    return replace(problem, measured_s=measured, weights=np.full(len(problem.cases), EXACT))


@cache
def fitted():
    problem = made_up()
    return fit(problem, np.ones(len(problem.cases), dtype=bool), rounds=6)


def test_numbers_that_made_the_measurements_come_back():
    """Those that the measurements determine; the prior holds the others, so that it is close and not exact."""
    found = fitted()
    assert found["compute.h100"] == pytest.approx(TRUE["compute.h100"], rel=0.03)
    assert found["network"] == pytest.approx(TRUE["network"], rel=0.1)
    problem = made_up()
    errors = problem.seconds([found])[0] / problem.measured_s - 1
    before = problem.seconds([MIDDLE])[0] / problem.measured_s - 1
    assert np.abs(errors).max() < 0.01 < 0.1 < np.abs(before).max()


def test_numbers_that_nothing_depends_on_stay_where_they_are_expected():
    found = fitted()
    for name in ("compute.v5p", "ici", "dcn", "narrow.fp4.blackwell", "attention.tpu", "host_microbatch_s"):
        assert found[name] == pytest.approx(MIDDLE[name], rel=1e-6)


def test_one_wild_measurement_does_not_pull_the_rest_along():
    """An error far beyond the scale counts in proportion: ten times off moves what the others say by percents."""
    problem = made_up()
    measured = problem.measured_s.copy()
    wrong = 9  # of middling width and length: at the edge of what was measured the others say less
    measured[wrong] *= 10
    wild = replace(problem, measured_s=measured)
    found = fit(wild, np.ones(len(measured), dtype=bool), start=fitted(), rounds=8)
    for name in ("compute.h100", "network"):
        assert found[name] == pytest.approx(fitted()[name], rel=0.03)
    others = np.delete(np.abs(problem.seconds([found])[0] / problem.measured_s - 1), wrong)
    assert np.median(others) < 0.02


def test_a_case_that_is_left_out_does_not_count():
    problem = made_up()
    chosen = np.ones(len(problem.cases), dtype=bool)
    chosen[0] = False
    measured = np.where(chosen, problem.measured_s, 1e6)
    wrong = replace(problem, measured_s=measured)
    assert fit(wrong, chosen, start=fitted(), rounds=1) == fit(problem, chosen, start=fitted(), rounds=1)


def test_what_is_predicted_for_a_fold_does_not_depend_on_its_measurements():
    """Cross-validation and leaving groups out: other measurements of what is held out change nothing there."""
    problem = made_up()
    groups = np.array([one.record.group for one in problem.cases])
    for parts, part in ((folds(problem.cases), 0), (groups, "maxtext-b")):
        held = parts == part
        measured = np.where(held, 3 * problem.measured_s, problem.measured_s)
        changed = replace(problem, measured_s=measured)
        plain, other = held_out(problem, parts, rounds=1), held_out(changed, parts, rounds=1)
        assert other[held].tolist() == plain[held].tolist()
        assert (other[~held] != plain[~held]).all()


def test_several_sets_of_numbers_are_predicted_at_once():
    problem = made_up()
    points = [MIDDLE, MIDDLE | {"compute.h100": 0.6}, MIDDLE | {"overlap": 1.9}, MIDDLE | {"compute.v5p": 0.6}, MIDDLE]
    together = problem.seconds(points)
    assert together.tolist() == [problem.seconds([one])[0].tolist() for one in points]
    assert (together[1] > together[0]).all()
    assert (together[2] < together[0]).any()
    assert together[3].tolist() == together[4].tolist() == together[0].tolist()


def test_chips_without_numbers_keep_the_data_sheet():
    problem = make_problem([case(), case(hardware="MI300X")])
    found = calibrations(problem.cases, MIDDLE)
    assert found["mi300x"].is_datasheet
    assert found["h100"].efficiency.compute == MIDDLE["compute.h100"]


# -- folds ----------------------------------------------------------------------------------------------


@cache
def every_case():
    return cases_of(published(), training_case)[0]


def test_near_duplicates_are_in_one_fold():
    cases = every_case()
    number = folds(cases)
    found: dict[object, set[int]] = {}
    for one, fold in zip(cases, number.tolist(), strict=True):
        found.setdefault(configuration(one), set()).add(fold)
    assert all(len(of) == 1 for of in found.values())
    assert len(found) < len(cases), "there are near duplicates"


def test_folds_are_balanced():
    """By configurations; every group is spread over all of them, as far as it has so many."""
    cases = every_case()
    number = folds(cases)
    keys = dict(zip(map(configuration, cases), number.tolist(), strict=True))
    counts = np.bincount(list(keys.values()))
    assert len(counts) == 5
    assert counts.max() - counts.min() <= 1
    for group in {key[0] for key in keys}:
        own = [fold for key, fold in keys.items() if key[0] == group]
        assert len(set(own)) == min(5, len(own))
    assert np.bincount(number).min() > len(cases) / 10


def test_folds_do_not_depend_on_the_order_of_records():
    cases = every_case()
    assert folds(cases[::-1]).tolist() == folds(cases).tolist()[::-1]


def test_a_repeat_of_a_measurement_is_the_same_configuration():
    same = case(), case(id="again", micro_batch=1, measured={"step_s": 1.0}, precision="fp8")
    other = case(parallelism={"dp": 8, "tp": 2, "zero_stage": 3}), case(n_chips=32), case(group="x")
    assert len({configuration(one) for one in same}) == 1
    assert len({configuration(one) for one in (*same, *other)}) == 4


def test_large_groups_count_less_for_each_record():
    few = [case() for _ in range(5)]
    many = [case(group="many", core=False) for _ in range(200)]
    weights = make_problem([*few, *many]).weights
    assert weights[0] > 2 * weights[-1]
    assert (weights > 0).all()


# -- what is written ------------------------------------------------------------------------------------


def test_the_interval_is_at_the_tenth_and_ninetieth_percentile():
    measured = np.linspace(0.5, 1.5, 1001)
    assert interval(np.ones(1001), measured, np.ones(1001)) == pytest.approx((0.6, 1.4), abs=0.002)
    doubled = np.where(measured > 1, 2.0, 1.0)
    low, high = interval(np.ones(1001), measured, doubled)
    assert low > 0.6
    assert high > 1.4
    assert interval(2 * np.ones(3), np.array([1.0, 2.0, 3.0]), np.ones(3)) == (0.5, 1.5)


def test_rounding():
    assert rounded({"a": 0.123456, "b": 1.23456e-5, "c": 77.77}) == {"a": 0.123, "b": 1.23e-5, "c": 77.8}


def test_priors():
    """One for each stored number but the ends of both intervals; shares at most 1 where they must be."""
    assert len(PRIORS) + 4 == len(fitted_numbers().numbers) <= 40
    assert all(middle > 0 and spread > 0 for middle, spread in PRIORS.values())
    shares = ("compute", "attention", "portable", "hbm", "ici", "nvlink", "network", "dcn")
    assert all(middle <= 1 for name, (middle, _) in PRIORS.items() if name.split(".")[0] in shares)
    assert PRIORS["overlap"][0] > 1, "an exponent of 1 hides nothing"
