"""The lecture's recipe: which step applies where, and that what it chooses runs."""

import pytest

from meshwright.cost.setting import Setting
from meshwright.plan.legal import legal
from meshwright.plan.planner import rank_plans
from meshwright.plan.why.recipe import recipe
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh

TEMPLATE = Strategy(mesh=make_mesh({}))


def made(model, cluster, batch_seqs, seq_len):
    job = Job(batch_seqs=batch_seqs, seq_len=seq_len)
    found = recipe(Setting(catalogue.load_model(model), parse_cluster(cluster), job), template=TEMPLATE)
    return found, {step.name: step.applies for step in found.steps}


def mesh_of(found):
    return {axis: size for axis, size in found.strategy.mesh.items() if size > 1}


@pytest.mark.parametrize(
    ("model", "cluster", "batch_seqs", "seq_len", "mesh"),
    [
        ("gpt2", "h100:8x4", 512, 1024, {"data": 32}),
        ("gpt2", "h100:8x32", 512, 1024, {"data": 32, "fsdp": 8}),
        ("llama3-8b", "h100:8x4", 256, 4096, {"fsdp": 32}),
        ("llama3-8b", "h100:8x64", 1024, 4096, {"data": 64, "fsdp": 8}),
        ("llama3-70b", "h100:8x256", 2048, 8192, {"data": 32, "fsdp": 8, "tensor": 8}),
        ("llama3-8b", "h100:8x16", 16, 131072, {"fsdp": 8, "context": 16}),
        ("llama3-8b", "h100:8x4", 8, 4096, {"fsdp": 8, "context": 4}),
        # slots of experts that nobody fills count where sequences are split
        ("mixtral-8x22b", "h100:8x128", 1024, 16384, {"data": 8, "fsdp": 8, "context": 2, "tensor": 8}),
    ],
)
def test_its_meshes(model, cluster, batch_seqs, seq_len, mesh):
    found, _ = made(model, cluster, batch_seqs, seq_len)
    assert mesh_of(found) == mesh
    assert found.refusal is None
    job = Job(batch_seqs=batch_seqs, seq_len=seq_len)
    assert legal(Setting(catalogue.load_model(model), parse_cluster(cluster), job), found.strategy) == ()
    assert found.estimate.step_s > 0
    assert found.strategy.zero == 3


def test_the_steps_that_apply():
    _, steps = made("gpt2", "h100:8x4", 512, 1024)
    assert [name for name, applies in steps.items() if applies] == ["data parallelism", "batch of a chip"]
    _, steps = made("llama3-70b", "h100:8x256", 2048, 8192)
    assert steps["hybrid sharding"]
    assert steps["tensor parallelism"]
    assert not steps["context parallelism"]
    assert not steps["data parallelism"]


def test_checkpointing_comes_with_activations_that_do_not_fit():
    small, without = made("llama3-8b", "h100:8x4", 256, 4096)
    large, steps = made("llama3-8b", "v5e:4x4", 16, 8192)
    assert (small.strategy.remat, without["checkpointing"]) == ("none", False)
    assert (large.strategy.remat, steps["checkpointing"]) == ("block", True)


def test_stages_come_last_and_as_few_as_fit():
    found, steps = made("llama3-405b", "16*v5e:16x16", 2048, 4096)
    stages = found.strategy.mesh["pipeline"]
    assert stages > 1
    assert steps["pipeline"]
    assert found.strategy.num_microbatches >= stages
    assert found.refusal is None


def test_the_batch_of_a_chip_is_the_largest_that_fits():
    found, _ = made("llama3-8b", "h100:8x4", 256, 4096)
    count = found.strategy.num_microbatches
    assert count > 1
    fewer = Strategy(mesh=found.strategy.mesh, remat="none", num_microbatches=count // 2, context_attention="ring")
    job = Job(batch_seqs=256, seq_len=4096)
    refused = legal(Setting(catalogue.load_model("llama3-8b"), parse_cluster("h100:8x4"), job), fewer)
    assert [refusal.rule for refusal in refused] == ["memory"]


def test_the_search_is_never_worse():
    job = Job(batch_seqs=2048, seq_len=8192)
    best = rank_plans(Setting(catalogue.load_model("llama3-70b"), parse_cluster("h100:8x256"), job), top=1).plans[0]
    found, _ = made("llama3-70b", "h100:8x256", 2048, 8192)
    assert best.predicted.step_s < found.estimate.step_s


def test_what_it_cannot_place_is_refused_with_the_rule():
    found, _ = made("llama3-405b", "h100:8x1", 8, 4096)
    assert found.refusal.rule == "memory"
    assert found.estimate.hbm_bytes_per_chip > 80e9
