"""Layers with several residual streams: meshes and remat policies beside one device, engines, and what is refused."""

from functools import lru_cache, partial

import pytest
from msgspec.structs import replace

from meshwright.core.errors import InputError
from meshwright.nn.quantisation import stored_params
from meshwright.plan.serving.fleet import fleet_of
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import Lora
from meshwright.spec.weights import weight_table
from tests.nn.families import CONFIGS, FAMILIES
from tests.parallel import generate_cases
from tests.parallel.cases import assert_equal
from tests.parallel.test_packed_layouts import assert_collectives_are_derived
from tests.parallel.test_shared_keys import GRID, run

MODEL = FAMILIES["gemma3n"]
SCALE = 0.1
"""Of weights: streams that mix by larger ones carry the rounding of each into all others."""


alone = lru_cache(partial(run, {}, MODEL, SCALE, remat="none"))


@pytest.mark.parametrize(("axes", "choices"), GRID, ids=str)
def test_meshes_and_policies_give_what_one_device_does(axes, choices):
    found = run(axes, MODEL, SCALE, **choices)
    assert_equal(found, alone())
    if axes == {"tensor": 2} and choices["remat"] == "none":
        assert found.compiled == found.derived


def test_adapters_leave_streams_outside_the_layers_as_they_are():
    model = replace(MODEL, lora=Lora(rank=4, base="int8"))
    dtypes = {row.name: row.dtype for row in weight_table(model)}
    assert (dtypes["stream_in"], dtypes["layers.laurel_in"], dtypes["layers.mix_predict"]) == ("", "int8", "")


@pytest.mark.slow
def test_adapters_are_the_same_on_a_mesh():
    model = replace(MODEL, lora=Lora(rank=4))
    assert_equal(run({"tensor": 2}, model, SCALE), run({}, model, SCALE))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"])
def test_quantised_weights_are_products_with_what_they_stand_for(dtype):
    model = replace(generate_cases.with_groups(MODEL), d_ff_wide=256) if dtype == "int4" else MODEL
    params = generate_cases.float_params(model)
    whole = generate_cases.dequantise_params(model, dtype, stored_params(model, params, dtype))
    step = generate_cases.step_of(model, {"data": 2, "tensor": 2}, weights=dtype)
    generate_cases.assert_close(
        generate_cases.with_cache(step, params, num_steps=1).logits,
        generate_cases.without_cache(model, whole, num_steps=1),
    )


LAYOUTS = [
    ({"data": 2, "tensor": 2}, "prompts"),
    pytest.param({"tensor": 2, "context": 2}, "sequences", marks=pytest.mark.slow),
    pytest.param({"tensor": 2, "context": 2}, "positions", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("axes", "layout"), LAYOUTS)
def test_no_layout_of_engines_changes_anything(axes, layout):
    step, params = generate_cases.step_of(MODEL, axes, layout=layout), generate_cases.float_params(MODEL)
    generate_cases.assert_close(
        generate_cases.with_cache(step, params).logits, generate_cases.without_cache(MODEL, params)
    )
    assert_collectives_are_derived(step)


def test_rows_of_streams_are_whole():
    with pytest.raises(InputError, match="needs D whole"):
        generate_cases.step_of(MODEL, {"tensor": 2, "context": 2}, layout="widths").derived  # noqa: B018
    assert "widths" not in fleet_of(load_model("gemma3n-e4b"), parse_cluster("v5e:4x4")).layout


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"activation_sparsity_pattern": [0.9, 0.5, 0, 0, 0, 0]},
            "activation_sparsity_pattern has 0.5 and 0.9. Only one",
        ),
        ({"activation_sparsity_pattern": [0.9] * 5}, "activation_sparsity_pattern has 5 entries for"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "gate_sparsity=1 must be at least 0 and below 1"),
        ({"vocab_size_per_layer_input": 65}, "vocab_size_per_layer_input=65 exceeds vocab_size=64"),
        ({"altup_num_inputs": 1, "altup_active_idx": 0}, "altup_active_idx=0 of altup_num_inputs=1. Use 2 streams"),
        ({"altup_active_idx": 3}, "altup_active_idx=3 of altup_num_inputs=3. Use 2 streams"),
        ({"intermediate_size": [48, 48, 48, 48, 64, 96]}, "intermediate_size has 3 widths"),
        ({"intermediate_size": [48, 48, 48, 48, 64]}, "intermediate_size has 5 entries for"),
    ],
)
def test_what_no_layer_computes_is_refused_in_a_line(keys, message):
    with pytest.raises(InputError, match=message) as caught:
        model_from_config(CONFIGS["gemma3n"] | keys)
    assert "\n" not in str(caught.value)


def test_a_list_of_equal_widths_is_one_width():
    models = [model_from_config(CONFIGS["gemma3n"] | {"intermediate_size": size}, "x") for size in (48, [48] * 6)]
    assert models[0] == models[1]
    assert (MODEL.d_ff, MODEL.d_ff_wide, MODEL.wide_layers) == (48, 64, (1, 3, 5))
