"""What steps hold on hardware that is not there: nothing twice. Needs the compilers of the extras tpu and gpu."""

import msgspec
import pytest
from benchmarks.verify_serving import EXECUTED, cases, found_in

from meshwright.spec import catalogue
from meshwright.spec.cluster import parse_cluster
from meshwright.verify.targets import is_installed, target_of
from tests.verify.compiled import proof_of

pytestmark = pytest.mark.aot

MODEL = msgspec.structs.replace(
    catalogue.load_model("tiny"), name="tiny-wide", d_model=512, d_ff=2048, num_heads=8, num_kv_heads=8, head_dim=64
)
"""Wide enough that what layers keep outweighs everything else."""

ON = ("h100:8x1", "v5p:2x2x2")


def memory(cluster, axes, *, batch_seqs, **choices):
    """The compiled and the predicted bytes of a step."""
    proof = proof_of(MODEL, cluster, axes, seqs=batch_seqs, length=512, choices=choices)
    assert proof.memory is not None, proof.refusal
    return proof.memory


@pytest.mark.parametrize("cluster", ON)
def test_the_last_of_two_microbatches_waits_for_the_first(cluster):
    """Microbatches of one size: three need no more room than two, and two little more than one."""
    one, two, three = (
        memory(cluster, {"fsdp": 8}, batch_seqs=64 * count, num_microbatches=count, remat="matmuls").temporaries
        for count in (1, 2, 3)
    )
    assert two < 1.25 * one
    assert three < 1.1 * two


@pytest.mark.parametrize("cluster", ON)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_stash_is_held_once(cluster, schedule):
    """Two copies of it would be half as much again as is predicted."""
    choices = {"num_microbatches": 8, "schedule": schedule, "remat": "matmuls"}
    found = memory(cluster, {"pipeline": 4, "fsdp": 2}, batch_seqs=256, **choices)
    assert found.items["activations"] > 0.7 * found.predicted
    assert abs(found.error) < 0.2


DECODER = msgspec.structs.replace(MODEL, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=128, vocab_size=2048)
"""Its cache outweighs everything else; a layer's keys or values are a sixteenth of it."""


@pytest.mark.parametrize("cluster", ON)
@pytest.mark.parametrize("cache_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("seqs", [1, 8])
def test_decode_copies_no_cache(cluster, cache_dtype, seqs):
    """GPUs slice the keys and values of one layer; a cache in another order than products read it was copied whole."""
    asked = {"seqs": seqs, "length": 65536 // seqs, "step": "decode", "cache_dtype": cache_dtype}
    proof = proof_of(DECODER, cluster, {"tensor": 8}, **asked)
    assert proof.memory.temporaries < 0.3 * proof.memory.items["kv_cache"]


@pytest.mark.parametrize("cluster", ON)
@pytest.mark.parametrize(("model", "length"), [("t5-11b", 512), ("whisper-large-v3", 1500)])
def test_the_program_that_reads_sources_is_as_predicted(cluster, model, length):
    """Prefill beside an encoder, whose frames are the innermost dim of a whisper's features."""
    axes = {"data": 2, "tensor": 4}
    proof = proof_of(catalogue.load_model(model), cluster, axes, seqs=8, length=length, step="prefill", weights="int8")
    assert proof.runs, proof.refusal
    assert abs(proof.memory.error) <= 0.05
    assert proof.traffic.remainder <= 0.02
    assert proof.products.compiled == proof.products.derived


@pytest.mark.slow
@pytest.mark.parametrize("stored", EXECUTED)
@pytest.mark.parametrize(
    ("model", "cluster"), [("llama3-70b", "h100:8x4"), ("gpt-oss-120b", "v5p:2x4x4"), ("deepseek-v3", "v5p:4x4x8")]
)
def test_steps_of_a_planned_service_are_as_predicted(model, cluster, stored):
    if not is_installed(target_of(parse_cluster(cluster)).platform):
        pytest.skip(f"the compiler for {cluster} is not installed")
    for case in cases(model, cluster, stored):
        found = found_in(case.prove())
        assert found is not None, case
        assert abs(found.memory) <= 0.05
        assert found.unnamed <= 0.02
