"""Key and value heads that ``tensor`` does not divide are repeated: losses, gradients and tokens are one device's."""

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from meshwright.algebra.generation.cache import cache_table
from meshwright.core.errors import CannotRunError
from meshwright.parallel.train_step import TrainStep
from meshwright.spec.strategy import held_dims
from tests.parallel.cases import assert_equal, on_one_device, run, strategy_of
from tests.parallel.generate_cases import LLAMA, assert_close, float_params, step_of, with_cache, without_cache
from tests.parallel.small import MODEL
from tests.parallel.test_packed_layouts import assert_collectives_are_derived


def heads(queries: int, keys: int, **changes: object):
    return msgspec.structs.replace(
        MODEL, name=f"heads-{queries}-{keys}", num_heads=queries, num_kv_heads=keys, **changes
    )


def test_heads_are_repeated_to_the_least_number_that_devices_divide():
    held = held_dims({"V": 8, "K": 6}, {"tensor": 4, "context": 3})
    assert (held["Kt"], held["Kct"]) == (12, 12)
    found = held_dims({"V": 8, "K": 2}, {"tensor": np.array([1.0, 2.0, 4.0]), "context": np.array([2.0, 2.0, 8.0])})
    assert (found["Kt"].tolist(), found["Kct"].tolist()) == ([2, 2, 4], [2, 4, 32])


SLOW = [
    (heads(8, 1), {"context": 2, "tensor": 4}, {"context_attention": "ulysses"}),
    (heads(8, 1), {"context": 8}, {"context_attention": "ulysses"}),
    (heads(8, 1), {"tensor": 8}, {"sequence_parallel": False}),
    (heads(12, 6), {"tensor": 4, "fsdp": 2}, {"remat": "none"}),
    (heads(8, 2, qkv_bias=True), {"tensor": 4, "data": 2}, {"remat": "full", "num_microbatches": 2}),
    (heads(8, 2, qk_norm=True), {"tensor": 4, "fsdp": 2}, {"zero": 1}),
]
CASES = [
    pytest.param(heads(8, 1), {"tensor": 2, "fsdp": 2}, {"remat": "selective"}, marks=pytest.mark.slow),
    (heads(8, 2), {"context": 2, "tensor": 4}, {"context_attention": "ring", "remat": "selective"}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.parametrize(("model", "axes", "choices"), CASES)
def test_a_step_is_that_of_one_device(model, axes, choices):
    found = run(model, strategy_of(axes, **choices))
    assert_equal(found, on_one_device(model))
    assert found.compiled == found.derived


@pytest.mark.slow
def test_stages_repeat_heads_too():
    model = heads(8, 1)
    assert_equal(run(model, strategy_of({"pipeline": 2, "tensor": 2}, num_microbatches=2)), on_one_device(model))


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"tensor": 8}, {}),
        pytest.param({"data": 2, "tensor": 4}, {}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "tensor": 4}, {"weights": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_a_device_caches_the_heads_of_its_own_queries(axes, options):
    keys = axes["tensor"] // 2
    model = msgspec.structs.replace(LLAMA, num_kv_heads=keys)
    step, params = step_of(model, axes, **options), float_params(model)
    found = with_cache(step, params)
    if "weights" not in options:
        assert_close(found.logits, without_cache(model, params))
    else:
        assert_close(found.logits, with_cache(step_of(model, {"data": 2}, **options), params).logits)
    assert_collectives_are_derived(step)
    for row in step.table:
        assert row.shape[2] == axes["tensor"]
    (one,) = {row.shape[2] for row in cache_table(model, batch_seqs=4, max_len=24)}
    assert one == keys


def test_what_repeats_nothing():
    model = heads(8, 2)
    with pytest.raises(CannotRunError, match="must divide the vocabulary of 64 and the 2 kv heads, and is 4"):
        TrainStep(model, strategy_of({"tensor": 4}), form="gspmd")
    split = TrainStep(model, strategy_of({"tensor": 2}))
    assert not any("repeat" in step.op for step, _ in split.declared.steps())
    assert jnp.float32 == split.dtype
