"""The limits beside a plan: the right ones for each kind of cluster, with the right numbers and verdicts."""

import math

import pytest

from meshwright.cost.formulas.limit_table import limits_at
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.planner import rank_plans
from meshwright.plan.run_budget import run_budget
from meshwright.plan.why.bounds import batch_of, letters_of
from meshwright.spec import catalogue
from meshwright.spec.calibration import Calibration, CollectiveRate
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh

LLAMA70B, TINY = catalogue.load_model("llama3-70b"), catalogue.load_model("tiny")
CPU = Calibration(
    name="test",
    chip="cpu",
    matmul_flops_per_s={"fp32": 1e10},
    memory_bytes_per_s=1e10,
    memory_bytes=1e9,
    collectives=tuple(
        CollectiveRate(kind=kind, group_size=8, latency_s=1e-4, bytes_per_s=1e9)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
    ),
)


def planned(cluster, batch_seqs, *, model=LLAMA70B, seq_len=4096, tokens=None, calibration=None, **axes):
    job = Job(batch_seqs=batch_seqs, seq_len=seq_len, train_tokens=tokens)
    return rank_plans(Setting(model, parse_cluster(cluster), job, calibration), axes=axes, top=1).plans[0]


def priced(one):
    return price_strategy(Setting(one.model, one.cluster, one.job, one.calibration), one.strategy)


def told(one):
    step = priced(one)
    at = letters_of(step, run_budget(one, step_s=step.estimate.step_s))
    return {limit.name: limit for limit in limits_at(at)}, at


def test_a_plan_on_lines():
    """v5e:4x4 wraps nowhere: alpha = 197e12 / 45e9, and 2 of 4 chips on an axis are as good as none of the other."""
    one = planned("v5e:4x4", 64, model=catalogue.load_model("llama3-8b"), fsdp=8, tensor=2)
    limits, at = told(one)
    assert (at.num_axes, at.fsdp_axes, at.tensor_axes, at.width) == (2, 1, 1, "one way, no axis wraps around")
    assert at.alpha == pytest.approx(at.peak_flops / 45e9)
    assert limits["tokens/chip, FSDP alone"].limit == pytest.approx(at.alpha / 2)


def test_a_plan_on_a_line_and_a_ring():
    """v5e:8x16: tensor has the line of 8, half a ring, and leaves the ring of 16."""
    llama, cluster, job = (
        catalogue.load_model("llama3-8b"),
        parse_cluster("v5e:8x16"),
        Job(batch_seqs=128, seq_len=4096),
    )
    mesh = make_mesh({"fsdp": 16, "tensor": 8})
    placed = dict.fromkeys(mesh, "1 chip") | {"fsdp": "y (16)", "tensor": "x (8)"}
    at = letters_of(price_strategy(Setting(llama, cluster, job), Strategy(mesh=mesh, placement=placed)))
    assert (at.num_axes, at.tensor_axes, at.fsdp_axes) == (1.5, 0.5, 1)


def test_a_pod_at_the_batch_of_the_book():
    """llama3-70b, 4 Mi tokens, 8192 v5p as 2048 x 4. Source: How to Scale Your Model, section 6.3, for 8960 chips."""
    limits, at = told(planned("v5p:16x16x32", 1024, fsdp=1024, context=2, tensor=4))
    assert (at.alpha, at.num_axes, at.fsdp_axes, at.tensor_axes) == (2550, 3, 2, 1)
    assert (at.batch_tokens, at.num_chips, at.data_ways) == (2**22, 8192, 2048)
    assert limits["chips, FSDP alone"].limit == pytest.approx(3 * 2**22 / 2550)
    assert limits["chips, FSDP alone"].holds is False
    assert limits["tokens/chip, with tensor"].limit == pytest.approx(4 * 2550**2 / (2 * 28672))
    assert limits["tokens/chip, with tensor"].holds is True
    assert limits["X_opt"].limit == pytest.approx(math.sqrt(2**22 / 28672 * 2 * 8192))
    assert limits["X_opt"].holds is None
    assert limits["tensor"].limit == pytest.approx(28672 / 2550)
    lower, upper = limits["X, lower root"], limits["X, upper root"]
    assert lower.limit < 2048 < upper.limit
    assert lower.holds is upper.holds is True
    # at the roots communication takes as long as compute; between them less
    for x in (lower.limit, upper.limit):
        fsdp, tensor = 4 / 2 * 28672 / (8192 / x), 4 * 2**22 / x
        assert fsdp + tensor == pytest.approx(4 * 2**22 * 28672 / 8192 / 2550)


def test_a_small_batch_has_no_roots():
    limits, _ = told(planned("v5p:16x16x32", 256, context=8, tensor=4))
    assert limits["discriminant"].holds is False
    assert limits["T_math/T_comms at X_opt"].holds is False
    assert "X, lower root" not in limits


def test_slices_count_by_themselves():
    limits, at = told(planned("4*v5e:16x16", 1024, pipeline=1))
    assert (at.num_chips, at.batch_tokens * at.num_microbatches) == (256, 2**20)
    assert at.num_microbatches > 1  # weights are gathered for each: B is one of them
    assert limits["tokens/slice, over DCN"].limit == pytest.approx(197e12 * 8 / 25e9)
    assert limits["tokens/slice, over DCN"].holds is True
    assert limits["chips, a sequence each"].here == 1024


@pytest.mark.parametrize(("cluster", "rate"), [("h100:8x4", 50e9 * 8), ("h100:8", 450e9)])
def test_switches(cluster, rate):
    limits, at = told(planned(cluster, 256, model=TINY, seq_len=512, pipeline=1))
    assert at.alpha is None
    assert limits["tokens/chip, FSDP alone"].limit == pytest.approx(at.peak_flops / rate)
    flat = 450e9 if cluster == "h100:8" else 50e9
    assert limits["FSDP at one chip's rate"].here == pytest.approx(6 * 7999744 / flat)
    assert limits["FSDP at one chip's rate"].limit == pytest.approx(
        6 * 7999744 * 256 * 512 / at.num_microbatches / at.num_chips / at.peak_flops
    )
    # the model cancels: both rows say the same
    assert limits["FSDP at one chip's rate"].holds == limits["chips, at one chip's rate"].holds
    assert "discriminant" not in limits


def test_this_machine_has_limits_of_size_only():
    limits, at = told(planned("cpu:8", 32, model=TINY, seq_len=128, tokens=10**6, calibration=CPU))
    assert {limit.kind for limit in limits.values()} == {"size"}
    assert at.alpha is None
    assert limits["memory of a chip"].limit == 1e9
    assert "at this utilisation" in limits["chips, by memory"].note


def test_sequences_and_memory():
    one = planned("v5e:4x4", 128, model=catalogue.load_model("llama3-8b"), tokens=10**9)
    limits, _ = told(one)
    mesh, count = one.strategy.mesh, one.strategy.num_microbatches
    replicas = mesh["data"] * mesh["fsdp"]
    assert limits["chips, a sequence each"].limit == 128 * mesh["context"] * mesh["tensor"] * mesh["pipeline"]
    assert limits["microbatches"].limit == 128 / replicas
    assert limits["microbatches"].here == count
    assert limits["memory of a chip"].holds is True
    # one copy of 10 bytes a parameter, and what all chips keep of the activations
    kept = 10 * 8030261248 + 16 * one.predicted.memory["activations"]
    assert limits["chips, by memory"].limit == math.ceil(kept / (15.75 * 2**30))
    batch = batch_of(priced(one))
    assert batch.sequences_per_microbatch * batch.data_parallel * batch.num_microbatches == batch.sequences == 128
    assert batch.positions_per_device == 4096 / mesh["context"]


def test_stages_count_by_themselves():
    """Of 64 chips in 4 stages 16 share a microbatch, and the layers of one stage: both closed forms are of those."""
    one = planned("h100:8x8", 256, model=catalogue.load_model("llama3-8b"), pipeline=4, fsdp=16)
    limits, at = told(one)
    assert (at.num_chips, at.num_stages, at.data_ways) == (16, 4, 16)
    assert at.batch_tokens * at.num_microbatches == 256 * 4096
    flat = limits["FSDP at one chip's rate"]
    assert flat.here == pytest.approx(6 * 8030261248 / 4 / 50e9)
    assert flat.limit == pytest.approx(6 * 8030261248 / 4 * at.batch_tokens / 16 / at.peak_flops)
    assert flat.holds == limits["chips, at one chip's rate"].holds
    assert batch_of(priced(one)).data_parallel == 16


def test_slices_that_are_stages_share_no_batch():
    limits, at = told(planned("4*v5e:16x16", 1024, pipeline=4))
    assert (at.num_chips, at.num_slices) == (256, 1)
    assert "tokens/slice, over DCN" not in limits


def test_experts_share_out_sequences_too():
    one = planned("h100:8x8", 64, model=catalogue.load_model("mixtral-8x7b"), expert=8)
    mesh = one.strategy.mesh
    assert batch_of(priced(one)).data_parallel == mesh["data"] * mesh["fsdp"] * 8


def test_one_chip():
    limits, _ = told(planned("v5e:1x1", 8, model=TINY, seq_len=64))
    assert {limit.kind for limit in limits.values()} == {"size"}
    assert limits["chips, by memory"].note == ""
