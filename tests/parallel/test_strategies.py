"""Every parallelism, and mixes of them, against one device and against their derived collectives."""

import numpy as np
import pytest

from meshwright.algebra.layers import ProgramOptions
from meshwright.hlo.collectives import collectives
from tests.parallel.cases import DEEP, DEEP_MOE, MOE, assert_equal, on_one_device, run, strategy_of
from tests.parallel.small import BATCH_SEQS, MODEL, SEQ_LEN, batch
from tests.tier import sampled

MESHES = [
    (DEEP, {"fsdp": 2}, {"remat": "recompute-3"}),
    (
        MODEL,
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"placement": {"data": "2 of x (4)", "fsdp": "2 of x (4)", "tensor": "y (2)"}, "zero": 2},
    ),
    (
        DEEP,
        {"fsdp": 2, "data": 2, "tensor": 2},
        {"prefetch": True, "remat": "none", "offload": ("activations", "optimizer")},
    ),
    (MODEL, {"fsdp": 2, "context": 2, "tensor": 2}, {"context_attention": "ulysses", "remat": "matmuls"}),
    (MOE, {"data": 2, "expert": 2, "tensor": 2}, {"remat": "selective"}),
    *sampled(
        [
            (MODEL, {"data": 4}, {"zero": 0, "gradient_sync": "naive"}),
            (MODEL, {"data": 4}, {"zero": 0, "gradient_sync": "bucketed", "bucket_bytes": 20_000}),
            (DEEP, {"fsdp": 4}, {"prefetch": True, "remat": "selective"}),
            (DEEP, {"fsdp": 2}, {"remat": "every-2"}),
            (DEEP, {}, {"remat": "recompute-all"}),
            (DEEP, {"fsdp": 2}, {"remat": "recompute-2", "offload": ("activations",)}),
            (DEEP_MOE, {"expert": 2}, {"remat": "recompute-all"}),
            (MODEL, {"tensor": 4}, {"sequence_parallel": False, "remat": "none"}),
            (MODEL, {"context": 4}, {"context_attention": "ulysses", "remat": "selective"}),
            (MODEL, {"context": 4}, {"context_attention": "ring", "remat": "selective"}),
            (MOE, {"expert": 4}, {"remat": "none"}),
            (MODEL, {"fsdp": 8}, {"placement": {"fsdp": "x (4) x y (2)"}, "num_microbatches": 1}),
            (MODEL, {"data": 2, "fsdp": 2, "tensor": 2}, {"zero": 1, "num_microbatches": 2}),
            (MODEL, {"data": 2, "fsdp": 2, "context": 2}, {"zero": 2, "context_attention": "ring", "remat": "none"}),
            (MODEL, {"data": 2, "context": 2, "tensor": 2}, {"sequence_parallel": False, "remat": "full"}),
            (MOE, {"fsdp": 2, "expert": 2, "context": 2}, {"context_attention": "ring", "remat": "selective"}),
            (MOE, {"data": 2, "fsdp": 2, "expert": 2}, {"zero": 1, "num_microbatches": 1}),
            (DEEP, {"data": 2, "fsdp": 2, "tensor": 2}, {"remat": "recompute-all", "zero": 1}),
        ]
    ),
]
PIPELINES = [
    (DEEP, {"pipeline": 2, "data": 2, "tensor": 2}, {"schedule": "zb-h1", "zero": 1}),
    *sampled(
        [
            (DEEP, {"pipeline": 2, "fsdp": 2, "context": 2}, {"schedule": "1f1b", "context_attention": "ring"}),
            (DEEP, {"pipeline": 2, "data": 2, "fsdp": 2}, {"schedule": "interleaved", "chunks": 2}),
            (DEEP_MOE, {"pipeline": 2, "expert": 2, "tensor": 2}, {"schedule": "gpipe", "remat": "selective"}),
            (DEEP, {"pipeline": 2, "fsdp": 2}, {"schedule": "1f1b", "remat": "recompute-all"}),
            (DEEP, {"pipeline": 2, "tensor": 2}, {"schedule": "zb-h1", "remat": "recompute-2"}),
            *(
                (DEEP, {"pipeline": 2, "fsdp": 2, "tensor": 2}, {"schedule": one, "chunks": 1 + (one == "dualpipe-v")})
                for one in ("naive", "gpipe", "zb-h2", "dualpipe", "dualpipe-v")
            ),
        ]
    ),
]


def name(value):
    if hasattr(value, "family"):
        return value.name
    return "-".join(f"{k}{v}" if isinstance(v, int) else str(v) for k, v in value.items())


@pytest.mark.parametrize(("model", "axes", "choices"), MESHES, ids=name)
def test_one_axis_and_three_at_once(model, axes, choices):
    found = run(model, strategy_of(axes, **choices))
    assert_equal(found, on_one_device(model))
    if choices.get("gradient_sync") != "bucketed":
        assert found.compiled == found.derived


@pytest.mark.parametrize(("model", "axes", "choices"), PIPELINES, ids=name)
def test_stages_beside_other_axes(model, axes, choices):
    strategy = strategy_of(axes, num_microbatches=4 if "data" not in axes or "fsdp" not in axes else 2, **choices)
    found = run(model, strategy)
    assert_equal(found, on_one_device(model))
    sent = [c for c in collectives(found.hlo, strategy.mesh) if c.kind == "permute"]
    assert any(c.axes == ("pipeline",) for c in sent)
    assert not any(c.in_conditional for c in sent), "a permute in a branch is silently wrong on emulated devices"


def test_buckets_send_the_same_bytes_in_fewer_sums():
    small, large = (
        run(MODEL, strategy_of({"data": 2}, zero=0, gradient_sync="bucketed", bucket_bytes=size)).compiled
        for size in (10_000, 10**9)
    )
    key = ("all_reduce", ("data",))
    naive = run(MODEL, strategy_of({"data": 2}, zero=0, gradient_sync="naive")).compiled[key]
    assert small[key].full_bytes == large[key].full_bytes == naive.full_bytes
    # one for all weights, beside the loss and the norm
    assert large[key].num_arrays == 3 < small[key].num_arrays < naive.num_arrays


def documents_batch():
    """Rows of two documents each, the last position of the first without a label."""
    cut = np.arange(SEQ_LEN) >= 6
    rows = {n: np.asarray(a).copy() for n, a in batch().items()}
    rows["documents"] = np.broadcast_to(cut.astype(np.int32), (BATCH_SEQS, SEQ_LEN))
    rows["positions"] = np.broadcast_to(np.where(cut, np.arange(SEQ_LEN) - 6, np.arange(SEQ_LEN)), cut.shape)
    rows["positions"] = np.broadcast_to(rows["positions"], (BATCH_SEQS, SEQ_LEN)).astype(np.int32)
    rows["labels"][:, 5] = -1
    return rows


DOCUMENTS = ProgramOptions(documents=True, z_loss=1e-2)


@pytest.fixture(scope="module")
def documents_on_one_device():
    given = documents_batch()
    one = run(MODEL, strategy_of({}), options=DOCUMENTS, given=given)
    plain = run(MODEL, strategy_of({}), given={n: given[n] for n in ("tokens", "labels")})
    assert abs(plain.loss / one.loss - 1) > 1e-4, "documents and the z-loss change nothing"
    return one


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gather", "ring", "ulysses"])
def test_documents_and_the_z_loss_on_a_mesh(way, documents_on_one_device):
    strategy = strategy_of({"data": 2, "context": 2, "tensor": 2}, context_attention=way)
    assert_equal(run(MODEL, strategy, options=DOCUMENTS, given=documents_batch()), documents_on_one_device)
