"""Prices have the shape of the derivation: every derived step with its cost, block by block and pass by pass."""

import pytest

from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh


@pytest.mark.parametrize("axes", [{"fsdp": 4, "tensor": 4}, {"pipeline": 4, "fsdp": 4}])
def test_prices_have_the_shape_of_the_derivation(axes):
    strategy = Strategy(mesh=make_mesh(axes), num_microbatches=8)
    job = Job(batch_seqs=64, seq_len=4096)
    priced = price_strategy(Setting(load_model("deepseek-v3"), parse_cluster("h100:8x2"), job), strategy)
    derived, costs = priced.derived, priced.costs
    for steps, block in zip(derived.blocks, costs.blocks, strict=True):
        assert block.steps == steps
        assert tuple(cost.step for cost in block.forward) == steps.forward
        assert tuple(cost.step for cost in block.backward) == steps.backward
    assert tuple(cost.step for cost in costs.update) == derived.update
    assert tuple(cost.step for cost in costs.boundary) == derived.boundary
    assert tuple(cost.step for cost in costs.ends) == derived.ends
    assert bool(costs.ends) == ("pipeline" in axes)
    steps = [step for step, _ in derived.steps()]
    assert [cost.step for cost in costs.all] == [*steps, *derived.ends]
    assert [block.name for block in costs.layers] == [b.block.name for b in derived.blocks if b.block.carry]
