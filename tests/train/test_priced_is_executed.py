"""The steps that a plan prices are the steps that the trainer runs, and a compiled update holds their collectives."""

import itertools

import jax
import msgspec
import pytest

from meshwright.algebra.rewrites.pipeline import no_stages
from meshwright.algebra.transformer import layer_dims, transformer
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import price_strategy
from meshwright.hlo.collectives import collectives
from meshwright.nn.interpreter import run_update
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import OPTIMIZERS, Job
from meshwright.spec.strategy import Strategy, make_mesh, standard_assignment
from meshwright.train.optimizers import derived
from meshwright.train.settings import TrainSettings, program_options
from meshwright.train.step import make_step
from tests.nn import families
from tests.parallel.small import BATCH_SEQS, MODEL, SEQ_LEN
from tests.tier import sampled
from tests.traffic import compiled_traffic, derived_traffic

FAMILIES = families.FAMILIES | {
    "deepseek_v2": msgspec.structs.replace(families.FAMILIES["deepseek_v2"], q_lora_rank=16)
}
"""Ranks that eight devices divide."""

STRATEGIES = {
    "fsdp, tensor": {"mesh": {"fsdp": 4, "tensor": 2}},
    "full remat, whole vocabulary": {"mesh": {"data": 2, "fsdp": 4}, "remat": "full"},
    "ZeRO-1": {"mesh": {"data": 2, "fsdp": 4}, "assignment": standard_assignment(zero=1)},
    "ring": {"mesh": {"context": 2, "fsdp": 4}, "context_attention": "ring"},
    "collective matmul": {"mesh": {"fsdp": 4, "tensor": 2}, "collective_matmul": "two-way"},
    "prefetch": {"mesh": {"fsdp": 8}, "prefetch": True},
    "pipeline": {"mesh": {"pipeline": 3, "fsdp": 2}, "num_microbatches": 3, "schedule": "zb-h1", "remat": "full"},
}


def strategy_of(choices):
    return Strategy(**{**choices, "mesh": make_mesh(choices["mesh"]), "state": "fp32"})


def executed(model, strategy, optimizer):
    settings = TrainSettings(optimizer=optimizer, balance_loss=0.0)
    options = program_options(settings, strategy, several_documents=False)
    return make_step(model, strategy, settings, options=options)


def cases():
    """Every family, strategy and optimizer that run together; the default tier has one optimizer of each pair."""
    families = [name for name in FAMILIES if name != "deepseek_v3"]
    for place, (family, strategy, optimizer) in enumerate(itertools.product(families, STRATEGIES, OPTIMIZERS)):
        pair, number = divmod(place, len(OPTIMIZERS))
        sampled = number == pair % len(OPTIMIZERS)
        num_stages, model = STRATEGIES[strategy]["mesh"].get("pipeline", 1), FAMILIES[family]
        if model.num_layers < num_stages or (num_stages > 1 and no_stages(transformer(model))):
            continue
        yield pytest.param(family, strategy, optimizer, marks=() if sampled else pytest.mark.slow)


@pytest.mark.parametrize(("family", "strategy", "optimizer"), list(cases()))
def test_priced_steps_are_executed_steps(family, strategy, optimizer):
    model, chosen = FAMILIES[family], strategy_of(STRATEGIES[strategy])
    job = Job(batch_seqs=24, seq_len=32, optimizer=optimizer)
    priced = price_strategy(Setting(model, parse_cluster(f"h100:{chosen.num_chips}x1"), job), chosen)
    step = executed(model, chosen, optimizer)
    context = step.pipeline.context if step.pipeline else step._passes.context
    assert context.derived is step.declared
    assert [cost.step for cost in (*priced.costs.all, *priced.costs.boundary)] == [
        *(one for one, _ in step.declared.steps(chosen.num_microbatches)),
        *step.declared.ends,
        *step.declared.boundary,
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_runs_the_derived_steps(optimizer, monkeypatch):
    step, ran = executed(MODEL, strategy_of(STRATEGIES["ZeRO-1"]), optimizer), []
    monkeypatch.setattr(derived, "run_update", lambda *given: ran.extend(given[1]) or run_update(*given))
    arrays = step.param_shapes, step.state_shapes.opt_state, step.param_shapes
    jax.eval_shape(lambda *arrays: step.optimizer.update(*arrays, step.update_layout), *arrays)
    own = [s for s in step.declared.update if s.result.name.split(".")[0] in step.shards]
    assert sorted(map(str, ran)) == sorted(str(s) for s in own if not (s.only_moves and s.result.name in step.shards))


MESHES = ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8})


@pytest.mark.parametrize(
    ("optimizer", "axes"),
    [
        # only muon shares its matrices out; the updates of the others are local to their shards
        *sampled(itertools.product(OPTIMIZERS, MESHES), ("muon", MESHES[0]), ("muon", MESHES[1]), ("adamw", MESHES[0])),
    ],
    ids=str,
)
def test_compiled_collectives_of_an_update_are_the_derived_ones(optimizer, axes):
    """Three layers do not divide by the devices that share a matrix: Muon fills them up."""
    model, mesh = msgspec.structs.replace(MODEL, num_layers=3), make_mesh(axes)
    step = executed(model, Strategy(mesh=mesh, state="fp32", remat="block"), optimizer)
    compiled = step.lower(BATCH_SEQS, SEQ_LEN).compile()
    dims = {**model.dims, **layer_dims(model), "B": BATCH_SEQS, "T": SEQ_LEN}
    found = compiled_traffic(collectives(compiled.as_text(), mesh), mesh)
    assert found == derived_traffic(step.declared, dims, mesh, num_microbatches=1, width=4)
    assert (optimizer == "muon") == any(kind == "all_to_all" for kind, _ in found)
