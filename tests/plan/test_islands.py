"""Plans of islands: one island is searched, joined with what islands exchange, and the words of both."""

import msgspec
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.units import format_seconds
from meshwright.cost.breakdown import Breakdown
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.islands import PERIODS, exchange_words, plan_of_island, result_of_island
from meshwright.plan.legal import legal
from meshwright.plan.pareto import pareto
from meshwright.plan.plan_file import load_plan, save_plan
from meshwright.plan.planner import rank_plans
from meshwright.plan.why.explain import explain, largest_steps
from meshwright.plan.why.setup_changes import parse_what_if
from meshwright.plan.why.what_if import what_if
from meshwright.plan.why.why_not import why_not
from meshwright.spec.assumptions import Assumptions
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh

ON = "4*h100:8x4@1Gbit/s"
DILOCO = {"islands_sync": "diloco"}


def setting(on=ON, batch=512):
    job = Job(batch_seqs=batch, seq_len=8192, train_tokens=10**12)
    return Setting(load_model("llama3-8b"), parse_cluster(on), job)


@pytest.fixture(scope="module")
def gradients():
    return rank_plans(setting(), top=3)


@pytest.fixture(scope="module")
def diloco():
    return rank_plans(setting(), overrides={"strategy.islands_sync": "diloco", "outer_bits": 4}, top=1)


def test_the_plan_of_an_island_is_found_and_joined(gradients):
    """Every listed plan is one of an island with a quarter of the batch, and lasts as much longer as the sums take."""
    alone = rank_plans(setting("h100:8x4", 128), top=3)
    assert [plan.strategy.inner() for plan in gradients.plans] == [plan.strategy for plan in alone.plans]
    for plan, island in zip(gradients.plans, alone.plans, strict=True):
        assert plan.strategy.num_islands == 4
        assert (plan.num_chips, plan.job.batch_seqs, plan.cluster.short_name) == (128, 512, ON)
        priced = price_strategy(plan.setting, plan.strategy)
        assert plan.predicted.step_s == pytest.approx(island.predicted.step_s + priced.exchange_s)
        assert legal(plan.setting, plan.strategy) == ()
        assert plan_of_island(plan).predicted.step_s == island.predicted.step_s
        # 10^12 tokens at 4 Mi tokens a step
        assert plan.predicted.train_days == pytest.approx(plan.predicted.step_s * 10**12 / (512 * 8192) / 86400)


def test_what_sums_of_gradients_cost_and_what_periods_would_give_is_said(gradients):
    text = "\n".join(gradients.notes)
    assert "sums of gradients between islands expose 386 s of a " in text
    assert " step: 385 s on the link (48.2 GB from each island" in text
    expected = price_strategy(
        gradients.plans[0].setting,
        msgspec.structs.replace(gradients.plans[0].strategy, islands_sync="diloco", outer_every=30),
    ).estimate.step_s
    assert f"--set strategy.outer_every=30 a step takes {format_seconds(expected)}" in text
    assert "change what the model learns, which is not predicted" in text
    fast = rank_plans(setting("2*h100:8x32@800GB/s", 4096), top=1)
    assert "outer_every" not in "\n".join(fast.notes)


def test_the_period_is_the_shortest_that_adds_little(diloco):
    plan = diloco.plans[0]
    assert plan.strategy.outer_every == PERIODS[-1]  # none is long enough on this link
    assert plan.strategy.outer_bits == 4
    quick = rank_plans(setting("4*h100:8x4@100Gbit/s"), overrides=DILOCO, top=1).plans[0]
    assert quick.strategy.outer_every == 100
    for every, adds_little in ((30, False), (100, True)):
        priced = price_strategy(quick.setting, msgspec.structs.replace(quick.strategy, outer_every=every))
        assert (priced.exchange_s <= 0.05 * priced.estimate.step_s) == adds_little
    given = rank_plans(setting(), overrides={**DILOCO, "outer_every": 7}, top=1)
    assert given.plans[0].strategy.outer_every == 7
    assert exchange_words(given.plans[0].strategy) == "DiLoCo between islands every 7 steps"
    late = rank_plans(setting("4*h100:8x4@400GB/s"), overrides={**DILOCO, "outer_overlap": 20}, top=1)
    assert late.plans[0].strategy.outer_every == 30


def test_an_open_period_is_longer_than_what_overlaps():
    late = {"islands_sync": "diloco", "outer_overlap": 400}
    assert rank_plans(setting(), overrides=late, top=1).plans[0].strategy.outer_every == 401
    with pytest.raises(InputError, match=r"strategy\.outer_overlap is 'x'"):
        rank_plans(setting(), overrides={**late, "outer_overlap": "x"}, top=1)


def test_given_axes_and_fields_are_those_of_an_island(gradients):
    given = rank_plans(setting(), axes={"islands": 4, "tensor": 8}, overrides={"strategy.remat": "block"}, top=1)
    assert given.plans[0].strategy.mesh["tensor"] == 8
    assert given.plans[0].strategy.remat == "block"
    with pytest.raises(CannotRunError, match=r"islands=2, and 4\*h100:8x4@1Gbit/s is 4 islands\. Set islands=4\."):
        rank_plans(setting(), axes={"islands": 2})
    with pytest.raises(CannotRunError, match=r"does not divide the batch of 510 sequences\. Use a batch of 512"):
        rank_plans(setting(batch=510))
    with pytest.raises(InputError, match=r"outer_every=30 needs several islands\. Name a cluster of them, such as"):
        rank_plans(setting("h100:8x4"), overrides={"strategy.outer_every": 30})
    with pytest.raises(InputError, match=r"outer_every=30: with islands_sync=gradients"):
        rank_plans(setting(), overrides={"strategy.outer_every": 30})
    same = rank_plans(setting("h100:8x4", 128), axes={"islands": 1}, top=1)
    assert same.plans[0].strategy == gradients.plans[0].strategy.inner()


def test_a_plan_file_keeps_islands(tmp_path, diloco):
    path = tmp_path / "plan.toml"
    save_plan(diloco.plans[0], path)
    assert load_plan(path) == diloco.plans[0]
    assert "island_bytes_per_s = 125000000" in path.read_text()
    # files from before islands have none of their fields
    alone = rank_plans(setting("h100:8x4", 128), top=1).plans[0]
    save_plan(alone, path)
    names = ("islands_sync", "outer_", "num_islands", "island_bytes_per_s")
    lines = path.read_text().splitlines()[1:]  # the first seals the file
    path.write_text("\n".join(line for line in lines if not line.startswith(names)))
    assert load_plan(path) == alone
    assert "islands" not in alone.strategy.mesh


def test_why_not_another_mesh_or_period(diloco):
    longer = why_not(diloco, {"outer_every": 30})
    assert longer.strategy.outer_every == 30
    assert longer.terms[0].name == "islands"
    assert longer.slower_s == pytest.approx(longer.terms[0].more_s)
    other = why_not(diloco, {"tensor": 8})
    assert (other.strategy.mesh["tensor"], other.strategy.num_islands) == (8, 4)
    assert (other.strategy.outer_every, other.strategy.outer_bits) == (300, 4)
    assert why_not(diloco, {"islands": 8}).refusal.rule == "islands"


def test_what_if_there_were_more_chips_in_each_island(diloco):
    answer = what_if(diloco, parse_what_if("chips=2x"))
    assert answer.then.cluster.short_name == "4*h100:8x8@1Gbit/s"
    assert answer.then.strategy.num_islands == 4
    assert sum(term.added_s for term in answer.terms) == pytest.approx(answer.then.predicted.step_s)


def test_frontiers_are_of_one_island(diloco):
    result = result_of_island(diloco)
    assert result.setting.cluster.short_name == "h100:8x4"
    assert all(plan.strategy.num_islands == 1 for plan in pareto(result).memory)
    alone = rank_plans(setting("h100:8x4", 128), top=1)
    assert result_of_island(alone) is alone


def test_an_explanation_lists_what_islands_exchange(diloco):
    plan = diloco.plans[0]
    told = explain(plan)
    first = told.islands.lines[0]
    assert first.text.startswith("outer_embed[V, D_fsdp] = AllReduce_islands(outer_embed[V, D_fsdp]{U_islands})")
    assert first.overlaps == "every 300 steps, 4 bits"
    exchange = price_strategy(plan.setting, plan.strategy).exchange
    assert sum(line.time_s for line in told.islands.lines) == pytest.approx(300 * exchange.serial_s)
    assert sum(line.num_bytes for line in told.islands.lines) == pytest.approx(exchange.num_values / 2)
    assert sum(term.added_s for term in told.terms) == pytest.approx(plan.predicted.step_s)
    # of all parts, so of islands too; the sums share what the exchange adds to a step
    largest = largest_steps(Breakdown(price_strategy(plan.setting, plan.strategy)), count=1000)
    sums = [step for step in largest if step.block == "islands"]
    assert sum(step.added_s for step in sums) == pytest.approx(exchange.exposed_s)
    assert {step.runs for step in sums} == {1 / 300}
    # all else is of an island
    alone = explain(plan_of_island(plan))
    assert (told.blocks, told.once, told.batch, told.fsdp) == (alone.blocks, alone.once, alone.batch, alone.fsdp)
    assert alone.islands is None


def test_islands_of_this_machine_are_legal_one_by_one():
    cpus = Setting(load_model("llama3-8b"), parse_cluster("2*cpu:2@10Mbit/s"), Job(batch_seqs=8, seq_len=128))
    strategy = Strategy(mesh=make_mesh({"islands": 2, "fsdp": 2}), state="fp32")
    assert [refusal.rule for refusal in legal(cpus, strategy)] == []


def test_the_step_at_another_imbalance_includes_the_exchange():
    given = Setting(load_model("mixtral-8x7b"), parse_cluster("2*h100:8x1@1Gbit/s"), Job(batch_seqs=16, seq_len=2048))
    result = rank_plans(given, axes={"expert": 8}, top=1)
    (note,) = (note for note in result.notes if "at 1.25 times the mean" in note)
    uneven = msgspec.structs.replace(given, assumptions=Assumptions(imbalance=1.25))
    step_s = price_strategy(uneven, result.plans[0].strategy).estimate.step_s
    assert note.endswith(f"this plan takes {format_seconds(step_s)} a step")
    assert step_s > result.plans[0].predicted.step_s > 100
