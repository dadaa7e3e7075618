"""Every way to split, compiled for TPUs and GPUs that are not there: collectives and products are the derived ones."""

import msgspec
import pytest

from meshwright.spec import catalogue
from meshwright.spec.strategy import standard_assignment
from tests.verify.compiled import proof_of

pytestmark = [pytest.mark.aot, pytest.mark.slow]

DENSE = msgspec.structs.replace(
    catalogue.load_model("tiny"), name="dense", d_model=512, d_ff=1024, num_heads=8, num_kv_heads=4, head_dim=128
)
EXPERTS = msgspec.structs.replace(
    DENSE,
    name="experts",
    family="mixtral",
    num_experts=8,
    experts_per_token=2,
    d_ff_expert=512,
    gates_sum_to_one=True,
)

STAGES = {"num_microbatches": 8}
WAYS = {
    "data": ({"data": 8}, {}),
    "tensor": ({"tensor": 4, "fsdp": 2}, {}),
    "tensor, full remat": ({"tensor": 4, "fsdp": 2}, {"remat": "full"}),
    "ring": ({"context": 4, "fsdp": 2}, {"context_attention": "ring"}),
    "ulysses": ({"context": 4, "fsdp": 2}, {"context_attention": "ulysses"}),
    "gathered keys": ({"context": 4, "tensor": 2}, {"context_attention": "gather", "num_microbatches": 2}),
    "three axes": ({"data": 2, "fsdp": 2, "tensor": 2}, {"num_microbatches": 4, "remat": "selective"}),
    "ZeRO-0": ({"fsdp": 4, "tensor": 2}, {"assignment": standard_assignment(zero=0)}),
    "ZeRO-1": ({"fsdp": 8}, {"assignment": standard_assignment(zero=1), "num_microbatches": 2}),
    "ZeRO-2": ({"fsdp": 8}, {"assignment": standard_assignment(zero=2), "num_microbatches": 4}),
    "segments of sqrt": ({"fsdp": 8}, {"remat": "sqrt"}),
    "segments of two": ({"fsdp": 4, "tensor": 2}, {"remat": "every-2", "num_microbatches": 2}),
    "segments of two, layer by layer": ({"fsdp": 4, "tensor": 2}, {"remat": "recompute-2", "num_microbatches": 2}),
    "one segment, layer by layer": ({"fsdp": 8}, {"remat": "recompute-all"}),
    "prefetch": ({"fsdp": 8}, {"prefetch": True}),
    "collective matmuls": ({"tensor": 4, "fsdp": 2}, {"collective_matmul": "two-way"}),
    "optimizer offloaded": ({"fsdp": 8}, {"offload": ("optimizer",)}),
    "activations offloaded": ({"fsdp": 8}, {"offload": ("activations",), "remat": "selective"}),
    "1f1b": ({"pipeline": 4, "fsdp": 2}, STAGES),
    "interleaved": ({"pipeline": 2, "tensor": 2, "fsdp": 2}, STAGES | {"schedule": "interleaved", "chunks": 4}),
    "zb-h1": ({"pipeline": 4, "tensor": 2}, STAGES | {"schedule": "zb-h1"}),
    "dualpipe": ({"pipeline": 4, "fsdp": 2}, STAGES | {"schedule": "dualpipe"}),
    "stages and a ring": ({"pipeline": 2, "context": 2, "tensor": 2}, STAGES | {"context_attention": "ring"}),
    "gradients at the end": ({"data": 8}, {"gradient_sync": "naive", "num_microbatches": 2}),
    "gradients in buckets": ({"data": 8}, {"gradient_sync": "bucketed"}),
}
EXPERT_WAYS = {
    "experts": ({"expert": 8}, {}),
    "experts and fsdp": ({"expert": 4, "fsdp": 2}, {"num_microbatches": 2}),
    "experts with a bound": ({"expert": 2, "tensor": 2, "fsdp": 2}, {"capacity_factor": 1.5}),
    "experts that stay": ({"fsdp": 8}, {}),
    "experts in stages": ({"pipeline": 2, "expert": 4}, {"num_microbatches": 4}),
}
CASES = [(DENSE, *way) for way in WAYS.values()] + [(EXPERTS, *way) for way in EXPERT_WAYS.values()]


@pytest.mark.parametrize("cluster", ["v5p:2x2x2", "h100:8x1"])
@pytest.mark.parametrize(("model", "axes", "choices"), CASES, ids=[*WAYS, *EXPERT_WAYS])
def test_compiled_is_derived(cluster, model, axes, choices):
    choices = dict(choices)
    proof = proof_of(model, cluster, axes, seqs=64, timeout_s=150, choices=choices)
    assert proof.runs, proof.refusal
    assert proof.traffic is not None, proof.traffic_error
    assert proof.traffic.remainder <= 0.02
    assert proof.products.compiled == pytest.approx(proof.products.derived, rel=1e-3)
    if cluster.startswith("h100"):
        # XLA's GPU compiler keeps to the derivation, but for a ring's last blocks and for gradients of gains, which are
        # summed over stages and replicas at once
        differences = proof.traffic.differences
        assert {one.name for one in differences} <= {"dropped", "shared", "joined"}
        assert all(0 < one.compiled_bytes < one.derived_bytes < 1e4 for one in differences if one.name == "joined")
