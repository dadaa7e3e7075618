"""A setting is made once: what follows from it is made once too."""

import msgspec
import pytest

from meshwright.algebra.transformer import transformer
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.plan.planner import rank_plans
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy
from meshwright.spec.weights import weight_table
from tests.nn.families import CONFIGS


def test_the_weight_table_and_the_program_are_made_once_per_model():
    weight_table.cache_clear()
    transformer.cache_clear()
    setting = Setting(load_model("llama3-8b"), parse_cluster("h100:8x4"), Job(batch_seqs=256, seq_len=4096))
    result = rank_plans(setting)
    for one in result.plans:
        price_strategy(one.setting, one.strategy)
    assert weight_table.cache_info().misses == 1
    assert transformer.cache_info().misses == 1
    assert weight_table.cache_info().hits > 1


def test_what_is_kept_is_of_its_own_setting():
    one = Setting(load_model("tiny"), parse_cluster("v5e:4x4"), Job(batch_seqs=8, seq_len=64))
    assert one.memory_limit == 15.75 * 2**30
    other = msgspec.structs.replace(one, cluster=parse_cluster("h100:8"))
    assert other.memory_limit == 80e9
    assert other.rates.chip == "h100"
    assert other.program is one.program


@pytest.mark.parametrize("kind", ["train", "decode"])
@pytest.mark.parametrize("cluster", ["v5e:2x4", "h100:8x1"])
def test_every_family_has_a_price(cluster, kind):
    """Weights of every form, to numbers without a dim, are counted in the memory of chips of each kind."""
    mesh = {"fsdp": 2, "data": 2, "tensor": 2} if kind == "train" else {"data": 4, "tensor": 2}
    for name, config in CONFIGS.items():
        job = Job(kind=kind, batch_seqs=8, seq_len=32)
        priced = price_strategy(
            Setting(model_from_config(config, name), parse_cluster(cluster), job), Strategy(mesh=mesh)
        )
        assert priced.estimate.step_s > 0
