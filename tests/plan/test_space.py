"""What a search ranges over: patterns derived once, and what stays as it is given."""

import pytest

from meshwright.cost.setting import Setting
from meshwright.plan.space import EMULATED, FULL, USUAL, Choices, open_space
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import REMAT_POLICIES, RERUN_POLICIES, USUAL_POLICIES, Strategy, make_mesh

TINY = catalogue.load_model("tiny")
OPEN = Strategy(mesh=make_mesh({}))


def space(template=OPEN, **choices):
    return open_space(Setting(TINY, parse_cluster("v5e:4x4"), Job(batch_seqs=64, seq_len=256)), template, **choices)


def kinds(where):
    """Of the patterns that repeat no heads."""
    patterns = (p for p in where.patterns if not p.repeats)
    return [(p.strategy.remat, p.strategy.zero, p.strategy.context_attention) for p in patterns]


@pytest.mark.parametrize("choices", [USUAL, FULL, EMULATED], ids=["usual", "full", "emulated"])
def test_one_pattern_for_each_way_to_assign_axes(choices):
    where = space(choices=choices)
    # a chunked loss head takes another form where the vocabulary is whole
    heads = len(choices.remats) + ("full" in choices.remats)
    ways = heads * len(choices.zeros) * len(choices.sequence_parallel) * len(choices.context_attention)
    patterns = [p for p in where.patterns if not p.repeats]
    assert len(patterns) == ways
    different = {
        (kind, str(p.strategy.assignment["activation"]["T"]), p.tensor_split)
        for p, kind in zip(patterns, kinds(where), strict=True)
    }
    assert len(different) == ways
    assert (where.schedules, where.offloads) == (choices.schedules, choices.offloads)


def test_each_space_is_within_the_larger_one():
    assert set(EMULATED.remats) < set(USUAL_POLICIES) == set(USUAL.remats) < set(REMAT_POLICIES)
    assert set(USUAL.zeros) <= set(FULL.zeros)
    assert set(USUAL.schedules) <= set(FULL.schedules)


def test_only_the_first_assignment_is_looked_at_everywhere():
    for pattern in space().patterns:
        strategy, needs = pattern.strategy, set(pattern.needs)
        assert (("fsdp", "expert", "context") in needs) == (strategy.zero == 1)
        assert (("context",) in needs) == (strategy.context_attention == "ulysses")


def test_patterns_that_cannot_differ_are_left_out():
    """With context and fsdp of one device, ZeRO-1 is ZeRO-3 and ulysses is a ring."""
    assert {mode for _, _, mode in kinds(space(fixed={"context": 1}))} == {"ring"}
    assert {zero for _, zero, _ in kinds(space(fixed={"context": 1, "fsdp": 1, "expert": 1}))} == {3}
    assert {zero for _, zero, _ in kinds(space(fixed={"context": 1, "fsdp": 1}))} == {3, 1}


def test_few_kv_heads_are_repeated_in_patterns_of_their_own():
    """On a torus of 16 chips tiny, of 8 query and 4 kv heads, in every way to assign axes."""
    every = space().patterns
    found = [p for p in every if p.repeats]
    alike = {(p.strategy.remat, p.strategy.zero, p.strategy.context_attention, p.needs) for p in every}
    assert {(p.strategy.remat, p.strategy.zero, p.strategy.context_attention, p.needs) for p in found} == alike
    assert {p.repeats for p in found} == {("tensor",), ("context", "tensor")}
    assert all(p.tensor_split in (True, None) for p in found if p.repeats == ("tensor",))
    ulysses = [p for p in found if p.strategy.context_attention == "ulysses"]
    assert {p.tensor_split for p in ulysses} == {True, False, None}
    assert not any(p.repeats for p in space(fixed={"tensor": 8, "context": 1}).patterns)
    assert any(step.op == "repeat_heads" for step, _ in space(fixed={"tensor": 8}).patterns[0].derived.steps())


def test_given_fields_stay_as_the_template_has_them():
    template = Strategy(
        mesh=make_mesh({}), remat="every-4", num_microbatches=4, schedule="zb-h1", chunks=1, offload=("optimizer",),
        context_attention="gather",
    )  # fmt: skip
    given = ("remat", "num_microbatches", "schedule", "chunks", "offload", "context_attention", "assignment")
    where = space(template, given=given)
    assert kinds(where) == [("every-4", 3, "gather")]
    assert (where.schedules, where.offloads) == (("zb-h1",), (("optimizer",),))
    assert (where.num_microbatches, where.chunks) == (4, 1)
    free = space(template)
    assert len(free.patterns) == len(space().patterns)
    assert (free.num_microbatches, free.chunks) == (None, None)


def test_ranks_follow_the_order_of_remat():
    ranks = {pattern.strategy.remat: pattern.rank for pattern in space().patterns}
    assert sorted(ranks, key=lambda remat: ranks[remat]) == list(USUAL_POLICIES)


def test_layers_that_run_again_for_each_other_are_opened_on_demand():
    plain = space()
    more = plain.with_reruns()
    added = more.patterns[len(plain.patterns) :]
    assert all(one is other for one, other in zip(more.patterns, plain.patterns, strict=False))
    assert {p.strategy.remat for p in added} == set(RERUN_POLICIES)
    assert {p.needs for p in added} == {p.needs for p in plain.patterns}
    held = space(Strategy(mesh=make_mesh({}), remat="block"), given=("remat",))
    assert held.with_reruns() is held


def test_a_single_list_of_names_is_one_policy():
    where = space(Strategy(mesh=make_mesh({}), remat=("qr", "kr")), given=("remat",), choices=Choices(zeros=(3,)))
    assert {pattern.strategy.remat for pattern in where.patterns} == {("qr", "kr")}
