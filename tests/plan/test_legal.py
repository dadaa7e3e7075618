"""The rules: one mask and one sentence each, and both always agree."""

import msgspec
import numpy as np
import pytest

from meshwright.algebra.derive import derive
from meshwright.algebra.transformer import transformer
from meshwright.core.dims import MESH_AXES
from meshwright.core.errors import CannotRunError
from meshwright.cost.setting import Setting
from meshwright.plan.legal import (
    SCHEDULE_RULE,
    StrategySizes,
    check_rules,
    divisors,
    legal,
    mask,
    require_legal,
    size_rules,
    splits,
)
from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import DEFAULT_ASSIGNMENT, Strategy, make_mesh

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
        ({"fsdp": 512, "tensor": 16}, {}, "tensor | K",
         "tensor=16 does not divide K=8 kv heads of llama3-70b. Use tensor in {1, 2, 4, 8}."),
        ({"fsdp": 256, "context": 8, "tensor": 4}, {"num_microbatches": 8}, "sequences",
         "num_microbatches=8 does not divide the 4 sequences that each of 256 data shards has of 1024. "
         "Use num_microbatches in {1, 2, 4}."),
        ({"pipeline": 16}, SMALL, "stages",
         "pipeline=16 stages are more than the 8 layers of tiny. Use at most 8 in all."),
        ({"pipeline": 4, "fsdp": 4}, SMALL | {"schedule": "interleaved", "chunks": 4, "num_microbatches": 4}, "stages",
         "pipeline=4 x chunks=4 = 16 stages are more than the 8 layers of tiny. Use at most 8 in all."),
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
        "mesh fsdp=1024 x tensor=4 = 4096 uses 4096 devices and v5p:16x16x32 has 8192. "
        "Make the product of the axes 8192, or name a cluster of 4096."
    )


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
    assert " per chip and a chip of v5p:4x4x4 has 95 GB (activations " in message
    assert message.endswith("GB).")
    policy = message.split("Use remat=")[1].split(" ")[0]
    count = int(message.split("num_microbatches=")[1].split(" ")[0])
    assert refusals({"fsdp": 64}, cluster="v5p:4x4x4", remat=policy, num_microbatches=count) == {}


def test_memory_that_nothing_saves():
    found = refusals({"fsdp": 16}, cluster="v5e:4x4", job=Job(batch_seqs=16, seq_len=4096))
    assert found["memory"].endswith("use more chips, or larger fsdp and tensor axes.")


# -- what only this machine's own devices refuse --------------------------------------------------------


def test_what_is_planned_for_chips_is_not_all_executed_here():
    """A state that is only counted, another assignment, a ring of keys: planned for any cluster but this machine."""
    odd = {**DEFAULT_ASSIGNMENT, "activation": {**DEFAULT_ASSIGNMENT["activation"], "T": ("context",)}}
    for fields, words in (
        ({"assignment": odd}, "strategy.assignment.activation differs from the product's own"),
        ({"precision": "fp8"}, "precision 'fp8' is planned but not executed in this version. Use 'bf16'"),
    ):
        assert refusals({"fsdp": 8}, **HERE, **fields)["executed"].startswith(words)
        assert refusals({"fsdp": 8}, **EIGHT, **fields) == {}


# -- pipelines and experts ------------------------------------------------------------------------------


def test_a_schedule_that_does_not_exist_for_the_sizes():
    for fields, words in (
        ({"schedule": "interleaved"}, "the interleaved schedule needs chunks of at least 2. With chunks=1 use 1f1b."),
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
    policy = message.split("Use remat=")[1].split(" ")[0]
    count = int(message.split("num_microbatches=")[1].split(" ")[0])
    assert count % 4 == 0
    assert refusals(axes, **fields, remat=policy, num_microbatches=count) == {}


def test_require_legal_raises_the_first_reason():
    strategy = Strategy(mesh=make_mesh({"fsdp": 512, "tensor": 16}))
    with pytest.raises(CannotRunError, match="tensor=16 does not divide K=8 kv heads of llama3-70b"):
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
        ("V", ("tensor",)),
    }


def test_the_mask_and_the_messages_agree():
    """Random strategies, most of them illegal: allowed by the mask if and only if no rule has a sentence."""
    rng = np.random.default_rng(3)
    derived = derive(transformer(TINY), Strategy(mesh=make_mesh({})), symbolic=True)
    rules = (*size_rules(derived), SCHEDULE_RULE)
    number = 3000
    mesh = {axis: rng.choice([1, 1, 2, 3, 4, 8, 16], number) for axis in MESH_AXES}
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
