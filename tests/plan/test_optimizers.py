"""Plans with every optimizer, whatever kinds of layers a model has."""

import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.rewrites.pipeline import no_stages
from meshwright.algebra.transformer import transformer
from meshwright.cost.setting import Setting
from meshwright.plan.legal import splits
from meshwright.plan.planner import rank_plans
from meshwright.spec.catalogue import load_model, models
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import OPTIMIZERS, Job
from meshwright.spec.strategy import Strategy, make_mesh
from tests.tier import sampled


@pytest.mark.parametrize("name", models())
def test_the_optimizer_asks_nothing_of_the_number_of_layers(name):
    """Whole matrices are dealt out to any number of devices, so a mesh is legal for all optimizers or for none."""
    one = load_model(name)
    axes = {
        "pipeline": 1 if one.encoder or no_stages(transformer(one)) else 2,
        "data": 2,
        "fsdp": 2,
        "tensor": 2,
        "expert": 2 if one.num_experts else 1,
    }
    found = [
        set(splits(derive(transformer(one), Strategy(mesh=make_mesh(axes)), optimizer=optimizer)))
        for optimizer in OPTIMIZERS
    ]
    assert all(each == found[0] for each in found)
    assert {dim for dim, _ in found[0]} <= {*one.dims, "B", "T"}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    sampled([("gpt-oss-20b", "adafactor"), ("deepseek-v2-lite", "muon")], ("deepseek-v2-lite", "muon")),
)
def test_models_of_several_kinds_of_layers_are_planned(name, optimizer):
    job = Job(batch_seqs=64, seq_len=2048, optimizer=optimizer)
    best = rank_plans(Setting(load_model(name), parse_cluster("h100:8x8"), job), top=1).plans[0]
    assert best.strategy.num_chips == 64


def test_more_devices_than_layers():
    """36 layers over 64 devices of fsdp: what fills them up is priced."""
    step_s = {}
    for optimizer in ("adamw", "muon"):
        setting = Setting(
            load_model("qwen3-8b"), parse_cluster("h100:8x8"), Job(batch_seqs=64, seq_len=4096, optimizer=optimizer)
        )
        step_s[optimizer] = rank_plans(setting, axes={"fsdp": 64}, top=1).plans[0].predicted.step_s
    assert step_s["adamw"] < step_s["muon"]
