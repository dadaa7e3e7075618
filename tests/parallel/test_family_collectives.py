"""Families with ops of their own, on meshes: values and gradients of one device, collectives as derived."""

import pytest
from msgspec.structs import replace

from tests.nn.families import FAMILIES
from tests.parallel.cases import assert_equal, on_one_device, run, strategy_of

MODELS = {
    "olmo2": replace(FAMILIES["olmo2"], num_layers=4, rope_scaling=None),
    "granite": replace(FAMILIES["granite"], num_layers=4, tied_embeddings=False),
    "glm4": replace(FAMILIES["glm4"], num_layers=4),
    "smollm3": replace(
        FAMILIES["smollm3"], num_layers=4, unrotated_layers=(1, 3), sliding_layers=(), tied_embeddings=False
    ),
    "deepseek_v3": replace(FAMILIES["deepseek_v3"], num_layers=4, dense_layers=()),
    "llama4": replace(FAMILIES["llama4"], sliding_window=5),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("olmo2", {"tensor": 2}),
        *((name, {"fsdp": 2, "tensor": 2}) for name in MODELS),
        ("olmo2", {"pipeline": 2, "tensor": 2}),
        ("deepseek_v3", {"expert": 2, "tensor": 2}),
        ("llama4", {"context": 4}),
        ("llama4", {"expert": 2, "context": 2}),
    ],
)
def test_a_mesh_gives_what_one_device_does_and_sends_what_is_derived(family, axes):
    # the compiler shares rounds of a ring that run again
    model, ring = MODELS[family], {"context_attention": "ring", "remat": "none"} if "context" in axes else {}
    found = run(model, strategy_of(axes, num_microbatches=2 if "pipeline" in axes else 1, **ring))
    assert_equal(found, on_one_device(model))
    if "pipeline" not in axes:
        assert found.compiled == found.derived
