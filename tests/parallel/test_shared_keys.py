"""Layers that read the keys and values of an earlier one: meshes and remat policies beside one device, and caches."""

from functools import lru_cache, partial

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.cache import cache_table, sequence_bytes
from meshwright.algebra.generation.program import Storage
from meshwright.algebra.transformer import layer_names
from meshwright.core.errors import CannotRunError, InputError
from meshwright.cost.formulas.accounting import kv_cache_bytes
from meshwright.cost.setting import Setting
from meshwright.cost.train_step import estimate_step
from meshwright.nn.hf.format import checked_parts, stored_parts
from meshwright.nn.weights import param_shapes
from meshwright.parallel.train_step import State, TrainStep
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.job import Job
from meshwright.spec.model import Lora
from meshwright.spec.weights import weight_table
from tests.nn.families import CONFIGS, FAMILIES, WINDOW
from tests.parallel.cases import assert_equal, keep_gradients, run_step, strategy_of
from tests.tier import sampled

LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
MODEL = model_from_config(
    CONFIGS["gemma4"]
    | {"num_hidden_layers": 8, "num_kv_shared_layers": 5, "use_double_wide_mlp": True, "num_key_value_heads": 2}
    | {"layer_types": [*LAYERS, "full_attention", "sliding_attention", "full_attention"]},
    "shared",
)


@lru_cache
def params(model=MODEL, scale=0.2):
    """Weights of which none is zero."""
    draw = np.random.default_rng(2).normal
    return {name: draw(scale=scale, size=array.shape).astype(np.float32) for name, array in param_shapes(model).items()}


def run(axes, model=MODEL, scale=0.2, **choices):
    step = TrainStep(model, strategy_of(axes, **choices), optimizer=keep_gradients())
    placed = jax.device_put(step.from_canonical(params(model, scale)), step.state_shardings.params)
    return run_step(step, state=State(placed, step.init_optimizer(placed)))


alone = lru_cache(partial(run, {}, remat="none"))
GRID = [
    ({"tensor": 2}, {"remat": "none"}),
    *sampled(
        [
            ({"fsdp": 2, "tensor": 2}, {"remat": "selective"}),
            ({"tensor": 2}, {"remat": "block"}),
            ({"data": 2}, {"remat": "sqrt"}),
            ({"data": 2}, {"remat": "every-2", "num_microbatches": 2}),
            ({"fsdp": 2}, {"remat": "recompute-2"}),
            ({"context": 2, "fsdp": 2}, {"context_attention": "ring"}),
            ({"context": 2, "tensor": 2}, {"context_attention": "ulysses", "remat": "none"}),
        ]
    ),
]
MORE = [
    ({"tensor": 4}, {"remat": "block"}),
    ({"fsdp": 2}, {"prefetch": True}),
    ({"context": 2, "tensor": 2}, {"remat": "none"}),
]


@pytest.mark.parametrize(("axes", "choices"), [*GRID, *sampled(MORE)], ids=str)
def test_meshes_and_policies_give_what_one_device_does(axes, choices):
    found = run(axes, **choices)
    assert_equal(found, alone())
    if axes == {"tensor": 2}:  # others gather weights, which straight code does once for both passes
        assert found.compiled == found.derived


def test_adapters_stand_beside_weights_of_two_widths():
    model = replace(FAMILIES["gemma4-shared"], lora=Lora(rank=4))
    names = ("layers.wk_lora_a", "layers.wk_lora_b", "layers.wv_lora_b")
    rows = [row for row in weight_table(model) if row.name in names]
    assert {(row.name, row.layers) for row in rows} == {(name, layers) for name in names for layers in ((0, 2), (1,))}
    assert_equal(run({"tensor": 2}, model), run({}, model))


def test_pipelines_are_refused_in_a_line():
    with pytest.raises(CannotRunError, match="layers share keys or embeddings does not run in a pipeline"):
        TrainStep(MODEL, strategy_of({"pipeline": 2}))


def test_layers_read_the_last_of_their_kind_with_keys_of_its_own():
    assert [MODEL.kv_source(layer) for layer in range(8)] == [0, 1, 2, 1, 2, 1, 2, 1]
    assert layer_names(MODEL)[:4] == ("layer_local", "layer_source", "layer_source_local", "layer_shared")
    rows = [row for row in weight_table(MODEL) if row.name in ("layers.wk", "layers.wv", "layers.k_norm")]
    assert {layer for row in rows for layer in row.layers} == {0, 1, 2}
    widths = {row.shape[1]: row.layers for row in weight_table(MODEL) if row.name == "layers.w_up"}
    assert widths == {48: (0, 1, 2), 96: (3, 4, 5, 6, 7)}


def test_every_kind_of_layers_needs_one_with_keys_of_its_own():
    with pytest.raises(InputError, match="num_shared_kv_layers=7 of 8 leaves a kind of layers without keys and values"):
        replace(MODEL, num_shared_kv_layers=7)


def test_caches_are_of_layers_with_keys_of_their_own():
    table = cache_table(MODEL, batch_seqs=2, max_len=16)
    assert {row.name: row.num_layers for row in table if "_k" in row.name} == {
        "cache_k_local": 1,
        "cache_k_source": 1,
        "cache_k_source_local": 1,
    }
    near, full = 2 * 2 * 12, 2 * 1 * 20
    assert kv_cache_bytes(MODEL, 16) == 2 * (16 * full + 2 * 6 * near)
    assert sequence_bytes(MODEL, 16, Storage()) == kv_cache_bytes(MODEL, 16)


def test_stored_keys_of_layers_that_read_those_of_others_are_left_out():
    tensors = {part.tensor: np.zeros(part.shape, np.float32) for part in stored_parts(MODEL)}
    own = "model.layers.{}.self_attn.{}.weight"
    beside = {own.format(layer, name): np.ones(3) for layer in (3, 7) for name in ("k_proj", "v_proj", "k_norm")}
    assert checked_parts(MODEL, tensors | beside)
    with pytest.raises(InputError, match=r"has model\.layers\.3\.self_attn\.o_norm\.weight, which shared has no place"):
        checked_parts(MODEL, tensors | {own.format(3, "o_norm"): np.ones(3)})


@pytest.mark.parametrize("case", ["gemma4-shared", "gemma4-moe"])
def test_steps_are_priced_with_the_caches_that_they_have(case):
    job = Job(kind="decode", batch_seqs=4, seq_len=WINDOW)  # which windows hold whole
    found = estimate_step(Setting(FAMILIES[case], parse_cluster("h100:1"), job), strategy_of({}))
    assert found.step_s > 0
    whole_pages = 16 / WINDOW  # of one page of 16 in every layer that has a cache
    assert found.memory["kv_cache"] == pytest.approx(4 * kv_cache_bytes(FAMILIES[case], WINDOW) * whole_pages)
