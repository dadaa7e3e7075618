"""Scaling laws: published optima, and that each optimum is one."""

import numpy as np
import pytest

from meshwright.calculators.training import scaling_laws
from meshwright.core.errors import InputError

GOPHER_FLOPS = 5.76e23
SUMS = [law for law in scaling_laws.LAWS.values() if law.form == "sum"]


@pytest.mark.parametrize("law", SUMS, ids=lambda law: law.name)
def test_the_optimum_has_the_least_loss_of_the_budget(law):
    best = law.optimum(1e24)
    sizes = best.num_params * np.geomspace(0.2, 5, 2001)
    losses = law.loss(sizes, 1e24 / (6 * sizes))
    assert best.loss <= losses.min() + 1e-12
    assert abs(np.log(sizes[losses.argmin()] / best.num_params)) < 0.01
    assert 6 * best.num_params * best.num_tokens == pytest.approx(1e24)


def test_the_unrounded_constants_give_the_size_that_the_paper_states_for_gophers_budget():
    # Hoffmann et al. 2022, section 3.4: approach 3 gives 40 billion parameters.
    assert scaling_laws.LAWS["chinchilla-unrounded"].optimum(GOPHER_FLOPS).num_params == pytest.approx(40e9, rel=0.02)
    assert scaling_laws.LAWS["chinchilla"].optimum(GOPHER_FLOPS).num_params < 35e9


def test_the_exponents_of_size_in_compute():
    # Hoffmann et al. table 2: 0.46 by approach 3; Besiroglu et al.: 0.51; Kaplan et al.: 0.73.
    expected = {"chinchilla-unrounded": 0.46, "chinchilla": 0.45, "epoch": 0.51, "kaplan": 0.73}
    for name, exponent in expected.items():
        grown = scaling_laws.LAWS[name].optimum(1e25).num_params / scaling_laws.LAWS[name].optimum(1e24).num_params
        assert round(np.log10(grown), 2) == exponent


def test_the_refit_agrees_with_twenty_tokens_a_parameter():
    ratio = scaling_laws.LAWS["epoch"].optimum(GOPHER_FLOPS).tokens_per_param
    assert 17 < ratio < 22


def test_chinchilla_itself():
    law = scaling_laws.LAWS["chinchilla"]
    made = scaling_laws.fixed_ratio(6 * 70e9 * 1.4e12, law=law)
    assert (made.num_params, made.num_tokens) == pytest.approx((70e9, 1.4e12))
    assert made.loss == pytest.approx(1.69 + 406.4 / 70e9**0.34 + 410.7 / 1.4e12**0.28)


def test_kaplan_of_one_petaflop_day_and_in_the_limits():
    law = scaling_laws.LAWS["kaplan"]
    assert law.optimum(8.64e19).num_params == pytest.approx(1.3e9)
    # with endless data the law of size alone is left, and with endless size that of data
    assert law.loss(1e9, 1e30) == pytest.approx((6.4e13 / 1e9) ** 0.076, rel=1e-3)
    assert law.loss(1e30, 1e9) == pytest.approx((1.8e13 / 1e9) ** 0.103, rel=1e-3)


@pytest.mark.parametrize("law", scaling_laws.LAWS.values(), ids=lambda law: law.name)
def test_the_budget_for_a_loss_is_the_inverse_of_the_optimum(law):
    assert scaling_laws.flops_for_loss(law, law.optimum(3e23).loss) == pytest.approx(3e23, rel=1e-6)


def test_losses_out_of_reach():
    with pytest.raises(InputError, match=r"no budget up to 1e\+40 FLOPs reaches a loss of 1.69 .* whose floor is 1.69"):
        scaling_laws.flops_for_loss(scaling_laws.LAWS["chinchilla"], 1.69)
    with pytest.raises(InputError, match="without training"):
        scaling_laws.flops_for_loss(scaling_laws.LAWS["chinchilla"], 1e4)
    with pytest.raises(InputError, match="trains nothing"):
        scaling_laws.LAWS["epoch"].optimum(0)
    with pytest.raises(InputError, match="Did you mean 'kaplan'"):
        scaling_laws.scaling_law("caplan")


def test_a_given_size_spends_all_of_the_budget():
    spent = scaling_laws.LAWS["epoch"].spend(1e24, 8e9)
    assert spent.loss > scaling_laws.LAWS["epoch"].optimum(1e24).loss
    assert spent.num_tokens == pytest.approx(1e24 / 48e9)


def test_the_critical_batch_grows_as_the_loss_falls():
    assert scaling_laws.critical_batch_tokens(1.0) == 2e8
    assert scaling_laws.critical_batch_tokens(2.0) / scaling_laws.critical_batch_tokens(4.0) == pytest.approx(
        2 ** (1 / 0.21)
    )
