"""Engines that split caches beyond their heads, and weights in two dims: from where they win."""

import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.derive import derive_job
from meshwright.calculators.serving.sharding import WeightStationary
from meshwright.core.errors import CannotRunError
from meshwright.cost.network.placement import place_axes
from meshwright.cost.train_step import price_strategy
from meshwright.plan.serving.fleet import engine_strategy, engine_words, fleet_of
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.service import Service
from meshwright.plan.serving.storing import stored_dtypes
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.efficiency import fitted_calibration
from meshwright.spec.job import Job
from meshwright.spec.strategy import make_mesh

LLAMA = load_model("llama3-70b")
PLAIN = replace(LLAMA, gated=False, activation="gelu", d_ff=4 * LLAMA.d_model, num_heads=1024, num_kv_heads=1024)
"""Two products in a feed-forward block and F = 4 D, as in the book; heads enough for any ``tensor``."""


def mlp_s(cluster, layout, **mesh):
    """Seconds of the collectives of a feed-forward block of 4,096 sequences, best placed, by the data sheet."""
    job = Job(kind="decode", batch_seqs=4096, seq_len=1024)
    setting, found = replace(service_setting(PLAIN, cluster), job=job), []
    for placement in place_axes(cluster, make_mesh(mesh)):
        strategy = replace(engine_strategy(mesh, "", layout), placement=placement.describe())
        costs = price_strategy(setting, strategy).costs.all
        own = [c for c in costs if c.step.is_collective and c.step.block == "layer"]
        found.append(sum(float(c.network_s) for c in own if c.step.result.name in ("h1", "g", "u", "m", "y")))
    return min(found)


def test_weights_in_two_dims_win_where_the_closed_form_says():
    """Priced from derived steps on a v5p: with X = 4, one axis of the torus, as the closed form but for latency, which
    4,096 sequences hide; 1-D is better on 64 chips and 2-D on 128, and the closed form says 72."""
    wins = {}
    for name in ("v5p:4x4x4", "v5p:4x4x8", "v5p:4x8x8"):
        cluster = parse_cluster(name)
        count, link = cluster.num_chips, 2 * cluster.chip.ici_link_bytes_per_s
        form = WeightStationary(d_model=PLAIN.d_model, d_ff=PLAIN.d_ff, num_chips=count)
        one, two = mlp_s(cluster, "prompts", tensor=count), mlp_s(cluster, "widths", context=4, tensor=count // 4)
        assert one == pytest.approx(form.tensor_comms_s(4096, axis_bytes_per_s=link), rel=1e-3)
        assert two == pytest.approx(form.comms_s(4096, over_d=4, axis_bytes_per_s=link), rel=1e-3)
        wins[count] = min(two, mlp_s(cluster, "widths", context=2, tensor=count // 2)) < one
    assert form.min_chips == 72
    assert wins == {64: False, 128: True, 256: True}


def prefilled(model, cluster, layout="prompts", *, prompts=1, **mesh):
    """A prefill of prompts of 8,192 tokens, one of them in a microbatch of a pipeline, as priced."""
    on = parse_cluster(cluster)
    job = Job(kind="prefill", batch_seqs=prompts, seq_len=8192)
    setting = replace(service_setting(load_model(model), on, fitted_calibration(on.chip)), job=job)
    strategy = replace(engine_strategy({}, "", layout), mesh=make_mesh(mesh))
    if strategy.mesh["pipeline"] > 1:
        strategy = replace(strategy, num_microbatches=prompts)
    return price_strategy(setting, strategy)


def test_prompts_are_the_microbatches_of_pipelined_prefill():
    """(m + p - 1) ticks of m prompts on p stages; a tick is a stage's part of the step of one prompt, and a send."""
    found = [prefilled("llama3-70b", "h100:8x2", prompts=m, pipeline=2, tensor=8) for m in (1, 2, 4)]
    one, two, four = (float(priced.estimate.step_s) for priced in found)
    tick = (four - two) / 2
    assert (one, two) == (pytest.approx(2 * tick, rel=0.01), pytest.approx(3 * tick, rel=0.01))
    whole = prefilled("llama3-70b", "h100:8x1", tensor=8).estimate
    assert one == pytest.approx(float(whole.step_s), rel=0.02)
    stages, alone = found[2].estimate.memory, whole.memory
    assert stages["kv_cache"] == pytest.approx(4 * alone["kv_cache"] / 2)
    assert [str(cost.step) for cost in found[0].costs.boundary if cost.step.op == "permute"] == [
        "x[B_tensor, T, D] = Permute_pipeline(x[B_tensor, T, D])"
    ]


def test_decode_has_no_stages():
    strategy = replace(engine_strategy({}), mesh=make_mesh({"pipeline": 2}))
    job = Job(kind="decode", batch_seqs=8, seq_len=64)
    with pytest.raises(CannotRunError, match="pipeline=2 trains but does not generate"):
        derive_job(LLAMA, job, strategy)


def test_gathered_weights_prefill_where_activations_are_larger():
    """One prompt of 8,192 tokens on a node: per layer an AllGather of weights over 2 of 8 chips, and less to reduce."""
    stays, gathered = (
        float(prefilled("llama3-70b", "h100:8x1", layout, context=2, tensor=4).estimate.step_s)
        for layout in ("prompts", "gathered")
    )
    alone = float(prefilled("llama3-70b", "h100:8x1", tensor=8).estimate.step_s)
    assert stays < gathered < alone


def test_engines_beyond_the_kv_heads_are_found():
    fleet = fleet_of(LLAMA, parse_cluster("v5e:16x16"))
    words = {engine_words(fleet.strategy(number, "")) for number in range(len(fleet))}
    assert {"kvb2 tp8", "kvs8 tp8", "wd16 tp16", "fsdp4 tp2", "tp64", "cp8 tp2"} <= words
    assert not {"kvb16 tp8", "kvb2 tp4", "fsdp16"} & words, "heads end at 64, caches split heads first"


def test_caches_over_sequences_serve_more():
    """Section 7.3.3: more chips than kv heads pay on a torus only if caches are not repeated."""
    on = parse_cluster("v5e:16x16")
    setting, service = service_setting(LLAMA, on, fitted_calibration(on.chip)), Service(prompt_len=8192, output_len=512)
    found = plan_service(setting, replace(service, tpot_s=0.023), stored=stored_dtypes(("int8",), ("int8",)))
    best = found.plans[0].generate
    assert engine_words(best.strategy) == "kvb2 tp8"
    tensor = [one for one in found.plans if one.generate.strategy.mesh["context"] == 1]
    assert tensor
    assert found.plans[0].predicted.tokens_per_s_per_chip > 1.1 * tensor[0].predicted.tokens_per_s_per_chip
