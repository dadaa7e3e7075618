"""The book's closed forms against brute force, where `tests/oracles` has no worked answer."""

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.cost.formulas import limits
from meshwright.cost.network.collectives import leg_rates
from meshwright.spec.chip import chip, peak
from tests.torus_legs import ring

ALPHA = 2550.0
MIXED = {"fsdp_axes": 2, "tensor_axes": 1}


def test_alpha_of_the_chips():
    found = {
        name: limits.ici_intensity(peak(chip(name), "bf16"), chip(name).ici_axis_bytes_per_s)
        for name in ("v5p", "v4p", "v5e")
    }
    assert {name: round(alpha) for name, alpha in found.items()} == {"v5p": 2550, "v4p": 3056, "v5e": 2189}


def test_splits_are_rounded_to_powers_of_two():
    """Roots and the best size: How to Scale Your Model, section 6.3."""
    mixture = limits.Mixture(4.19e6, 28672, 8960, ALPHA, **MIXED)
    assert mixture.best_size == pytest.approx(1618, rel=1e-3)
    assert mixture.roots.lower < mixture.best_size < mixture.roots.upper
    wanted = (2048, 4)
    assert limits.round_split(mixture.best_size, 8960) == limits.round_split(mixture.roots.upper, 8960) == wanted
    with pytest.raises(InputError, match="cannot split"):
        limits.round_split(0, 64)


def test_each_axis_raises_the_largest_tensor_size():
    assert limits.tensor_max_size(28672, ALPHA, 2) == pytest.approx(22.5, rel=1e-2)


def comms_over_math(x, batch, d_ff, num_chips, alpha, fsdp_axes, tensor_axes):
    """Forward times of one layer as the ring formulas give them, D cancelled."""
    link = 1.0
    fsdp = leg_rates([ring(x, link)] * fsdp_axes)["all_gather"].seconds_per_byte * d_ff * x / num_chips
    tensor = leg_rates([ring(num_chips / x, link)] * tensor_axes)["all_gather"].seconds_per_byte * batch / x
    return (fsdp + tensor) / (batch * d_ff / num_chips / (alpha * 2 * link))


@pytest.mark.parametrize(
    ("batch", "d_ff", "num_chips"), [(4.19e6, 28672, 8960), (48000, 32768, 64), (2e6, 28672, 2048), (1e5, 28672, 1024)]
)
def test_closed_forms_agree_with_the_ring_times(batch, d_ff, num_chips):
    xs = np.geomspace(1.5, num_chips / 1.5, 4001)
    ratios = comms_over_math(xs, batch, d_ff, num_chips, ALPHA, 2, 1)
    best = limits.Mixture(batch, d_ff, num_chips, ALPHA, **MIXED).best_size
    assert xs[np.argmin(ratios)] == pytest.approx(best, rel=5e-3)
    over = limits.Mixture(batch, d_ff, num_chips, ALPHA, **MIXED).math_over_comms
    assert 1 / ratios.min() == pytest.approx(over, rel=1e-4)
    roots = limits.Mixture(batch, d_ff, num_chips, ALPHA, **MIXED).roots
    bound = (ratios < 1).any()
    assert bound == (limits.Mixture(batch, d_ff, num_chips, ALPHA, **MIXED).discriminant > 0) == (over > 1)
    if bound:
        assert xs[ratios < 1].min() == pytest.approx(roots.lower, rel=5e-3)
        assert xs[ratios < 1].max() == pytest.approx(roots.upper, rel=5e-3)
    else:
        assert np.isnan(roots.lower)


def test_least_batch_is_where_the_ratio_is_one():
    per_chip = limits.mixed_min_tokens_per_chip(ALPHA, 28672, **MIXED)
    assert per_chip == pytest.approx(453.6, rel=1e-3)
    assert limits.Mixture(per_chip * 512, 28672, 512, ALPHA, **MIXED).math_over_comms == pytest.approx(1)


def test_sequences_and_flat_fsdp():
    assert limits.sequence_limit_chips(8e6, 8e3) == 1000
    assert limits.sequence_limit_chips(2**22, 4096, context=2, tensor=4) == 8192
    assert limits.flat_fsdp_comms_s(70e9, 200e9) == pytest.approx(2.1)
    assert limits.flat_fsdp_max_chips(8e6, 200e12, 100e9) == pytest.approx(4000)
