"""The book's closed forms against its worked numbers, and against brute force."""

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


def test_worked_numbers_of_section_5():
    assert limits.data_parallel_min_tokens_per_chip(ALPHA, 3) == 850
    assert limits.data_parallel_min_batch(ALPHA, 3, 8960) == 7_616_000
    assert limits.fsdp_max_chips(16e6, ALPHA, 3) == pytest.approx(18_823, rel=1e-4)
    assert limits.tensor_max_size(28672, ALPHA, 2) == pytest.approx(22.5, rel=1e-2)
    assert limits.mixed_min_tokens_per_chip(ALPHA, 30e3, **MIXED) == pytest.approx(433.5)
    assert limits.Mixture(48000, 32768, 64, ALPHA, **MIXED).best_size == pytest.approx(13.7, rel=1e-3)
    assert limits.Mixture(48000, 32768, 64, ALPHA, **MIXED).math_over_comms == pytest.approx(1.374676222758064)
    assert limits.dcn_min_batch_per_pod(4.59e14, 2.5e10, 4) == 73_440
    assert limits.reduce_after_min_dim(ALPHA) == 5100
    assert limits.reduce_after_max_shards(8192, ALPHA) == pytest.approx(1.606, rel=1e-3)


def test_section_6_roots_and_rounding():
    roots = limits.Mixture(4.19e6, 28672, 8960, ALPHA, **MIXED).roots
    assert roots.upper == pytest.approx(1927, rel=2e-3)
    assert limits.fsdp_roots_middle(4.19e6, ALPHA, fsdp_axes=2) == pytest.approx(1643, rel=1e-3)
    best = limits.Mixture(4.19e6, 28672, 8960, ALPHA, **MIXED).best_size
    assert best == pytest.approx(1618, rel=1e-3)
    assert roots.lower < best < roots.upper
    wanted = (2048, 4)
    assert limits.round_split(best, 8960) == limits.round_split(roots.upper, 8960) == wanted
    assert limits.round_split(13.7, 64) == (16, 4)
    with pytest.raises(InputError, match="cannot split"):
        limits.round_split(0, 64)


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
