"""Rates inside a step: found again from seconds made of known rates, and measured on this machine."""

import msgspec
import numpy as np
import pytest

from meshwright.bench.machine import measure_machine, with_host_rates
from meshwright.bench.machine_step import GAPS, REFERENCES, MeasuredStep, Spent, host_rates, pace
from meshwright.cost.breakdown import Breakdown, label_text
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step, price_strategy
from meshwright.cost.work.host_work import Amounts, is_product, num_calls, tiled_share
from meshwright.cost.work.kernels import num_kernels
from meshwright.cost.work.ops import is_attention
from meshwright.spec.calibration import (
    Calibration,
    CollectiveRate,
    HostRates,
    Pace,
    host_rates_in,
    load_calibration,
    save_calibration,
)
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh

KNOWN = HostRates(
    product=Pace(flop=1 / 8e10, byte=1 / 2e10, kept_byte=1 / 3e10, call=2e-5),
    ops={
        "attention": Pace(flop=1 / 5e10, score=1 / 4e8, call=3e-5),
        "attention_backward": Pace(flop=1 / 6e10, score=1 / 3e8, call=4e-5),
    },
    stream=Pace(byte=1 / 6e9, kept_byte=1 / 4e9),
    loop_byte=1 / 9e9,
)


def calibration(host=None, size=4):
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    rates = [CollectiveRate(kind=kind, group_size=size, latency_s=1e-4, bytes_per_s=2e9) for kind in kinds]
    return Calibration(
        name="made",
        chip="cpu",
        matmul_flops_per_s={"fp32": 5e10, "bf16": 2e11},
        weight_bytes_per_s={"fp32": 1.5e10, "bf16": 1.2e10},
        memory_bytes_per_s=5e9,
        memory_bytes=1e10,
        collectives=tuple(rates),
        host=host,
    )


def priced(number, size=4, host=KNOWN):
    one, cluster = REFERENCES[number], parse_cluster(f"cpu:{size}")
    return price_strategy(Setting(one.model, cluster, one.job_for(size), calibration(host, size)), one.strategy(size))


def test_what_a_step_is_made_of_adds_up_with_the_copies_of_its_loops():
    for number in range(len(REFERENCES)):
        found = priced(number)
        assert sum(term.added_s for term in Breakdown(found).terms) == pytest.approx(found.estimate.step_s, rel=1e-9)


def measured(number, *, left_s=0.0, size=4):
    """A reference step whose seconds are those of the known rates, with 1 s for each 6 GB of the update besides."""
    found = priced(number, size)
    updates = sum(float(cost.hbm_bytes * cost.count) for cost in found.costs.all if cost.step.op == "adamw")
    seconds = {"outside the steps: copy": updates / 6e9}
    for cost in found.costs.all:
        if not cost.step.is_collective:
            name = label_text(cost.step)
            seconds[name] = seconds.get(name, 0.0) + float(cost.local_s * cost.count)
    return MeasuredStep(priced=found, seconds={**seconds, GAPS: left_s})


def test_a_pace_is_found_again():
    spent = [Spent(amounts=Amounts(flop=f, byte=b), seconds=f / 7 + b / 3) for f, b in ((1, 5), (4, 2), (9, 9))]
    found = pace(spent)
    assert (found.flop, found.byte) == pytest.approx((1 / 7, 1 / 3))
    assert found.score == found.call == 0


def test_no_part_of_a_pace_is_negative():
    grows = [Spent(amounts=Amounts(flop=f, byte=1 / f), seconds=f * f) for f in (1.0, 2.0, 4.0)]
    found = pace(grows)
    assert found.flop > 0
    assert found.byte == 0


def test_nothing_measured_is_a_pace_of_nothing():
    assert pace([]) == pace([Spent(amounts=Amounts(flop=1.0), seconds=0.0)]) == Pace()


def test_known_rates_are_found_again():
    found = host_rates([measured(number) for number in range(len(REFERENCES))])
    same_pace(found.product, KNOWN.product)
    same_pace(found.stream, KNOWN.stream)
    for op, known in KNOWN.ops.items():
        same_pace(found.ops[op], known)
    same_pace(found.ops["silu_mul"], KNOWN.stream)
    same_pace(found.ops["add"], KNOWN.stream)
    assert found.ops["adamw"].byte == pytest.approx(2 / 6e9, rel=1e-3)
    assert found.loop_byte == pytest.approx(0, abs=1e-13)


def same_pace(found, known):
    assert msgspec.structs.astuple(found) == pytest.approx(msgspec.structs.astuple(known), rel=1e-6)


def test_what_is_left_belongs_to_collectives_of_several_devices_and_to_the_ops_of_one():
    steps = [priced(0), priced(1)]
    moves = [[cost for cost in step.costs.all if cost.step.is_collective] for step in steps]
    left = [sum(float((2 * c.latency_s + 3 * (c.network_s - c.latency_s)) * c.count) for c in costs) for costs in moves]
    several = host_rates([measured(0, left_s=left[0]), measured(1, left_s=left[1])])
    assert several.meets == pytest.approx(2)
    assert several.waits == pytest.approx(3)
    alone = host_rates([measured(0, left_s=0.01, size=1), measured(1, left_s=0.03, size=1)])
    ops = [c for n in (0, 1) for c in priced(n, 1).costs.all]
    kernels = sum(num_kernels(c.step, priced(0, 1).sizes) * c.count for c in ops)
    assert alone.kernel_s == pytest.approx(0.04 / kernels)
    assert alone.waits == 1


def held(found, step):
    block = next((b for b in found.derived.blocks if b.block.name == step.block and b.block.carry), None)
    return block.kept if block is not None and step.phase == "forward" else ()


def test_ops_are_priced_one_after_the_other():
    one, found = REFERENCES[0], priced(0)
    for cost in found.costs.all:
        if not cost.step.is_collective and not is_attention(cost.step):
            kept = found.sizes.total(*(a for a in (cost.step.result, *cost.step.more) if a in held(found, cost.step)))
            seconds = cost.flops / 8e10 + cost.hbm_bytes / 2e10 + kept / 3e10 + 2e-5
            if not is_product(cost.step):
                seconds = cost.hbm_bytes / 6e9 + kept / 4e9
            assert float(cost.local_s) == pytest.approx(float(seconds))
    slower = msgspec.structs.replace(KNOWN, waits=2.0, meets=3.0)
    cluster = parse_cluster("cpu:4")
    waiting = estimate_step(Setting(one.model, cluster, one.job, calibration(slower)), one.strategy(4)).step_s
    moves = [cost for cost in found.costs.all if cost.step.is_collective]
    extra = sum(float((cost.network_s + cost.latency_s) * cost.count) for cost in moves)
    assert waiting - found.estimate.step_s == pytest.approx(extra)


@pytest.mark.parametrize("length", [96, 128, 200, 512, 1100])
def test_share_of_the_tiles_that_attention_computes(length):
    from meshwright.masks.kernels import tile_rows

    one = REFERENCES[0]
    long = msgspec.structs.replace(one.job, seq_len=length)
    found = price_strategy(Setting(one.model, parse_cluster("cpu:1"), long, calibration(KNOWN, 1)), one.strategy(1))
    step = next(cost.step for cost in found.costs.all if cost.step.op == "attention")
    ends = np.minimum(np.arange(length) // tile_rows(length) * tile_rows(length) + tile_rows(length), length)
    assert tiled_share(step, found.sizes) == pytest.approx(ends.sum() / length**2)
    assert num_calls(step, found.sizes) == 16 * 4 * -(-length // tile_rows(length))


@pytest.mark.parametrize(("state", "width", "rate"), [("fp32", 4, 1.5e10), ("bf16-adam", 2, 1.2e10)])
def test_products_of_few_rows_take_the_time_to_read_their_weights(state, width, rate):
    one, job = REFERENCES[1], Job(kind="decode", batch_seqs=2, seq_len=64)
    strategy = msgspec.structs.replace(one.strategy(1), state=state)
    found = price_strategy(Setting(one.model, parse_cluster("cpu:1"), job, calibration(KNOWN, 1)), strategy)
    head = next(cost for cost in found.costs.all if cost.step.result.name == "logits")
    weight = one.model.d_model * one.model.vocab_size * width
    assert weight / rate < float(head.math_s + head.hbm_s) < 1.1 * weight / rate


def test_products_of_another_dtype_in_a_step_keep_their_ratio_by_themselves():
    found = calibration(KNOWN)
    narrow, wide = (host_rates_in(found, dtype).product for dtype in ("bf16", "fp32"))
    assert (wide, narrow.flop, narrow.byte) == (KNOWN.product, KNOWN.product.flop / 4, KNOWN.product.byte)


def test_round_trip(tmp_path):
    save_calibration(calibration(KNOWN), tmp_path / "rates.toml")
    assert load_calibration(tmp_path / "rates.toml") == calibration(KNOWN)


@pytest.mark.slow
def test_rates_of_this_machine(tmp_path):
    found = with_host_rates(measure_machine(4, matmul_shape=(64, 64, 64), seconds_per_figure=0.02))
    assert 0 < found.host.product.flop < 1e-7
    assert {"attention", "attention_backward", "rms_norm", "silu_mul", "adamw"} <= set(found.host.ops)
    assert found.sources["host"]
    save_calibration(found, tmp_path / "rates.toml")
    assert load_calibration(tmp_path / "rates.toml") == found


def test_attention_on_a_cache_is_two_products():
    """Priced as matrix products are: FLOPs, bytes and two calls."""
    one, cluster = REFERENCES[0], parse_cluster("cpu:4")
    job = msgspec.structs.replace(one.job, kind="decode")
    strategy = Strategy(mesh=make_mesh({"tensor": 4}), state="fp32")
    found = price_strategy(Setting(one.model, cluster, job, calibration(KNOWN)), strategy)
    cost = next(cost for cost in found.costs.all if cost.step.op == "cached_attention")
    product = KNOWN.product
    assert cost.time_s == pytest.approx(product.flop * cost.flops + product.byte * cost.hbm_bytes + 2 * product.call)
    assert found.estimate.step_s > 0
