"""The rules: one mask and one sentence each, and both always agree."""

import re

import msgspec
import numpy as np
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.rewrites.pipeline import NO_PIPELINE, no_stages
from meshwright.algebra.transformer import transformer
from meshwright.core.dims import ISLAND_AXES
from meshwright.core.errors import CannotRunError
from meshwright.cost.setting import Setting
from meshwright.plan.legal import (
    DEVICES_RULE,
    SCHEDULE_RULE,
    divisors,
    legal,
    microbatches_that_fit,
    require_legal,
    size_rules,
    splits,
)
from meshwright.plan.planner import rank_plans
from meshwright.plan.rules import NOUNS, StrategySizes, check_rules, mask
from meshwright.plan.why.why_not import why_not
from meshwright.spec import catalogue
from meshwright.spec.catalogue import load_model, models
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import OPTIMIZERS, Job
from meshwright.spec.model import Encoder
from meshwright.spec.strategy import DEFAULT_ASSIGNMENT, USUAL_POLICIES, Strategy, make_mesh, standard_assignment
from tests.tier import sampled

LLAMA70B, TINY = catalogue.load_model("llama3-70b"), catalogue.load_model("tiny")
JOB = Job(batch_seqs=1024, seq_len=4096)


def refusals(axes, *, model=LLAMA70B, cluster="v5p:16x16x32", job=JOB, **fields):
    found = legal(Setting(model, parse_cluster(cluster), job), Strategy(mesh=make_mesh(axes), **fields))
    return {refusal.rule: refusal.message for refusal in found}


HERE = {"model": TINY, "cluster": "cpu:8", "job": Job(batch_seqs=8, seq_len=64)}
SMALL = HERE | {"cluster": "v5e:4x4", "job": Job(batch_seqs=16, seq_len=64)}
EIGHT = HERE | {"cluster": "v5e:2x4"}
SPARSE = {"model": catalogue.load_model("mixtral-8x7b"), "job": Job(batch_seqs=96, seq_len=4096)}


@pytest.mark.parametrize(
    ("axes", "fields"),
    [
        ({"fsdp": 1024, "context": 2, "tensor": 4}, {}),
        ({"pipeline": 2, "fsdp": 4}, HERE | {"num_microbatches": 2}),
        ({"pipeline": 2, "fsdp": 4}, EIGHT | {"num_microbatches": 2}),
        ({"pipeline": 4, "fsdp": 4}, SMALL | {"schedule": "interleaved", "chunks": 2, "num_microbatches": 4}),
        # two kv heads for each
        ({"fsdp": 512, "tensor": 16}, {}),
        # one stage runs any schedule
        ({"fsdp": 8}, EIGHT | {"schedule": "interleaved"}),
        ({"fsdp": 8, "expert": 4}, SPARSE | {"cluster": "h100:8x4", "num_microbatches": 3}),
    ],
)
def test_strategies_that_run(axes, fields):
    assert refusals(axes, **fields) == {}


@pytest.mark.parametrize(
    ("axes", "fields", "rule", "message"),
    [
        ({"fsdp": 64, "tensor": 128}, {}, "tensor | N",
         "tensor=128 does not divide N=64 query heads of llama3-70b. Use tensor in {1, 2, 4, 8, 16, 32, 64}."),
        ({"fsdp": 256, "context": 8, "tensor": 4}, {"num_microbatches": 8}, "sequences",
         "num_microbatches=8 does not divide the 4 of 1024 sequences that each of 256 data shards has. "
         "Use num_microbatches in {1, 2, 4}."),
        ({"pipeline": 16}, SMALL, "stages",
         "pipeline=16 is more stages than the 8 layers of tiny. Use at most 8."),
        ({"pipeline": 4, "fsdp": 4}, SMALL | {"schedule": "interleaved", "chunks": 4, "num_microbatches": 4}, "stages",
         "pipeline=4 x chunks=4 has 16 places for the 8 layers of tiny, more than 8. "
         "Use chunks in {1, 2}, or fewer stages."),
        ({"expert": 8}, EIGHT, "experts", "expert=8: tiny has no experts. Leave the axis out, or use fsdp=8."),
    ],
)  # fmt: skip
def test_one_rule_refuses_in_one_sentence(axes, fields, rule, message):
    assert refusals(axes, **fields) == {rule: message}


def test_the_batch_is_named_with_what_must_change():
    found = refusals({"fsdp": 2048, "tensor": 4})
    assert list(found) == ["sequences"]
    assert found["sequences"].startswith("fsdp=2048 does not divide the batch of 1024 sequences. Use fsdp in {1, 2, 4,")
    assert found["sequences"].endswith("or a batch of 2048 sequences.")
    both = refusals({"data": 35, "fsdp": 64, "tensor": 4}, cluster="v5p:16x20x28")["sequences"]
    assert both.startswith("data=35 x fsdp=64 = 2240 does not divide the batch of 1024 sequences. Use data*fsdp in {")
    assert both.endswith("or a batch of 2240 sequences.")


def test_positions_and_width():
    job = Job(batch_seqs=1024, seq_len=1000)
    found = refusals({"fsdp": 512, "context": 16}, job=job)
    message = found["context | T"]
    assert message.startswith("context=16 does not divide T=1000 positions of llama3-70b. Use context in {1, 2, 4, 8}.")
    wide = refusals({"fsdp": 3, "context": 2}, cluster="v5p:1x2x3", job=Job(batch_seqs=3, seq_len=4096))
    assert wide["fsdp*context | D"].startswith(
        "fsdp=3 x context=2 = 6 does not divide D=8192 model width of llama3-70b."
    )


def test_devices_that_are_too_many_or_too_few():
    found = refusals({"fsdp": 1024, "tensor": 4})
    assert found["devices"] == (
        "mesh fsdp=1024 x tensor=4 needs 4,096 devices, but v5p:16x16x32 has 8,192. "
        "Make the product of the axes 8,192, or name a cluster of 4,096."
    )
    assert refusals({})["devices"].startswith("a mesh of one device needs 1 device, but v5p:16x16x32 has 8,192. ")


def test_a_mesh_that_cannot_be_laid_as_it_says():
    one = Strategy(mesh=make_mesh({"data": 64}), placement={"data": "x (64)"})
    setting = Setting(TINY, parse_cluster("v5p:4x4x4"), Job(batch_seqs=64, seq_len=64))
    (refusal,) = legal(setting, one)
    assert refusal.rule == "placement"
    assert refusal.message.startswith(
        "mesh data 64 cannot be laid on v5p:4x4x4 as data: x (64): every mesh axis must be made of whole"
    )


def test_too_little_memory_says_what_fits():
    found = refusals({"fsdp": 64}, cluster="v5p:4x4x4", job=Job(batch_seqs=1024, seq_len=4096), remat="none")
    message = found["memory"]
    assert message.startswith("llama3-70b on mesh fsdp=64 needs ")
    assert " per chip (most: activations " in message
    assert ", but a chip of v5p:4x4x4 has 95 GB. Use " in message
    assert message.endswith("GB).")
    assert refusals({"fsdp": 64}, cluster="v5p:4x4x4", **advice(message, remat="none")) == {}


def advice(message, **fields):
    """The fields of a strategy with those that a refusal for memory advises."""
    words = dict(re.findall(r"(remat|num_microbatches)=([\w-]+)", message))
    counts = {"num_microbatches": int(words.pop("num_microbatches"))} if "num_microbatches" in words else {}
    return fields | words | counts


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "fields", "changed"),
    [
        ("llama3-70b", "v5p:4x4x4", 1024, {"remat": "full"}, {"num_microbatches"}),
        ("llama3-70b", "v5p:4x4x4", 1024, {"remat": "every-2"}, {"num_microbatches"}),
        ("llama3-8b", "h100:8x4", 256, {"remat": "none", "num_microbatches": 2}, {"remat"}),
        ("llama3-70b", "v5p:2x4x4", 1024, {"remat": "none", "num_microbatches": 2}, {"num_microbatches", "remat"}),
    ],
)
def test_the_remedy_is_the_smallest_change(model, cluster, batch, fields, changed):
    where = parse_cluster(cluster)
    setting = Setting(catalogue.load_model(model), where, Job(batch_seqs=batch, seq_len=4096))
    strategy = Strategy(mesh=make_mesh({"fsdp": where.num_chips}), **fields)
    (refusal,) = legal(setting, strategy)
    assert refusal.rule == "memory"
    assert set(advice(refusal.message)) == changed
    better = msgspec.structs.replace(strategy, **advice(refusal.message))
    assert legal(setting, better) == ()
    if len(changed) == 2:
        singles = [msgspec.structs.replace(strategy, num_microbatches=count) for count in divisors(32)]
        singles += [msgspec.structs.replace(strategy, remat=remat) for remat in USUAL_POLICIES]
        assert all(legal(setting, one) for one in singles)


def test_memory_that_nothing_saves():
    found = refusals({"fsdp": 16}, cluster="v5e:4x4", job=Job(batch_seqs=16, seq_len=4096))
    assert found["memory"].endswith(
        "None of the remat policies tried, with any number of microbatches, makes it fit: use more chips, or larger "
        "fsdp and tensor axes."
    )
    generates = Job(kind="prefill", batch_seqs=8, seq_len=8192)
    found = refusals({"fsdp": 8}, cluster="v5e:2x4", job=generates, num_microbatches=8)
    assert found["memory"].endswith("has 16.9 GB. Use more chips, or larger fsdp and tensor axes.")


def test_microbatches_that_fit_do_not_depend_on_the_strategys_own():
    setting = Setting(LLAMA70B, parse_cluster("v5p:4x4x4"), JOB)
    one, three = (Strategy(mesh=make_mesh({"fsdp": 64}), remat="block", num_microbatches=count) for count in (1, 3))
    found = microbatches_that_fit(setting, three)
    assert found == microbatches_that_fit(setting, one)
    assert found
    assert all(16 % count == 0 and need <= setting.memory_limit for count, need in found.items())
    assert microbatches_that_fit(setting, Strategy(mesh=make_mesh({"fsdp": 32}))) == {}


# -- what only this machine's own devices refuse --------------------------------------------------------


def test_what_is_planned_for_chips_is_not_all_executed_here():
    """A state that is only counted, another assignment, a ring of keys: planned for any cluster but this machine."""
    odd = {**DEFAULT_ASSIGNMENT, "activation": {**DEFAULT_ASSIGNMENT["activation"], "T": ("context",)}}
    for fields, words in (
        ({"assignment": odd}, "strategy.assignment.activation differs from the standard one"),
        ({"precision": "fp8"}, "precision 'fp8' is planned but not executed in this version. Use 'bf16'"),
    ):
        assert refusals({"fsdp": 8}, **HERE, **fields)["executed"].startswith(words)
        assert refusals({"fsdp": 8}, **EIGHT, **fields) == {}


# -- pipelines and experts ------------------------------------------------------------------------------


def test_a_schedule_that_does_not_exist_for_the_sizes():
    for fields, words in (
        ({"schedule": "interleaved"}, "the interleaved schedule needs chunks=2 or more, not 1. Use chunks=2, or 1f1b."),
        ({"schedule": "interleaved", "chunks": 2, "num_microbatches": 2}, "microbatches that stages=4 divides, not 2."),
        ({"schedule": "1f1b", "chunks": 2}, "chunks=2 is not for 1f1b, whose devices hold 1. Use chunks=1"),
        ({"schedule": "dualpipe", "num_microbatches": 4}, "at least 8 for 4 stages, not 4. Use for example 8."),
        ({"schedule": "dualpipe-v"}, "chunks=1 is not for dualpipe-v, whose devices hold 2. Use chunks=2"),
    ):
        found = refusals({"pipeline": 4, "fsdp": 4}, **SMALL, **fields)
        assert list(found) == ["schedule"]
        assert words in found["schedule"]


def test_experts_divide():
    found = refusals({"fsdp": 8, "expert": 3}, **SPARSE, cluster="h100:8x3")
    assert found["experts"] == ("expert=3 does not divide the 8 experts of mixtral-8x7b. Use expert in {1, 2, 4, 8}.")


def test_a_remedy_for_memory_keeps_to_the_schedule():
    """Interleaved runs only with microbatches that the stages divide: so does the advice."""
    axes, job = {"pipeline": 4, "fsdp": 16}, Job(batch_seqs=1024, seq_len=4096)
    fields = {"schedule": "interleaved", "chunks": 2, "cluster": "v5p:4x4x4", "job": job}
    message = refusals(axes, **fields, remat="none", num_microbatches=4)["memory"]
    changed = advice(message, remat="none", num_microbatches=4)
    assert changed["num_microbatches"] % 4 == 0
    assert refusals(axes, **fields, **changed) == {}


def interleaved(num_layers, stages, chunks):
    model = msgspec.structs.replace(TINY, num_layers=num_layers)
    fields = {"schedule": "interleaved", "chunks": chunks, "num_microbatches": stages}
    where = EIGHT | {"model": model, "cluster": "h100:8x1"}
    return refusals({"pipeline": stages, "fsdp": 8 // stages}, **where, **fields).get("stages", "")


def test_few_places_for_layers_stay_empty():
    """10 layers in 6 runs have 12 places, two too many; 20 layers in 22 have two empty, which is a tenth."""
    assert interleaved(10, 2, 3) == (
        "pipeline=2 x chunks=3 has 12 places for the 10 layers of tiny, more than 11. "
        "Use chunks in {1, 5}, or fewer stages."
    )
    assert interleaved(20, 2, 11) == interleaved(10, 2, 5) == ""
    assert interleaved(20, 4, 6).startswith(
        "pipeline=4 x chunks=6 has 24 places for the 20 layers of tiny, more than 22"
    )


def test_stages_need_streams_from_the_first_and_training():
    both = msgspec.structs.replace(TINY, encoder=Encoder(num_layers=3, length=96))
    assert refusals({"pipeline": 2, "fsdp": 4}, **EIGHT | {"model": both}) == {}
    second = msgspec.structs.replace(catalogue.load_model("deepseek-v3"), mtp_weight=0.1)
    assert refusals({"pipeline": 2, "fsdp": 4}, **EIGHT | {"model": second})["stacks"] == NO_PIPELINE
    generates = EIGHT | {"job": Job(kind="decode", batch_seqs=8, seq_len=64)}
    found = refusals({"pipeline": 2, "fsdp": 4}, **generates)
    assert list(found) == ["stacks"]
    assert found["stacks"].startswith("pipeline=2 trains but does not generate in this version.")


def test_every_dim_has_a_noun():
    every = {dim for name in catalogue.models() for dim in catalogue.load_model(name).dims}
    assert every <= set(NOUNS)
    found = refusals(
        {"tensor": 3},
        model=catalogue.load_model("deepseek-v2-lite"),
        cluster="v5p:1x1x3",
        job=Job(batch_seqs=3, seq_len=66),
    )
    assert "does not divide Fe=1408 expert feed-forward width of deepseek-v2-lite." in found["tensor | Fe"]
    assert not any("  " in message for message in found.values())


def test_require_legal_raises_the_first_reason():
    strategy = Strategy(mesh=make_mesh({"fsdp": 64, "tensor": 128}))
    with pytest.raises(CannotRunError, match="tensor=128 does not divide N=64 query heads of llama3-70b"):
        require_legal(Setting(LLAMA70B, parse_cluster("v5p:16x16x32"), JOB), strategy)


def test_rules_are_read_off_the_steps():
    derived = derive(transformer(TINY), Strategy(mesh=make_mesh({})), symbolic=True)
    assert set(splits(derived)) == {
        ("B", ("data", "fsdp", "expert")),
        ("T", ("context", "tensor")),
        ("D", ("fsdp", "expert", "context")),
        ("N", ("tensor",)),
        ("K", ("tensor",)),
        ("F", ("tensor",)),
    }


def test_the_mask_and_the_messages_agree():
    """Random strategies, most of them illegal: allowed by the mask if and only if no rule has a sentence."""
    rng = np.random.default_rng(3)
    derived = derive(transformer(TINY), Strategy(mesh=make_mesh({})), symbolic=True)
    rules = (DEVICES_RULE, *size_rules(derived), SCHEDULE_RULE)
    number = 3000
    mesh = {axis: rng.choice([1, 1, 2, 3, 4, 8, 16], number) for axis in ISLAND_AXES}
    mesh["expert"] = rng.choice([1, 1, 1, 2], number)
    chips = 16
    counts, chunks = rng.choice([1, 2, 4, 3], number), rng.choice([1, 2, 4], number)
    facts = StrategySizes(
        model="tiny",
        cluster="test",
        num_chips=chips,
        mesh=mesh,
        dims=TINY.dims | {"B": 48, "T": 96},
        num_microbatches=counts,
        schedule="interleaved",
        chunks=chunks,
    )
    allowed = mask(rules, facts)
    assert 20 < allowed.sum() < number
    assert (mesh["pipeline"][allowed] > 1).any()
    for index in range(number):
        axes = {axis: int(sizes[index]) for axis, sizes in mesh.items()}
        few = {"num_microbatches": int(counts[index]), "chunks": int(chunks[index])}
        one = msgspec.structs.replace(facts, mesh=axes, **few)
        refused = check_rules(rules, one)
        assert bool(allowed[index]) == (not refused), (axes, refused)
        for refusal in refused:
            assert refusal.message.endswith(".")
            assert "\n" not in refusal.message


def test_divisors():
    assert divisors(28) == (1, 2, 4, 7, 14, 28)
    assert divisors(1) == (1,)


# -- ZeRO -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_needs_an_axis_that_it_shards_over(stage):
    """Replicas over data hold everything whole: its memory would be that of stage 0."""
    fields = HERE | {"assignment": standard_assignment(zero=stage)}
    told = "data=4 hold everything whole. Use --axes fsdp=4,tensor=2 --set strategy.zero="
    assert f"{told}{stage}." in refusals({"data": 4, "tensor": 2}, **fields)["zero"]
    for axes in ({"fsdp": 8}, {"data": 2, "fsdp": 4}, {"data": 4, "context": 2}, {"tensor": 4, "pipeline": 2}):
        assert "zero" not in refusals(axes, **fields)
    assert "zero" not in refusals({"data": 8}, **HERE)


def test_a_search_with_a_given_stage_shards_something():
    setting = Setting(TINY, parse_cluster("h100:8x1"), Job(batch_seqs=128, seq_len=512))
    free = rank_plans(setting, top=100).plans
    assert any(one.strategy.mesh["data"] == 8 for one in free)
    found = rank_plans(setting, overrides={"assignment": standard_assignment(zero=1)}, top=100).plans
    assert found
    meshes = [one.strategy.mesh for one in found]
    assert all(mesh["data"] == 1 or mesh["fsdp"] * mesh["context"] > 1 for mesh in meshes)
    with pytest.raises(CannotRunError, match="zero=3 shards over fsdp"):
        rank_plans(setting, axes={"data": 8}, overrides={"assignment": standard_assignment(zero=3)})
    told = why_not(rank_plans(setting, top=1), {"data": 8, "zero": 1})
    assert told.refusal is not None
    assert "Use --axes fsdp=8" in told.refusal.message


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
