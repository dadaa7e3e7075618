"""Predictions of all published measurements, and how errors are summed up."""

from functools import cache

import pytest

from meshwright.accuracy.cases import cases_of, training_case
from meshwright.accuracy.errors import Accuracy, Comparison, PickRegret, accuracy, summarise
from tests.accuracy.recorded import published, record

GROUP_FIGURES = {"n", "mape", "median", "bias", "coverage"}


@cache
def fitted() -> Accuracy:
    return accuracy(published())


def prediction(predicted_s, **fields):
    plain = {"id": "x", "group": "g", "job": "j", "core": True, "chip": "h100", "fitted": True, "measured_s": 10.0}
    bounds = {"low_s": 0.9 * predicted_s, "high_s": 1.2 * predicted_s}
    return Comparison(**plain | {"predicted_s": predicted_s} | bounds | fields)


# -- sums by hand ---------------------------------------------------------------------------------------


def test_the_regret_of_the_pick_by_hand():
    """Job a: the pick (8 s) was measured at 12 s, the fastest at 10 s, the mean 13 s; b is right; c has one."""
    made = [("a", 8.0, 12.0), ("a", 9.0, 10.0), ("a", 20.0, 17.0), ("b", 1.0, 2.0), ("b", 3.0, 4.0), ("c", 1.0, 9.0)]
    every = tuple(prediction(predicted, job=job, measured_s=measured) for job, predicted, measured in made)
    found = Accuracy(predictions=every, unpredicted=()).regret()
    assert (found.num_jobs, found.right) == (2, 0.5)
    assert found.regret == pytest.approx((0.2 + 0.0) / 2)
    assert found.random == pytest.approx((0.3 + 0.5) / 2)
    assert Accuracy(predictions=every[-1:], unpredicted=()).regret() == PickRegret(num_jobs=0)


def test_a_summary_by_hand():
    """12 and 9 s for 10 s measured: +20% and -10%; 10 s lies in 10.8 to 14.4 s not, and in 8.1 to 10.8 s."""
    found = summarise([prediction(12.0), prediction(9.0), prediction(10.0)])
    assert (found.n, found.mape, found.median) == (3, pytest.approx(0.1), pytest.approx(0.1))
    assert found.bias == pytest.approx(0.1 / 3)
    assert found.coverage == pytest.approx(2 / 3)


def test_without_an_interval_there_is_no_coverage():
    bare = prediction(12.0, low_s=None, high_s=None)
    assert bare.covered is None
    assert summarise([bare]).coverage is None
    assert summarise([bare, prediction(10.0)]).coverage == 1.0
    assert summarise([]).mape is None


def test_every_record_is_predicted_or_named():
    records = [record(id="a"), record(id="b", measured={}), record(id="c", kind="decode", group="serving")]
    found = accuracy(records)
    assert [one.id for one in found.predictions] == ["a"]
    assert {reason.split(":")[0]: ids for reason, ids in found.reasons().items()} == {
        "no step time, throughput or utilisation was measured": ["b"],
        "kind decode": ["c"],
    }
    table = found.to_json()
    assert set(table) == {"overall", "core_train", "made-up", "serving", "pick", "records", "unpredicted"}
    assert table["serving"] == {"n": 0, "mape": None, "median": None, "bias": None, "coverage": None}


def test_the_interval_is_that_of_the_calibration():
    (one,) = accuracy([record()]).predictions
    assert one.fitted
    assert one.low_s < one.predicted_s < one.high_s
    (sheet,) = accuracy([record()], datasheet=True).predictions
    assert (sheet.fitted, sheet.low_s, sheet.high_s) == (False, None, None)
    assert sheet.predicted_s < one.predicted_s


def test_a_chip_that_nothing_is_fitted_for_has_its_data_sheet():
    one, other = accuracy([record(), record(hardware="MI300X")]).predictions
    assert (one.fitted, other.fitted, other.chip) == (True, False, "mi300x")
    (sheet,) = accuracy([record(hardware="MI300X")], datasheet=True).predictions
    assert other.predicted_s == pytest.approx(sheet.predicted_s, rel=1e-9)


# -- the published measurements ------------------------------------------------------------------------


def test_all_published_steps_are_predicted_but_those_without_a_time():
    found = fitted()
    assert len(found.predictions) + len(found.unpredicted) == len(published())
    assert {one.record.group for one in found.unpredicted} == {"korthikanti-fig1-mem"}
    assert list(found.reasons()) == ["no step time, throughput or utilisation was measured"]


def test_core_training_is_within_ten_percent():
    """In sample: the numbers were fitted on these. The cross-validated errors are in docs/accuracy.md."""
    at = fitted().cores[""]
    assert at.n > 200
    assert at.mape < 0.10
    assert at.median < 0.065
    assert abs(at.bias) < 0.05
    assert 0.7 <= at.coverage <= 0.95


def test_single_nodes_of_small_models():
    at = fitted().summary(group="vtrain-single")
    assert at.n == 700
    assert at.mape < 0.15


def test_the_data_sheet_alone_is_far_off():
    """Real programs are a third slower: steps are predicted too fast, nearly all of them."""
    records = [one for one in published() if one.core]
    found = accuracy(records, datasheet=True)
    at = found.summary()
    assert at.mape > 0.25
    assert at.bias < -0.25
    assert sum(one.error < 0 for one in found.predictions) > 0.95 * at.n


def test_json_of_the_published_steps():
    table = fitted().to_json()
    groups = {one.group for one in published()}
    cores = {"core_train", "core_train_2026-11-22"}
    assert set(table) == {"overall", "pick", "records", "unpredicted"} | cores | groups
    assert all(set(table[name]) == GROUP_FIGURES for name in groups | cores | {"overall"})
    assert [table[name]["n"] for name in sorted(cores)] == [203, 36]
    assert sum(table[name]["n"] for name in groups) == table["overall"]["n"] == len(fitted().predictions)
    assert {"id", "measured_s", "predicted_s", "low_s", "high_s", "error"} <= set(table["records"][0])
    assert len(table["records"]) == table["overall"]["n"]
    assert table["pick"]["regret"] < 0.1 * table["pick"]["random"]


def test_the_constant_utilisation_that_a_model_must_beat():
    """One MFU for each chip and precision, the best there is: what no planner is needed for."""
    from meshwright.cost.work.ops import model_flops

    found = fitted()
    measured = {one.id: one.measured_s for one in found.predictions if one.core}
    cases = [case for case in cases_of(published(), training_case)[0] if case.record.id in measured]
    kinds: dict[object, list[tuple[float, float]]] = {}
    for one in cases:
        key = one.setting.cluster.chip.name, one.strategy.matmul_dtype
        kinds.setdefault(key, []).append(
            (model_flops(one.setting.model, one.setting.job) / one.setting.cluster.num_chips, measured[one.record.id])
        )
    errors = []
    for pairs in kinds.values():
        rates = [flops / seconds for flops, seconds in pairs]
        best = min(rates, key=lambda rate: sum(abs(flops / rate / s - 1) for flops, s in pairs))
        errors += [abs(flops / best / s - 1) for flops, s in pairs]
    constant, own = sum(errors) / len(errors), found.cores[""].mape
    assert own < 0.6 * constant
