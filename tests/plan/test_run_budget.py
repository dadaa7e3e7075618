"""What a whole run takes, from a plan and a step time."""

import msgspec
import pytest

from meshwright.cost.setting import Setting
from meshwright.plan.planner import rank_plans
from meshwright.plan.run_budget import run_budget
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job


def planned(cluster, *, train_tokens):
    job = Job(batch_seqs=256, seq_len=4096, train_tokens=train_tokens)
    return rank_plans(Setting(catalogue.load_model("llama3-8b"), parse_cluster(cluster), job), top=1).plans[0]


def test_every_number():
    """10^12 tokens of llama3-8b on 32 H100 at 2 s a step of 2^20 tokens; N has no look-up table and no norms."""
    found = run_budget(planned("h100:8x4", train_tokens=10**12), step_s=2.0)
    seconds = 2.0 * 1e12 / 2**20
    assert found.steps == pytest.approx(1e12 / 2**20)
    assert found.flops == pytest.approx(6 * 7504658432 * 1e12)
    assert found.days == pytest.approx(seconds / 86400)
    assert found.chip_hours == pytest.approx(32 * seconds / 3600)
    assert found.mfu_6nd == pytest.approx(found.flops / (32 * seconds * 989.4e12), rel=1e-3)
    assert found.petaflop_days == pytest.approx(found.flops / 8.64e19)
    assert found.one_chip_years == pytest.approx(found.flops / 989.4e12 / 3.1536e7, rel=1e-3)
    assert found.power_w == 32 * 700
    assert found.energy_kwh == pytest.approx(32 * 0.7 * seconds / 3600)


def test_what_is_not_known():
    assert run_budget(planned("h100:8x4", train_tokens=None), step_s=2.0) is None
    one = planned("v5e:4x4", train_tokens=10**9)
    found = run_budget(one, step_s=2.0)
    assert (found.power_w, found.energy_kwh) == (None, None)
    assert found.cost_usd == pytest.approx(found.chip_hours * one.cluster.chip.price_usd_per_hour)
    free = msgspec.structs.replace(one.cluster.chip, price_usd_per_hour=None)
    one = msgspec.structs.replace(one, cluster=msgspec.structs.replace(one.cluster, chip=free))
    assert run_budget(one, step_s=2.0).cost_usd is None


def test_the_speed_scales_the_run():
    one = planned("v5e:4x4", train_tokens=10**9)
    slow, fast = run_budget(one, step_s=2.0), run_budget(one, step_s=1.0)
    assert slow.days == 2 * fast.days
    assert slow.mfu_6nd == pytest.approx(fast.mfu_6nd / 2)
    assert slow.flops == fast.flops


def test_days_with_failures():
    one = planned("h100:8x2048", train_tokens=10**12)
    found = run_budget(one, step_s=10.0)
    failures = found.failures
    assert (failures.rates, failures.of_chip) == ("llama3", True)
    assert failures.mtbf_s / 3600 == pytest.approx(54 * 24 / 466)
    assert failures.goodput == pytest.approx(0.92, abs=0.01)
    assert failures.ettr == pytest.approx(failures.goodput, abs=0.01)
    assert found.days_with_failures == found.days / failures.goodput
    other = run_budget(planned("v5p:4x4x4", train_tokens=10**12), step_s=10.0).failures
    assert (other.rates, other.of_chip) == ("llama3", False)
