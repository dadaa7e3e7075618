"""Prompts in chunks: the longest time between two tokens and the time to the first one, by hand."""

import msgspec
import numpy as np
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.train_step import price_strategy
from meshwright.plan.plan_file import save_plan
from meshwright.plan.serving.engines import phase_setting
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.service import Service
from meshwright.plan.serving.storing import StoredDtypes
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration

INT8 = StoredDtypes("int8", "int8")
LONG = Service(prompt_len=4096, output_len=256, tpot_s=10.0)


def planned(axes=None, *, model="llama3-8b", on="h100:4x1", **service):
    cluster = parse_cluster(on)
    setting = service_setting(load_model(model), cluster, fitted_calibration(cluster.chip))
    asked = msgspec.structs.replace(LONG, **service)
    return plan_service(setting, asked, stored=(INT8,), axes=axes or {"tensor": 4, "context": 1})


def seconds(found, length, known=0):
    """Returns the seconds of a prompt of so many tokens, some of which are known, on each device that has its own."""
    strategy = found.plans[0].generate.strategy
    setting = phase_setting(found.setting, "prefill", INT8, length - known, strategy.mesh["expert"], known=known)
    return float(price_strategy(setting, strategy).estimate.step_s)


def test_chunks_of_512():
    """A prompt of 4,096 is eight chunks; 256 steps of output have room for 32 prompts: at most 33 sequences."""
    found = planned(chunk_len=512)
    first, whole, end = seconds(found, 512), seconds(found, 4096), seconds(found, 4096, 3584)
    plan = found.plans[0]
    assert not plan.has_pools
    assert plan.chunk_len == 512
    assert plan.generate.batch_seqs == 32
    last = max(first, end)
    chunks = max(8 * (first + last) / 2, whole)
    assert plan.predicted.itl_s == pytest.approx(plan.generate.step_s + last)
    assert plan.predicted.ttft_s == pytest.approx(8 * plan.generate.step_s + chunks)
    # a sequence waits for all chunks of the 31 others
    assert plan.predicted.tpot_s == pytest.approx(plan.generate.step_s + 31 / 256 * chunks)


def test_chunks_on_devices_of_experts():
    """Two prompts at once, one on each half of the experts."""
    axes = {"tensor": 2, "expert": 2, "context": 1}
    found = planned(axes, model="qwen3-30b-a3b", chunk_len=512)
    first, end = seconds(found, 512), seconds(found, 4096, 3584)
    plan = found.plans[0]
    assert plan.chunk_len == 512
    assert (plan.generate.batch_seqs / 2 - 0.5) * 8 <= 256
    assert plan.predicted.itl_s == pytest.approx(plan.generate.step_s + max(first, end))


def test_whole_prompts_stop_all_others():
    found = planned(itl_s=100.0)
    whole = [plan for plan in found.plans if not plan.chunk_len]
    assert whole
    for plan in whole:
        at_a_time = max(1, (plan.generate.batch_seqs - 1) / 256 / plan.prefill.batch_seqs)
        assert plan.predicted.itl_s == pytest.approx(plan.generate.step_s + at_a_time * plan.prefill.step_s)
        assert plan.predicted.ttft_s == plan.prefill.step_s


def test_the_target_of_the_longest_time_chooses_chunks():
    """The mean time per token is never above the longest time between two tokens that the same plan promises."""
    made, chunks = [], []
    for itl_s in (1.0, 0.15, 0.08, 0.06):
        found = planned(itl_s=itl_s)
        assert all(
            plan.predicted.tpot_s <= plan.predicted.itl_s * (1 + 1e-9) <= itl_s * (1 + 1e-9) for plan in found.plans
        )
        made.append(found.plans[0].predicted.tokens_per_s_per_chip)
        chunks.append(found.plans[0].chunk_len or np.inf)
    assert made == sorted(made, reverse=True)
    assert made[-1] < made[0]
    assert chunks[-1] < chunks[0]
    with pytest.raises(CannotRunError, match=r"none meets TPOT 10 s .* and ITL 1 ms \(the shortest is"):
        planned(itl_s=1e-3)


def test_pools_wait_for_no_prompt():
    found = planned({"tensor": 2, "context": 1}, itl_s=1.0)
    pools = [plan for plan in found.plans if plan.has_pools]
    assert pools
    assert all(plan.predicted.itl_s == plan.generate.step_s and plan.chunk_len == 0 for plan in pools)


def test_chunks_longer_than_a_prompt_cut_nothing():
    same = planned(chunk_len=8192).plans[0]
    assert same.chunk_len == 0
    assert msgspec.structs.replace(same.predicted, itl_s=None) == planned().plans[0].predicted


def test_refusals():
    with pytest.raises(InputError, match="chunk_len=0 must be above 0"):
        msgspec.structs.replace(LONG, chunk_len=0)
    with pytest.raises(CannotRunError, match="chunks are planned, not written to files"):
        save_plan(planned(chunk_len=512).plans[0], "service.toml")
