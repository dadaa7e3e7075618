"""Rates inside a step: found again from seconds made of known rates, and measured on this machine."""

import msgspec
import numpy as np
import pytest

from meshwright.cost.kernels import is_product, num_kernels, tiled_share
from meshwright.cost.ops import is_attention
from meshwright.cost.train_step import estimate_step, price_strategy
from meshwright.measure.machine import measure_machine
from meshwright.measure.machine_step import REFERENCES, Measured, Spent, host_rates, two_rates
from meshwright.measure.profile_compare import label_text
from meshwright.spec.calibration import (
    AttentionRate,
    Calibration,
    CollectiveRate,
    HostRates,
    load_calibration,
    save_calibration,
)
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.strategy import Strategy, make_mesh

KNOWN = HostRates(
    product_flops_per_s=8e10,
    product_bytes_per_s=2e10,
    attention={
        "attention": AttentionRate(flops_per_s=5e10, scores_per_s=4e8),
        "attention_backward": AttentionRate(flops_per_s=6e10, scores_per_s=3e8),
    },
    op_bytes_per_s={},
    stream_bytes_per_s=6e9,
    loop_bytes_per_s=9e9,
)


def calibration(host=None, size=4):
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    rates = [CollectiveRate(kind=kind, group_size=size, latency_s=1e-4, bytes_per_s=2e9) for kind in kinds]
    return Calibration(
        name="made",
        chip="cpu",
        matmul_flops_per_s={"fp32": 5e10},
        memory_bytes_per_s=5e9,
        memory_bytes=1e10,
        collectives=tuple(rates),
        host=host,
    )


def strategy(size=4):
    return Strategy(mesh=make_mesh({"fsdp": size}), remat="none", state="fp32")


def priced(number, size=4, host=KNOWN):
    model, job = REFERENCES[number]
    cluster = parse_cluster(f"cpu:{size}")
    return price_strategy(model, cluster, job, strategy(size), calibration=calibration(host, size))


def measured(number, *, left_s=0.0, outside_s=0.01, size=4):
    """A reference step whose seconds are those of the known rates."""
    found = priced(number, size)
    seconds = {"outside the steps: copy": outside_s}
    for cost in found.costs:
        if not cost.step.is_collective:
            name = label_text(cost.step)
            seconds[name] = seconds.get(name, 0.0) + float(cost.local_s * cost.count)
    return Measured(priced=found, seconds=seconds, gaps_s=left_s)


def test_two_rates_are_found_again():
    spent = [Spent(first=f, second=s, seconds=f / 7 + s / 3) for f, s in ((1, 5), (4, 2), (9, 9))]
    assert two_rates(spent) == pytest.approx((7, 3))


def test_rates_are_never_negative():
    grows = [Spent(first=f, second=1 / f, seconds=f * f) for f in (1.0, 2.0, 4.0)]
    assert all(rate > 0 for rate in two_rates(grows))


def test_known_rates_are_found_again():
    found = host_rates([measured(0), measured(1)])
    assert found.product_flops_per_s == pytest.approx(KNOWN.product_flops_per_s)
    assert found.product_bytes_per_s == pytest.approx(KNOWN.product_bytes_per_s)
    for op, rate in KNOWN.attention.items():
        assert found.attention[op].flops_per_s == pytest.approx(rate.flops_per_s)
        assert found.attention[op].scores_per_s == pytest.approx(rate.scores_per_s)
    assert found.stream_bytes_per_s == pytest.approx(KNOWN.stream_bytes_per_s)
    assert all(rate == pytest.approx(KNOWN.stream_bytes_per_s) for rate in found.op_bytes_per_s.values())


def test_what_is_left_belongs_to_collectives_of_several_devices_and_to_the_ops_of_one():
    steps = [priced(0), priced(1)]
    moves = [[cost for cost in step.costs if cost.step.is_collective] for step in steps]
    left = [sum(float((2 * c.latency_s + 3 * (c.network_s - c.latency_s)) * c.count) for c in costs) for costs in moves]
    several = host_rates([measured(0, left_s=left[0]), measured(1, left_s=left[1])])
    assert several.meets == pytest.approx(2)
    assert several.waits == pytest.approx(3)
    alone = host_rates([measured(0, left_s=0.01, size=1), measured(1, left_s=0.03, size=1)])
    ops = [c for n in (0, 1) for c in priced(n, 1).costs]
    kernels = sum(num_kernels(c.step, priced(0, 1).sizes) * c.count for c in ops)
    assert alone.kernel_s == pytest.approx(0.04 / kernels)
    assert alone.waits == 1


def test_ops_are_priced_one_after_the_other():
    model, job = REFERENCES[0]
    found = priced(0)
    for cost in found.costs:
        if not cost.step.is_collective and not is_attention(cost.step):
            rate = KNOWN.product_bytes_per_s if is_product(cost.step) else KNOWN.stream_bytes_per_s
            assert float(cost.local_s) == pytest.approx(float(cost.flops / 8e10 + cost.hbm_bytes / rate))
    slower = msgspec.structs.replace(KNOWN, waits=2.0, meets=3.0)
    cluster = parse_cluster("cpu:4")
    waiting = estimate_step(model, cluster, job, strategy(), calibration=calibration(slower)).step_s
    moves = [cost for cost in found.costs if cost.step.is_collective]
    extra = sum(float((cost.network_s + cost.latency_s) * cost.count) for cost in moves)
    assert waiting - found.estimate.step_s == pytest.approx(extra)


@pytest.mark.parametrize("length", [96, 128, 200, 512, 1100])
def test_share_of_the_tiles_that_attention_computes(length):
    from meshwright.nn.attention_staircase import tile_size

    model, job = REFERENCES[0]
    long = msgspec.structs.replace(job, seq_len=length)
    found = price_strategy(model, parse_cluster("cpu:1"), long, strategy(1), calibration=calibration(KNOWN, 1))
    step = next(cost.step for cost in found.costs if cost.step.op == "attention")
    ends = np.minimum(np.arange(length) // tile_size(length) * tile_size(length) + tile_size(length), length)
    assert tiled_share(step, found.sizes) == pytest.approx(ends.sum() / length**2)


def test_round_trip(tmp_path):
    save_calibration(calibration(KNOWN), tmp_path / "rates.toml")
    assert load_calibration(tmp_path / "rates.toml") == calibration(KNOWN)


@pytest.mark.slow
def test_rates_of_this_machine(tmp_path):
    found = measure_machine(4, matmul_shape=(64, 64, 64), seconds_per_figure=0.02)
    assert found.host is not None
    assert found.host.product_flops_per_s > 1e7
    assert set(found.host.attention) == {"attention", "attention_backward"}
    assert {"rms_norm", "silu_mul", "adamw"} <= set(found.host.op_bytes_per_s)
    assert found.sources["host"]
    save_calibration(found, tmp_path / "rates.toml")
    assert load_calibration(tmp_path / "rates.toml") == found
