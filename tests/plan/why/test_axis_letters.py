"""The limits of single axes: against the priced steps, where verdicts flip, and the four situations of FSDP."""

import msgspec
import pytest

from meshwright.cost.breakdown import Breakdown
from meshwright.cost.formulas.limit_table import limits_at
from meshwright.cost.formulas.limits import ring_min_positions
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.planner import rank_plans
from meshwright.plan.why.bounds import letters_of
from meshwright.plan.why.fsdp_case import fsdp_case
from meshwright.spec import catalogue
from meshwright.spec.assumptions import Assumptions
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment
from meshwright.spec.weights import num_params


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


LLAMA70B = catalogue.load_model("llama3-70b")


def case_of(cluster, batch_seqs, seq_len, *, model=LLAMA70B, **axes):
    """The case of a strategy that runs on a cluster: the mesh as given, or else the search's."""
    job = Job(batch_seqs=batch_seqs, seq_len=seq_len)
    one = rank_plans(Setting(model, parse_cluster(cluster), job), axes=axes, top=1).plans[0]
    return fsdp_case(one)


@pytest.mark.parametrize(
    ("case", "batch_seqs", "seq_len", "axes", "helps"),
    [
        (1, 1024, 8192, {"fsdp": 256}, "FSDP (or data parallelism) alone"),
        (2, 128, 65536, {"context": 8}, "not a pipeline"),
        (3, 256, 512, {"pipeline": 4}, "pipeline stages"),
        (4, 32, 512, {"tensor": 8, "pipeline": 4}, "context or tensor parallelism for the sequences, and pipeline"),
    ],
)
def test_a_plan_for_each_case(case, batch_seqs, seq_len, axes, helps):
    found = case_of("h100:8x32", batch_seqs, seq_len, **axes)
    assert found.case == case
    assert (found.chips > found.sequences) == (case in (2, 4))
    assert (found.comms_s > found.compute_s) == (case in (3, 4))
    assert helps in found.words
    assert found.follows
    assert f"case {case} of 4" in found.words


def lecture(num_gpus, tokens, seq_len):
    """Figures of the lecture: 200 TFLOP/s a GPU, 200 GB/s between nodes of 8 GPUs, 70 billion parameters."""
    model = msgspec.structs.replace(LLAMA70B, name="70b")
    h100 = parse_cluster("h100:8x1").chip
    chip = msgspec.structs.replace(
        h100, peak_flops={"bf16": 200e12}, nic_bytes_per_s=200e9 / 8, nvlink_bytes_per_s=1e14, variant="custom"
    )
    cluster = msgspec.structs.replace(parse_cluster(f"h100:8x{num_gpus // 8}"), chip=chip)
    small = rank_plans(Setting(model, parse_cluster("h100:8x32"), Job(batch_seqs=256, seq_len=2048)), top=1).plans[0]
    return msgspec.structs.replace(
        small,
        cluster=cluster,
        job=Job(batch_seqs=round(tokens / seq_len), seq_len=seq_len),
        strategy=Strategy(mesh=make_mesh({"fsdp": num_gpus})),
    )


def test_the_lecture_s_figures():
    """70e9 parameters, 4M tokens on 4000 GPUs: 2.1 s of compute and 2.1 s of communication, so about 4000 GPUs."""
    found = fsdp_case(lecture(4000, 4e6, 8000))
    scale = 70e9 / num_params(LLAMA70B)
    assert found.compute_s * scale == pytest.approx(2.1, rel=1e-6)
    # a node sends on what its 8 GPUs share: (1/8 - 1/4000) of all weights through each GPU's part of the network
    assert found.comms_s * scale == pytest.approx(2.1 * (1 - 8 / 4000), rel=1e-6)
    assert found.max_chips_by_comms == pytest.approx(4000 / (1 - 8 / 4000), rel=1e-6)
    assert found.sequences == 500
    assert found.case == 2


def test_twice_the_chips_halve_compute_and_not_communication():
    first, second = (fsdp_case(lecture(count, 4e6, 500)) for count in (4000, 8000))
    assert second.compute_s == pytest.approx(first.compute_s / 2)
    assert second.comms_s == pytest.approx(first.comms_s, rel=0.01)
    assert (first.case, second.case) == (1, 3)


def test_on_a_torus_it_is_the_book_s_limit():
    """llama3-70b at 4 Mi tokens: FSDP alone up to 3 B / alpha = 4,934 chips of a v5p. Source: section 6.3."""
    found = case_of("v5p:16x16x32", 1024, 4096)
    assert found.max_chips_by_comms == pytest.approx(3 * 2**22 / 2550, rel=1e-3)
    assert found.case == 4


def test_without_a_network_there_is_no_case():
    assert case_of("v5e:1x1", 8, 64, model=catalogue.load_model("tiny")) is None
