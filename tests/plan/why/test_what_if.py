"""What if: planned again under the changes, beside the plan of now."""

import msgspec
import pytest

from meshwright.core.errors import InputError
from meshwright.cost.setting import Setting
from meshwright.plan.planner import rank_plans
from meshwright.plan.why.what_if import what_if
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job

LLAMA8B = catalogue.load_model("llama3-8b")


@pytest.fixture(scope="module")
def result():
    return rank_plans(Setting(LLAMA8B, parse_cluster("h100:8x4"), Job(batch_seqs=256, seq_len=4096)), top=1)


def test_it_is_the_plan_of_the_changed_machine(result):
    told = what_if(result, {"chip.flops": 8.0, "links": 0.1})
    h100 = parse_cluster("h100:8x4").chip
    chip = msgspec.structs.replace(
        h100,
        peak_flops={dtype: 8 * rate for dtype, rate in h100.peak_flops.items()},
        vector_flops=8 * h100.vector_flops if h100.vector_flops else None,
        nvlink_bytes_per_s=h100.nvlink_bytes_per_s * 0.1,
        nic_bytes_per_s=h100.nic_bytes_per_s * 0.1,
    )
    cluster = msgspec.structs.replace(parse_cluster("h100:8x4"), chip=chip)
    again = rank_plans(Setting(LLAMA8B, cluster, Job(batch_seqs=256, seq_len=4096)), top=1).plans[0]
    assert told.then.strategy == again.strategy
    assert told.then.predicted.step_s == again.predicted.step_s
    assert told.now == result.plans[0]
    assert told.kept_s > told.then.predicted.step_s
    assert told.then.predicted.bound_by != "compute"
    assert sum(term.added_s for term in told.terms) == pytest.approx(told.then.predicted.step_s)


def test_twice_the_chips(result):
    told = what_if(result, {"chips": 2.0})
    assert told.then.cluster.short_name == "h100:8x8"
    assert 1.5 < told.speedup < 2.05
    assert told.kept_s is None


def test_a_plan_on_a_part_of_the_chips_is_kept_there():
    result = rank_plans(Setting(LLAMA8B, parse_cluster("h100:7"), Job(batch_seqs=8, seq_len=4096)), top=1)
    told = what_if(result, {"nvlink": 0.25})
    assert told.now.num_chips < 7
    assert told.now.predicted.step_s < told.kept_s >= told.then.predicted.step_s
    assert "chips. " in told.note or told.note.count("planned on") == 1


def test_half_the_batch_counts_tokens_per_second(result):
    told = what_if(result, {"batch": 0.5})
    now, then = told.now.predicted.step_s, told.then.predicted.step_s
    assert told.then.job.batch_seqs == 128
    assert told.speedup == pytest.approx(now / then / 2)


def test_nothing_changes_with_a_factor_of_one(result):
    told = what_if(result, {"chip.flops": 1.0})
    assert told.speedup == pytest.approx(1)
    assert told.kept_s == pytest.approx(told.now.predicted.step_s)


def test_where_nothing_runs_it_is_said(result):
    told = what_if(result, {"chip.memory": 0.01})
    assert told.then is None
    assert told.speedup is None
    assert "does not fit" in told.note


def test_what_was_held_stays_held():
    held = {"axes": {"tensor": 2}, "overrides": {"remat": "full"}}
    one = rank_plans(Setting(LLAMA8B, parse_cluster("h100:8x4"), Job(batch_seqs=256, seq_len=4096)), top=1, **held)
    told = what_if(one, {"seq": 2.0})
    assert (told.then.strategy.mesh["tensor"], told.then.strategy.remat) == (2, "full")


def test_what_has_no_meaning(result):
    with pytest.raises(InputError, match="has no ici"):
        what_if(result, {"ici": 2.0})
