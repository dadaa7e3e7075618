"""What services choose, by hand: layouts that split caches or weights further, chunks of prompts, drafts."""

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.derive import derive_job
from meshwright.calculators.serving.sharding import WeightStationary
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.network.placement import place_axes
from meshwright.cost.train_step import price_strategy
from meshwright.plan.plan_file import save_plan
from meshwright.plan.serving.engines import phase_setting, price_fleet
from meshwright.plan.serving.fleet import engine_strategy, engine_words, fleet_of
from meshwright.plan.serving.planner import plan_service, service_setting
from meshwright.plan.serving.service import Service, Speculation
from meshwright.plan.serving.storing import StoredDtypes, stored_dtypes
from meshwright.plan.why.explain_service import explain_service
from meshwright.plan.why.why_not_service import why_not_service
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


INT8 = StoredDtypes("int8", "int8")
LONG = Service(prompt_len=4096, output_len=256, tpot_s=10.0)


def planned(axes=None, *, model="llama3-8b", on="h100:4x1", **service):
    cluster = parse_cluster(on)
    setting = service_setting(load_model(model), cluster, fitted_calibration(cluster.chip))
    asked = msgspec.structs.replace(LONG, **service)
    return plan_service(setting, asked, stored=(INT8,), axes=axes or {"tensor": 4, "context": 1})


def seconds(found, length, known=0):
    """Returns the seconds of a prompt of so many tokens, some of which are known, on each device that has its own."""
    strategy = found.plans[0].generate.strategy
    setting = phase_setting(found.setting, "prefill", INT8, length - known, strategy.mesh["expert"], known=known)
    return float(price_strategy(setting, strategy).estimate.step_s)


def test_chunks_of_512():
    """A prompt of 4,096 is eight chunks; 256 steps of output have room for 32 prompts: at most 33 sequences."""
    found = planned(chunk_len=512)
    first, whole, end = seconds(found, 512), seconds(found, 4096), seconds(found, 4096, 3584)
    plan = found.plans[0]
    assert not plan.has_pools
    assert plan.chunk_len == 512
    assert plan.generate.batch_seqs == 32
    last = max(first, end)
    chunks = max(8 * (first + last) / 2, whole)
    assert plan.predicted.itl_s == pytest.approx(plan.generate.step_s + last)
    assert plan.predicted.ttft_s == pytest.approx(8 * plan.generate.step_s + chunks)
    # a sequence waits for all chunks of the 31 others
    assert plan.predicted.tpot_s == pytest.approx(plan.generate.step_s + 31 / 256 * chunks)


def test_chunks_on_devices_of_experts():
    """Two prompts at once, one on each half of the experts."""
    axes = {"tensor": 2, "expert": 2, "context": 1}
    found = planned(axes, model="qwen3-30b-a3b", chunk_len=512)
    first, end = seconds(found, 512), seconds(found, 4096, 3584)
    plan = found.plans[0]
    assert plan.chunk_len == 512
    assert (plan.generate.batch_seqs / 2 - 0.5) * 8 <= 256
    assert plan.predicted.itl_s == pytest.approx(plan.generate.step_s + max(first, end))


def test_whole_prompts_stop_all_others():
    found = planned(itl_s=100.0)
    whole = [plan for plan in found.plans if not plan.chunk_len]
    assert whole
    for plan in whole:
        at_a_time = max(1, (plan.generate.batch_seqs - 1) / 256 / plan.prefill.batch_seqs)
        assert plan.predicted.itl_s == pytest.approx(plan.generate.step_s + at_a_time * plan.prefill.step_s)
        assert plan.predicted.ttft_s == plan.prefill.step_s


def test_the_target_of_the_longest_time_chooses_chunks():
    """The mean time per token is never above the longest time between two tokens that the same plan promises."""
    made, chunks = [], []
    for itl_s in (1.0, 0.15, 0.08, 0.06):
        found = planned(itl_s=itl_s)
        assert all(
            plan.predicted.tpot_s <= plan.predicted.itl_s * (1 + 1e-9) <= itl_s * (1 + 1e-9) for plan in found.plans
        )
        made.append(found.plans[0].predicted.tokens_per_s_per_chip)
        chunks.append(found.plans[0].chunk_len or np.inf)
    assert made == sorted(made, reverse=True)
    assert made[-1] < made[0]
    assert chunks[-1] < chunks[0]
    with pytest.raises(CannotRunError, match=r"none meets TPOT 10 s .* and ITL 1 ms \(the shortest is"):
        planned(itl_s=1e-3)


def test_pools_wait_for_no_prompt():
    found = planned({"tensor": 2, "context": 1}, itl_s=1.0)
    pools = [plan for plan in found.plans if plan.has_pools]
    assert pools
    assert all(plan.predicted.itl_s == plan.generate.step_s and plan.chunk_len == 0 for plan in pools)


def test_chunks_longer_than_a_prompt_cut_nothing():
    same = planned(chunk_len=8192).plans[0]
    assert same.chunk_len == 0
    assert msgspec.structs.replace(same.predicted, itl_s=None) == planned().plans[0].predicted


def test_refusals():
    with pytest.raises(InputError, match="chunk_len=0 must be above 0"):
        msgspec.structs.replace(LONG, chunk_len=0)
    with pytest.raises(CannotRunError, match="cannot be written to a file yet"):
        save_plan(planned(chunk_len=512).plans[0], "service.toml")


def chat(**speculation):
    given = Speculation(**speculation) if speculation else None
    return Service(prompt_len=2048, output_len=512, speculation=given)


def decode(model="llama3-8b", cluster="v5e:2x2", axes=None, **speculation):
    setting = service_setting(load_model(model), parse_cluster(cluster))
    fleet = fleet_of(setting.model, setting.cluster, axes or {"tensor": 4})
    return price_fleet(setting, chat(**speculation), fleet, (INT8,)).decode


def row(steps, batch):
    return int(np.flatnonzero(steps.batch == batch)[0])


def test_a_step_that_checks_four_drafts():
    """Five positions a sequence: five times the FLOPs, the caches read once; 1 + .8 + .64 + .512 + .4096 tokens."""
    plain, drafted = decode(), decode(acceptance=0.8, num_drafts=4)
    one, other = row(plain, 16), row(drafted, 16)
    assert drafted.tokens[other] == pytest.approx(3.3616)
    assert (plain.tokens[one], plain.drafts[one], drafted.drafts[other]) == (1, 0, 4)
    alone, checks = plain.bounds_s, drafted.bounds_s
    assert checks["drafts"][other] == pytest.approx(4 * 0.05 * plain.step_s[one])
    assert checks["FLOPs"][other] == pytest.approx(5 * alone["FLOPs"][one], rel=1e-3)
    # beside weights and caches there are 64 more rows: inputs of q, k, v, gate and up, and what they make
    assert alone["KV"][one] < checks["KV"][other] < 1.02 * alone["KV"][one]
    layer = 5 * 4096 + (4096 + 2 * 1024) / 4 + (4096 / 4 + 4096) + 2 * 14336 / 4 + (14336 / 4 + 4096)
    head = 4096 + 128_256 / 4
    more = 64 * 2 * (32 * layer + head) / parse_cluster("v5e:2x2").chip.hbm_bytes_per_s
    assert checks["parameters"][other] - alone["parameters"][one] == pytest.approx(more, rel=0.03)
    assert drafted.step_s[other] > plain.step_s[one] + checks["drafts"][other]
    assert drafted.token_s[other] == pytest.approx(drafted.step_s[other] / 3.3616)
    assert drafted.token_s[other] < plain.token_s[one] / 2  # a small batch is bound by memory


def test_experts_get_the_tokens_of_all_checked_positions():
    """32 sequences with 3 drafts fill as many slots of experts as 128 sequences without."""
    axes = {"tensor": 8}
    plain, drafted = (
        decode("mixtral-8x7b", "v5e:2x4", axes, **given) for given in ({}, {"acceptance": 0.5, "num_drafts": 3})
    )
    few, many = row(drafted, 32), row(plain, 128)
    caches = plain.bounds_s["KV"][many] - plain.bounds_s["KV"][row(plain, 32)]
    assert caches > 0
    assert drafted.bounds_s["parameters"][few] == pytest.approx(plain.bounds_s["parameters"][many])
    assert drafted.bounds_s["KV"][few] < plain.bounds_s["KV"][many] - 0.9 * caches


def test_the_best_number_of_drafts_is_that_of_the_shortest_time_per_token():
    best = decode(acceptance=0.7, draft_cost=0.1)
    fixed = [decode(acceptance=0.7, draft_cost=0.1, num_drafts=count) for count in range(17)]
    for batch in (1, 16, 128):
        seconds = [steps.token_s[row(steps, batch)] for steps in fixed]
        here = row(best, batch)
        assert best.drafts[here] == int(np.argmin(seconds))
        assert best.token_s[here] == min(seconds)
    # large batches are bound by FLOPs, which drafts waste
    assert best.drafts[row(best, 1)] > best.drafts[row(best, 128)]


def test_without_drafts_nothing_changes():
    plain, none = decode(), decode(acceptance=0.8, num_drafts=0)
    assert np.array_equal(plain.step_s, none.step_s)
    assert np.array_equal(plain.need, none.need)


def test_the_figures_of_a_service_with_drafts():
    setting = service_setting(load_model("llama3-8b"), parse_cluster("v5e:2x2"))
    found = plan_service(setting, chat(acceptance=0.8, num_drafts=4), stored=(INT8,), axes={"tensor": 4})
    plan = found.plans[-1]
    assert not plan.has_pools
    batch, token_s = plan.generate.batch_seqs, plan.generate.step_s / 3.3616
    assert plan.predicted.tpot_s == pytest.approx(
        token_s + (batch - 1) / 512 * plan.prefill.step_s / plan.prefill.batch_seqs
    )
    assert plan.to_json()["num_drafts"] == 4
    told = why_not_service(found, {"batch": 1}).chip_s
    assert told["drafts"][0] == pytest.approx(
        found.plans[0].generate.bounds_s["drafts"] * 4 / (found.plans[0].generate.batch_seqs * 3.3616)
    )
    told = explain_service(plan)
    assert told.value("TPOT") == pytest.approx(plan.predicted.tpot_s)
    assert told.value("requests/s") == pytest.approx(plan.predicted.requests_per_s)
    assert told.value("memory left") == pytest.approx(plan.predicted.free_bytes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"acceptance": 0.0}, "acceptance=0 must be above 0"),
        ({"acceptance": 0.5, "num_drafts": 17}, "num_drafts=17 must be from 0 to 16"),
        ({"acceptance": 0.5, "draft_cost": -1.0}, "draft_cost=-1 must be at least 0"),
    ],
)
def test_bad_speculation(given, message):
    with pytest.raises(InputError, match=message):
        Speculation(**given)
