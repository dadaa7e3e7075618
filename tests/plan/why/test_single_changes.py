"""Single changes of a plan: which are tried, which run, and that the best is found and honest."""

import msgspec
import pytest

from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step
from meshwright.plan.planner import rank_plans
from meshwright.plan.why.single_changes import estimate_in, single_changes, try_changes
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh


def setting_of(model="llama3-8b", cluster="h100:8x4", batch_seqs=256):
    return Setting(
        model=catalogue.load_model(model), cluster=parse_cluster(cluster), job=Job(batch_seqs=batch_seqs, seq_len=4096)
    )


def strategy_of(remat="full", count=1, **axes):
    return Strategy(mesh=make_mesh(axes), remat=remat, num_microbatches=count)


def words_of(setting, strategy):
    return {words for words, _ in single_changes(setting, strategy)}


def test_what_is_tried():
    tried = words_of(setting_of(), strategy_of(fsdp=32, count=2))
    assert {"remat sqrt for full", "4 microbatches for 2", "1 microbatch for 2", "ZeRO-1 for ZeRO-3"} <= tried
    assert "tensor 2 and fsdp 16 for 1 and 32" in tried
    assert not any("expert" in words or "schedule" in words for words in tried)
    assert any("expert 2" in words for words in words_of(setting_of("mixtral-8x7b"), strategy_of(fsdp=32)))
    assert "schedule zb-h1" in words_of(setting_of(), strategy_of(pipeline=4, data=8, count=8))
    assert "context attention by ulysses" in words_of(setting_of(), strategy_of(context=8, data=4))


def test_the_best_is_found_and_is_what_pricing_it_gives():
    setting, strategy = setting_of(), strategy_of(remat="full", fsdp=4, tensor=8)
    now = estimate_step(setting, strategy)
    tried = try_changes(setting, strategy, now.step_s)
    assert tried.gain_s == pytest.approx(now.step_s - tried.best.estimate.step_s)
    assert tried.gain_s > 0.05 * now.step_s
    again = estimate_step(setting, tried.best.strategy)
    assert again.step_s == tried.best.estimate.step_s
    for _, other in single_changes(setting, strategy):
        found = estimate_in(setting, other)
        if found is not None:
            assert found.step_s >= tried.best.estimate.step_s


def test_a_plan_of_the_search_has_no_single_change_that_helps():
    job = Job(batch_seqs=64, seq_len=4096)
    one = rank_plans(Setting(catalogue.load_model("llama3-8b"), parse_cluster("v5e:4x4"), job), top=1).plans[0]
    setting = Setting(model=one.model, cluster=one.cluster, job=job)
    tried = try_changes(setting, one.strategy, one.predicted.step_s)
    assert tried.best is None
    assert 0 < tried.num_legal <= tried.num_tried


def test_what_does_not_divide_or_fit_is_left_out():
    setting = setting_of(batch_seqs=32)
    assert estimate_in(setting, strategy_of(fsdp=32, count=3)) is None
    assert estimate_in(setting, strategy_of(fsdp=16)) is None
    large = msgspec.structs.replace(strategy_of(data=32), remat="none")
    assert estimate_step(setting, large).hbm_bytes_per_chip > setting.memory_limit
    assert estimate_in(setting, large) is None
