"""The limits of single axes: the closed forms against the priced steps, and verdicts that flip where they say."""

import msgspec
import pytest

from meshwright.cost.breakdown import Breakdown
from meshwright.cost.formulas.limit_table import limits_at
from meshwright.cost.formulas.limits import ring_min_positions
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.planner import rank_plans
from meshwright.plan.why.bounds import letters_of
from meshwright.spec import catalogue
from meshwright.spec.assumptions import Assumptions
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment


def planned(model, cluster, batch_seqs, *, seq_len=4096, overrides=None, **axes):
    job = Job(batch_seqs=batch_seqs, seq_len=seq_len)
    return rank_plans(
        Setting(catalogue.load_model(model), parse_cluster(cluster), job), axes=axes, overrides=overrides, top=1
    ).plans[0]


def told(one):
    priced = price_strategy(one.setting, one.strategy)
    return {limit.name: limit for limit in limits_at(letters_of(priced))}, priced


ZERO_3 = {"num_microbatches": 1, "remat": "none", "assignment": standard_assignment(zero=3)}


@pytest.mark.parametrize(("seq_len", "holds"), [(1024, False), (8192, True)])
def test_weights_hide_where_they_add_little(seq_len, holds):
    """Where it holds, what is left to wait for are the tables of embedding and head, an eighth of all weights."""
    one = planned("llama3-8b", "h100:8x8", 64, seq_len=seq_len, overrides=ZERO_3, fsdp=64)
    limits, priced = told(one)
    weights = limits["tokens/chip, weights hide"]
    assert weights.here == seq_len
    assert weights.holds is holds
    terms = {term.name: term for term in Breakdown(priced).terms}
    assert (terms["fsdp"].added_s < terms["fsdp"].alone_s / 8) is holds


def test_the_limit_of_weights_hardly_moves_with_the_batch():
    """It is where the two are equal, so it is nearly the same seen from either side."""
    bounds = []
    for batch_seqs in (64, 128):
        one = planned("llama3-8b", "h100:8x8", batch_seqs, overrides=ZERO_3, fsdp=64)
        bounds.append(told(one)[0]["tokens/chip, weights hide"].limit)
    assert bounds[0] == pytest.approx(bounds[1], rel=0.02)


def test_zero_1_has_gradients_to_hide_and_no_weights():
    fields = {"num_microbatches": 1, "assignment": standard_assignment(zero=1)}
    one = planned("llama3-8b", "h100:8x8", 256, overrides=fields, fsdp=64)
    limits, _ = told(one)
    assert "tokens/chip, weights hide" not in limits
    assert limits["tokens/chip, gradients hide"].here == 256 * 4096 / 64


@pytest.mark.parametrize(("count", "holds"), [(16, False), (32, True)])
def test_the_bubble_is_below_a_tenth_from_nine_times_the_other_stages(count, holds):
    """1F1B on 4 stages: (K - 1) / (M + K - 1) < 1/10 from M > 27."""
    fields = {"schedule": "1f1b", "num_microbatches": count}
    one = planned("llama3-8b", "h100:8x4", 256, overrides=fields, pipeline=4, data=8)
    limit = told(one)[0]["microbatches, bubble < 10%"]
    assert limit.limit == pytest.approx(27)
    assert limit.holds is holds
    assert f"{3 / (count + 3):.1%}" in limit.note


def test_ring_attention_against_the_priced_hop():
    """A hop's permutes of keys and values against a hop's part of attention, at the limit and as priced."""
    one = planned("llama3-8b", "h100:8x1", 8, seq_len=65536, overrides={"context_attention": "ring"}, context=8)
    limits, priced = told(one)
    limit = limits["positions/device, ring hides"]
    layer = [cost for cost in priced.costs.all if cost.step.block == "layer" and cost.step.phase == "forward"]
    moves = sum(cost.network_s - cost.latency_s for cost in layer if cost.step.op == "permute")
    attention = next(cost for cost in layer if cost.step.op == "attention")
    # 7 of the 8 blocks of keys arrive by a hop
    assert attention.math_s * 7 / 8 / moves == pytest.approx(limit.here / limit.limit, rel=1e-6)
    assert limit.here == 65536 / 8


def test_ring_form():
    assert ring_min_positions(1e15, 1e11, num_heads=32, num_kv_heads=8, causal=False) == pytest.approx(2500)
    assert ring_min_positions(1e15, 1e11, num_heads=32, num_kv_heads=8, causal=True) == pytest.approx(5000)


def test_experts_on_a_ring_against_the_priced_exchange():
    """On one closed ring of 16 chips: Z < 6 F / alpha says the same as the priced AllToAlls and products."""
    model = msgspec.structs.replace(catalogue.load_model("mixtral-8x7b"), num_experts=16)
    one = msgspec.structs.replace(
        planned("tiny", "v5e:1x1", 8, seq_len=64),
        model=model,
        cluster=parse_cluster("v5e:16x1"),
        job=Job(batch_seqs=64, seq_len=4096),
        strategy=Strategy(mesh=make_mesh({"expert": 16})),
        # only slots that are filled are sent, as the rule has it
        assumptions=Assumptions(empty_slots=False),
    )
    limits, priced = told(one)
    limit = limits["expert width, AllToAll shorter"]
    chip = one.cluster.chip
    alpha = chip.peak_flops["bf16"] / chip.ici_axis_bytes_per_s
    # forward, 2 x 3 t k D F FLOPs against two AllToAlls of 2 t k D Z bytes gathered, each at 1 / (4 W)
    most = 2 * 3 * one.model.d_ff_expert / alpha
    sent = [c for c in priced.costs.all if c.step.op == "all_to_all" and c.step.phase == "forward"]
    sent = [cost for cost in sent if "D" in cost.step.full.dims]  # weights of slots are sent in no time beside rows
    assert len(sent) == 2
    assert all(cost.latency_s < 1e-9 * cost.network_s for cost in sent)
    # the weights of slots are sent too: 4 bytes beside 2 x 8,192, and the start of one more AllToAll
    assert limit.here / limit.limit == pytest.approx(most / 16, rel=1e-3)
    assert limit.here / limit.limit < most / 16 / (1 + 4 / 16_384)


def test_tokens_that_meet_a_copy_of_the_experts():
    """E/k x C/W_hbm for 16-bit weights: Mixtral's 8/2 x 295 on an H100. Source: exercise 4.8."""
    limits, _ = told(planned("mixtral-8x7b", "h100:8x8", 256, overrides={"num_microbatches": 1}, fsdp=64))
    limit = limits["tokens/copy of the experts"]
    assert limit.limit == pytest.approx(4 * 989.4e12 / 3.35e12, rel=1e-3)
    assert limit.here == 256 * 4096 / 64


def test_one_chip_has_none():
    limits, _ = told(planned("tiny", "v5e:1x1", 8, seq_len=64))
    assert {limit.kind for limit in limits.values()} == {"size"}
