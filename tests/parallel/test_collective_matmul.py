"""Whole training steps with collective matmuls: one device's numbers, and exactly the derived collectives."""

import msgspec
import numpy as np
import pytest

from meshwright.algebra.generation.program import Storage, weight_dtype
from meshwright.hlo.collectives import collectives
from meshwright.nn.weights import init_params
from meshwright.parallel.generation.packed_step import PackedShape, PackedStep
from meshwright.serve.offline.slots import SlotEngine
from tests.parallel.cases import DEEP, MOE, RELATIVE, assert_equal, on_one_device, run, strategy_of
from tests.parallel.small import MODEL

GQA = msgspec.structs.replace(MODEL, name="gqa", num_kv_heads=4)
DEEP_GQA = msgspec.structs.replace(DEEP, name="deep-gqa", num_kv_heads=4)
CASES = [
    (GQA, {"data": 2, "fsdp": 2, "tensor": 2}, {"collective_matmul": "one-way", "remat": "none"}),
]
MORE = [
    (GQA, {"tensor": 4}, {"collective_matmul": "two-way", "remat": "block"}),
    (GQA, {"tensor": 2}, {"collective_matmul": "one-way", "remat": "full"}),
    (GQA, {"tensor": 2}, {"collective_matmul": "two-way", "remat": "selective"}),
    (GQA, {"tensor": 4}, {"collective_matmul": "one-way", "sequence_parallel": False}),
    (GQA, {"tensor": 4}, {"collective_matmul": "two-way", "sequence_parallel": False, "remat": "none"}),
    (GQA, {"context": 2, "tensor": 4}, {"collective_matmul": "two-way"}),
    (
        GQA,
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"collective_matmul": "two-way", "num_microbatches": 2, "gradient_sync": "naive"},
    ),
    (DEEP_GQA, {"fsdp": 4, "tensor": 2}, {"collective_matmul": "two-way", "prefetch": True, "remat": "none"}),
    (DEEP_GQA, {"fsdp": 2, "tensor": 4}, {"collective_matmul": "one-way", "remat": "every-2", "zero": 1}),
    (MOE, {"data": 2, "expert": 2, "tensor": 2}, {"collective_matmul": "two-way", "remat": "selective"}),
]
PIPELINES = [
    (DEEP_GQA, {"pipeline": 2, "data": 2, "tensor": 2}, {"schedule": "1f1b", "collective_matmul": "two-way"}),
    (DEEP_GQA, {"pipeline": 2, "fsdp": 2, "tensor": 2}, {"schedule": "zb-h1", "collective_matmul": "one-way"}),
]


@pytest.mark.parametrize(
    ("model", "axes", "choices"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_a_step(model, axes, choices):
    """One device's numbers, the derived collectives, and moves over ``tensor`` among them."""
    found = run(model, strategy_of(axes, **choices))
    assert_equal(found, on_one_device(model))
    assert found.compiled == found.derived
    assert found.compiled["permute", ("tensor",)].num_arrays > 0


@pytest.mark.slow
@pytest.mark.parametrize(("model", "axes", "choices"), PIPELINES)
def test_stages_of_a_pipeline_never_meet_in_a_branch(model, axes, choices):
    strategy = strategy_of(axes, num_microbatches=4, **choices)
    found = run(model, strategy)
    assert_equal(found, on_one_device(model))
    moved = [c for c in collectives(found.hlo, strategy.mesh) if c.kind == "permute"]
    assert moved
    assert not any(c.in_conditional for c in moved), "a permute in a branch is silently wrong on emulated devices"
    assert not any("tensor" in c.axes for c in moved), "stages come to their rounds at different times"


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["as they are", "int8", "int4"])
def test_generation_gives_the_same_logits(weights):
    """A prompt's rows are split by position, one more token's stream is whole: all three forms."""
    logits, model = [], msgspec.structs.replace(GQA, d_ff=256)
    for ways in ("none", "two-way"):
        strategy = strategy_of({"tensor": 4}, collective_matmul=ways)
        storage = Storage(page_len=16, cache_dtype="fp32", weights=weight_dtype(weights))
        step = PackedStep(model, strategy, max_len=16, max_seqs=1, storage=storage)
        params, engine = step.place(init_params(model, 0)), SlotEngine(step)
        prefix = engine.prefill(params, range(8))
        state = engine.insert(prefix, engine.init_decode_state(), 0)
        state.tokens[:] = 1
        _, second = engine.generate(params, state)
        logits.append(np.stack([prefix.logits, second[0]]))
        found = {c.kind for c in collectives(step.compiled(PackedShape(1, 1, 1, 1)).as_text(), strategy.mesh)}
        assert ("permute" in found) == (ways != "none")
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=RELATIVE * np.abs(logits[0]).max())
