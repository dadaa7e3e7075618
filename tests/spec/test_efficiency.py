"""The numbers that come with the product: how many, which, and what every chip has of them."""

import msgspec
import pytest

from meshwright.accuracy.fit import PRIORS
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step, price_strategy
from meshwright.spec import catalogue
from meshwright.spec.calibration import SHARES, Calibration, Efficiency
from meshwright.spec.chip import chip, chip_from_table, chips
from meshwright.spec.cluster import make_cluster, parse_cluster
from meshwright.spec.efficiency import efficiency_of, family, fitted_calibration, fitted_numbers
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh

NUMBERS = fitted_numbers().numbers
FAMILIES = {name: one.family for name, one in chips().items() if one.family}


def fitted(name: str) -> Calibration:
    return fitted_calibration(chip(name))


def test_few_numbers():
    """At most 40 in all, each with a prior, and the two ends of the interval of each kind of model."""
    assert len(NUMBERS) <= 40
    assert set(NUMBERS) == set(PRIORS) | {"low", "high", "low_experts", "high_experts"}
    assert all(value > 0 for value in NUMBERS.values())
    assert 0.5 < NUMBERS["low"] < 1 < NUMBERS["high"] < 2
    assert 0.5 < NUMBERS["low_experts"] < 1 < NUMBERS["high_experts"] < 2


def test_numbers_lie_near_what_was_expected():
    """Within four spreads of their prior: one further off would stand for something that it does not name."""
    import math

    for name, (middle, spread) in PRIORS.items():
        assert abs(math.log(NUMBERS[name] / middle)) < 4 * spread, name


@pytest.mark.parametrize("name", FAMILIES)
def test_every_share_is_one_after_clipping(name):
    at = fitted(name).efficiency
    assert all(0 < getattr(at, share) <= 1 for share in SHARES)
    assert 0 < at.portable <= 1
    # an exponent of 1 hides nothing: below, two things at once would take longer than one after the other
    assert at.overlap > 1
    # a narrow dtype never runs above the chip's own peak for it
    assert all(0 < at.compute * share <= 1 for share in at.narrow.values())


def test_every_number_reaches_some_chip():
    """Each is used: other numbers for it change the calibration of at least one chip."""
    every = {name: fitted_calibration(chip(name), NUMBERS) for name in FAMILIES}
    for number in NUMBERS:
        changed = {name: fitted_calibration(chip(name), NUMBERS | {number: NUMBERS[number] * 0.9}) for name in FAMILIES}
        assert any(changed[name] != every[name] for name in FAMILIES), number


def test_no_share_is_above_the_data_sheet():
    """What is stored is what is used."""
    assert all(value <= 1 for name, value in NUMBERS.items() if name.split(".")[0] in SHARES)


def test_numbers_of_their_own_family_and_kind():
    h100, v5p = fitted("h100").efficiency, fitted("v5p").efficiency
    assert (h100.compute, v5p.compute) == (NUMBERS["compute.h100"], NUMBERS["compute.v5p"])
    assert (h100.attention, v5p.attention) == (NUMBERS["attention.h100"], NUMBERS["attention.tpu"])
    assert (h100.hbm, v5p.hbm) == (NUMBERS["hbm.gpu"], NUMBERS["hbm.tpu"])
    assert (h100.kernel_s, v5p.kernel_s) == (NUMBERS["kernel_s.gpu"], 0.0)
    assert (h100.portable, v5p.portable) == (NUMBERS["portable.h100"], 1.0)
    assert h100.overlap == v5p.overlap == NUMBERS["overlap"]
    assert (h100.narrow, v5p.narrow) == ({"fp8": NUMBERS["narrow.fp8.h100"]}, {})
    assert set(fitted("b200").efficiency.narrow) == {"fp8", "fp4"}
    assert fitted("h100").hop_s == {level: NUMBERS[f"hop_s.{level}"] for level in ("nvlink", "network")}


def test_relatives_have_the_same_numbers():
    for name, relative in (("h200", "h100"), ("v100", "a100"), ("tpu7x", "v6e")):
        assert fitted(name).efficiency.compute == fitted(relative).efficiency.compute
        assert fitted(name).chip == name


def test_blackwells_run_as_fast_as_their_power_allows():
    """Of more peak for each watt a smaller share is reached."""
    b200, b300 = chip("b200"), chip("b300")
    assert b200.power_w
    assert b300.power_w
    per_watt = [one.peak_flops["bf16"] / one.power_w for one in (b200, b300)]
    shares = [fitted(name).efficiency.compute for name in ("b200", "b300")]
    assert shares[1] / shares[0] == pytest.approx(per_watt[0] / per_watt[1])
    assert shares[0] == pytest.approx(NUMBERS["compute.blackwell"])


@pytest.mark.parametrize("name", ["mi300x", "cpu", "trn2", "h100-book", "v5p-book", "m3"])
def test_chips_that_nothing_is_known_of(name):
    """No numbers for other makers, made-up figures, and the book's: its worked answers rest on peaks."""
    assert fitted_calibration(chip(name)) is None


def test_catalogue_chips_of_the_makers_measured_have_numbers():
    tpus = {name for name, one in chips().items() if one.topology == "torus" and one.variant != "book"}
    assert tpus - set(FAMILIES) == {"v2", "v3"}
    assert set(FAMILIES) <= set(chips())


def test_a_chip_changed_in_a_file_keeps_the_numbers_of_its_base():
    custom = chip_from_table({"base": "h100", "hbm_bytes": 1e11})
    assert family(custom) == "h100"
    found = fitted_calibration(custom)
    assert (found.chip, found.efficiency) == ("h100-custom", fitted("h100").efficiency)
    assert family(chip_from_table({"base": "mi300x"})) is None


@pytest.mark.parametrize("base", ["h100", "gb300", "v5p"])
def test_the_name_of_a_chip_of_one_s_own_changes_no_number(base):
    named, nameless = chip_from_table({"base": base, "name": "big"}), chip_from_table({"base": base})
    assert fitted_calibration(named).efficiency == fitted_calibration(nameless).efficiency == fitted(base).efficiency


def test_given_numbers_stand_for_those_of_the_product():
    found = fitted_calibration(chip("h100"), {"compute.h100": 0.5, "network": 1.5, "overlap": 1.7})
    assert (found.efficiency.network, found.date) == (1.0, None)
    assert found.efficiency == Efficiency(compute=0.5, attention=0.5, network=1.0, overlap=1.7)
    nothing = efficiency_of(chip("v5e"), "v5e", {})
    assert nothing == Efficiency(attention=1.0)


def test_words_for_the_output():
    words = fitted("h100").describe()
    assert "fitted on published training steps" in words
    assert fitted_numbers().date in words


def test_a_fitted_step_is_slower_and_has_an_interval():
    model, cluster, job = catalogue.load_model("llama3-8b"), parse_cluster("h100:8x2"), Job(batch_seqs=64, seq_len=2048)
    strategy = Strategy(mesh=make_mesh({"fsdp": 16}))
    sheet = estimate_step(Setting(model, cluster, job), strategy)
    real = estimate_step(Setting(model, cluster, job, fitted("h100")), strategy)
    assert sheet.step_s_p10 is sheet.step_s_p90 is None
    assert real.step_s > 1.2 * sheet.step_s
    assert real.step_s_p10 == pytest.approx(real.step_s * NUMBERS["low"])
    assert real.step_s_p90 == pytest.approx(real.step_s * NUMBERS["high"])


def test_models_with_experts_have_an_interval_of_their_own():
    """What was measured on dense models says little about them."""
    job, strategy = Job(batch_seqs=64, seq_len=2048), Strategy(mesh=make_mesh({"expert": 8, "fsdp": 2}))
    real = estimate_step(
        Setting(catalogue.load_model("mixtral-8x7b"), parse_cluster("h100:8x2"), job, fitted("h100")), strategy
    )
    assert real.step_s_p10 == pytest.approx(real.step_s * NUMBERS["low_experts"])
    assert real.step_s_p90 == pytest.approx(real.step_s * NUMBERS["high_experts"])
    at = Efficiency(low=0.9, high=1.1, low_experts=0.7, high_experts=1.4)
    assert at.interval(has_experts=False) == (0.9, 1.1)
    assert at.interval(has_experts=True) == (0.7, 1.4)
    assert Efficiency(low=0.9, high=1.1).interval(has_experts=True) == (None, None)


def test_a_custom_chip_is_priced_with_its_own_figures():
    """Twice the peak of an H100: the FLOPs of products take half as long, at the same share."""
    job, strategy = Job(batch_seqs=64, seq_len=2048), Strategy(mesh=make_mesh({"fsdp": 16}))
    double = chip_from_table({"base": "h100", "peak_flops": {"bf16": 2 * 989.4e12}})
    seconds = []
    for one, calibration in ((chip("h100"), fitted("h100")), (double, fitted_calibration(double))):
        model, cluster = catalogue.load_model("llama3-8b"), make_cluster(one, (8, 2))
        costs = price_strategy(Setting(model, cluster, job, calibration), strategy).costs.all
        seconds.append(sum(cost.math_s * cost.count for cost in costs if cost.step.op == "einsum"))
    assert seconds[0] / seconds[1] == pytest.approx(2)


def test_the_file_refuses_what_it_does_not_know():
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"date": "x", "source": "y", "numbers": {}, "more": 1}, type(fitted_numbers()))
