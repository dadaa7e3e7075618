"""Why not another strategy: the rule that refuses it, or its best completion beside the winner."""

import re

import pytest

from meshwright.core.errors import InputError
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step
from meshwright.plan.planner import rank_plans
from meshwright.plan.why.why_not import split_asked, why_not
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import standard_assignment

LLAMA8B, MIXTRAL = catalogue.load_model("llama3-8b"), catalogue.load_model("mixtral-8x7b")


@pytest.fixture(scope="module")
def result():
    return rank_plans(Setting(LLAMA8B, parse_cluster("h100:8x4"), Job(batch_seqs=256, seq_len=4096)), top=1)


@pytest.mark.parametrize(
    ("asked", "rule", "message"),
    [
        (
            {"tensor": 64, "pipeline": 2},
            "tensor | N",
            r"tensor=64 does not divide N=32 query heads .* {1, 2, 4, 8, 16, 32}",
        ),
        ({"pipeline": 3}, "devices", r"pipeline=3 does not divide the 32 chips of h100:8x4. Use pipeline in {1, 2, 4,"),
        ({"microbatches": 5}, "sequences", r"num_microbatches=5 does not divide"),
        ({"data": 32, "fsdp": 16}, "sequences", r"data=32 x fsdp=16 = 512 does not divide the batch of 256"),
        ({"expert": 2}, "experts", r"llama3-8b has no experts"),
        (
            {"data": 2, "fsdp": 2, "context": 1, "pipeline": 1, "tensor": 4},
            "devices",
            r"the product of the other axes must be 2",
        ),
        ({"schedule": "dualpipe", "pipeline": 4, "microbatches": 4}, "schedule", r"dualpipe"),
        ({"data": 32, "remat": "none", "microbatches": 1}, "memory", r"needs \d+ GB per chip .* 80 GB"),
    ],
)
def test_the_rule_that_refuses_it(result, asked, rule, message):
    told = why_not(result, asked)
    assert told.refusal is not None
    assert told.refusal.rule == rule
    assert re.search(message, told.refusal.message)


def test_the_advice_of_a_refused_size_runs(result):
    told = why_not(result, {"data": 2, "fsdp": 2, "context": 1, "pipeline": 1, "tensor": 4})
    assert told.refusal.message.endswith("Use data in {4}.")
    assert why_not(result, {"data": 4, "fsdp": 2, "context": 1, "pipeline": 1, "tensor": 4}).strategy is not None


def test_the_best_completion_beside_the_winner(result):
    told = why_not(result, {"tensor": 8})
    assert told.refusal is None
    assert told.strategy.mesh["tensor"] == 8
    again = estimate_step(Setting(LLAMA8B, parse_cluster("h100:8x4"), result.setting.job), told.strategy)
    assert told.estimate.step_s == pytest.approx(again.step_s)
    assert told.slower_s == pytest.approx(again.step_s - told.winner_estimate.step_s)
    assert told.winner_estimate.step_s == pytest.approx(result.plans[0].predicted.step_s, rel=1e-6)
    assert told.slower_s > 0
    # the terms add up to both steps, and their shares to the whole difference
    assert sum(term.winner_s for term in told.terms) == pytest.approx(told.winner_estimate.step_s)
    assert sum(term.other_s for term in told.terms) == pytest.approx(told.estimate.step_s)
    assert sum(term.share for term in told.terms) == pytest.approx(1)
    assert told.terms[0].name == "tensor"
    assert any(limit.name == "tensor" and limit.here == 8 for limit in told.limits)


def test_what_does_not_fit_is_estimated_all_the_same(result):
    told = why_not(result, {"data": 32, "remat": "none", "microbatches": 1})
    assert told.strategy.mesh["data"] == 32
    assert told.estimate.hbm_bytes_per_chip > 80e9
    assert any(limit.unit == "bytes" and limit.holds is False for limit in told.limits)
    assert told.slower_s is not None


def test_fields_are_held(result):
    told = why_not(result, {"remat": "full", "microbatches": 4, "zero": 2, "fsdp": 32})
    assert (told.strategy.remat, told.strategy.num_microbatches, told.strategy.zero) == ("full", 4, 2)
    assert why_not(result, {"schedule": "zb-h1", "pipeline": 4}).strategy.schedule == "zb-h1"
    assert why_not(result, {"offload": "optimizer"}).strategy.offload == ("optimizer",)


def test_what_the_result_was_planned_with_stays_unless_it_is_asked_for():
    held = {"axes": {"pipeline": 2}, "overrides": {"remat": "full"}}
    job = Job(batch_seqs=256, seq_len=4096)
    result = rank_plans(Setting(LLAMA8B, parse_cluster("h100:8x4"), job), top=1, **held)
    told = why_not(result, {"tensor": 4})
    assert (told.strategy.mesh["pipeline"], told.strategy.remat) == (2, "full")
    told = why_not(result, {"pipeline": 1, "remat": "block"})
    assert (told.strategy.mesh["pipeline"], told.strategy.remat) == (1, "block")


def test_the_winner_itself(result):
    mesh = {axis: size for axis, size in result.plans[0].strategy.mesh.items() if size > 1}
    told = why_not(result, mesh)
    assert told.strategy.mesh == result.plans[0].strategy.mesh
    assert told.slower_s == pytest.approx(0, abs=1e-12)


def test_groups_of_the_same_weights_are_compared_as_one():
    result = rank_plans(
        Setting(MIXTRAL, parse_cluster("h100:8x8"), Job(batch_seqs=512, seq_len=4096)), axes={"fsdp": 64}, top=1
    )
    told = why_not(result, {"fsdp": 8, "expert": 8})
    names = {term.name for term in told.terms}
    assert {"fsdp", "expert"} <= names
    assert "fsdp,expert" not in names


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tensr": 2}, "Did you mean 'tensor'"),
        ({"tensor": "many"}, "tensor=many is not a size"),
        ({"tensor": 0}, "tensor=0 is not a size"),
        ({"remat": "blocks"}, "Did you mean 'block'"),
        ({"zero": 5}, "zero=5 is not a stage"),
        ({"context_attention": "rng"}, "strategy.context_attention"),
    ],
)
def test_what_cannot_be_asked(result, asked, message):
    with pytest.raises(InputError, match=message):
        why_not(result, asked)


def test_short_names():
    fixed, fields = split_asked({"tensor": 2, "microbatches": 8, "zero": 1, "sequence_parallel": False})
    assert fixed == {"tensor": 2}
    assert fields["num_microbatches"] == 8
    assert fields["assignment"] == standard_assignment(zero=1, sequence_parallel=False)
    assert split_asked({"offload": "optimizer+activations"})[1] == {"offload": ("optimizer", "activations")}
