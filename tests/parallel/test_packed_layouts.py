"""Packed steps on every mesh and in every layout against the forward pass without a cache, and their collectives."""

from functools import lru_cache

import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.core.errors import CannotRunError, InputError
from meshwright.hlo.collectives import collectives
from meshwright.nn.quantisation import stored_params
from meshwright.parallel.generation.packed_step import PackedShape, PackedStep
from meshwright.spec.strategy import held_dims
from tests.parallel.generate_cases import (
    DEFAULT,
    FAMILIES,
    LLAMA,
    MAX_LEN,
    Run,
    assert_close,
    dequantise_params,
    float_params,
    step_of,
    with_cache,
    with_groups,
    without_cache,
)
from tests.traffic import compiled_traffic, derived_traffic


def slow_unless(name: str, fast: tuple[str, ...]) -> object:
    return name if name in fast else pytest.param(name, marks=pytest.mark.slow)


@lru_cache(maxsize=2)
def on_one_device(name: str) -> Run:
    return with_cache(step_of(FAMILIES[name], {}), float_params(FAMILIES[name]))


@lru_cache(maxsize=2)
def uncached(name: str) -> np.ndarray:
    return without_cache(FAMILIES[name], float_params(FAMILIES[name]))


@pytest.mark.parametrize("name", [slow_unless(name, DEFAULT) for name in FAMILIES])
def test_a_cache_changes_nothing(name):
    assert_close(on_one_device(name).logits, uncached(name))


MESHES = [
    ("llama", {"data": 2, "tensor": 2}),
    pytest.param("llama", {"fsdp": 2, "tensor": 4}, marks=pytest.mark.slow),
    pytest.param("llama", {"data": 2, "fsdp": 2, "context": 2}, marks=pytest.mark.slow),
    ("mixtral", {"expert": 2, "tensor": 2}),
    pytest.param("mixtral", {"data": 2, "expert": 2, "context": 2}, marks=pytest.mark.slow),
    pytest.param("gpt_oss", {"fsdp": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param("gemma2", {"fsdp": 2, "context": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param("deepseek_v2", {"fsdp": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param("gpt2", {"data": 4, "tensor": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "axes"), MESHES)
def test_no_mesh_changes_anything(name, axes):
    step = step_of(FAMILIES[name], axes)
    assert_close(with_cache(step, float_params(FAMILIES[name])).logits, uncached(name))
    if axes == {"data": 2, "tensor": 2}:
        assert_collectives_are_derived(step)


ENGINES = [
    ("llama", {"tensor": 2, "context": 2}, "sequences", {}),
    ("llama", {"tensor": 2, "context": 2}, "positions", {}),
    ("llama", {"tensor": 2, "context": 2}, "widths", {}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("llama", {"data": 2, "tensor": 2, "context": 2}, "sequences", {}),
            ("llama", {"context": 8}, "positions", {"page_len": 8}),
            ("gpt_oss", {"tensor": 2, "context": 2}, "positions", {}),
            ("gpt_oss", {"tensor": 2, "context": 2}, "sequences", {}),
            ("gemma2", {"tensor": 2, "context": 2}, "positions", {}),
            ("gemma2", {"tensor": 2, "context": 2}, "widths", {}),
            ("deepseek_v2", {"context": 4}, "sequences", {}),
            ("deepseek_v2", {"tensor": 2, "context": 2}, "positions", {}),
            ("mixtral", {"expert": 2, "context": 2}, "sequences", {}),
            ("mixtral", {"expert": 2, "context": 4}, "positions", {}),
        )
    ),
]


@pytest.mark.parametrize(("name", "axes", "layout", "options"), ENGINES)
def test_no_layout_of_engines_changes_anything(name, axes, layout, options):
    step = step_of(FAMILIES[name], axes, layout=layout, **options)
    assert_close(with_cache(step, float_params(FAMILIES[name])).logits, uncached(name))
    if name == "llama":
        assert_collectives_are_derived(step)


def assert_collectives_are_derived(step: PackedStep) -> None:
    mesh = step.strategy.mesh
    for derived, longest in ((step.derived_prompts, 16), (step.derived, 1)):
        rows = 64 if longest > 1 else 4 * step.num_owners
        text = step.compiled(PackedShape(rows, rows, rows, longest)).as_text()
        dims = {**held_dims(step.model.dims, mesh), "B": rows, "O": rows, "T": 1}
        # an expert has slots for its mean share of the choices
        dims["C"] = rows * step.model.experts_per_token // max(step.model.num_experts, 1)
        expected = derived_traffic(derived, dims, mesh, num_microbatches=1, width=4, layer_by_layer=False)
        assert compiled_traffic(collectives(text, mesh), mesh) == expected
        assert expected, "a mesh of several axes communicates"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("llama", {"fsdp": 2, "tensor": 2}, {"weights": "int8", "cache_dtype": "int8"}),
        ("mixtral", {"data": 2, "expert": 2, "tensor": 2}, {}),
        ("deepseek_v2", {"data": 2, "tensor": 2}, {"weights": "int8", "cache_dtype": "int8"}),
    ],
)
def test_compiled_collectives_are_the_derived_ones(name, axes, options):
    assert_collectives_are_derived(step_of(replace(FAMILIES[name], num_layers=4), axes, **options))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) == ("llama", "fp8") else pytest.mark.slow)
        for name in FAMILIES
        for dtype in ("int8", "fp8", "int4")
    ],
)
def test_quantised_weights_are_products_with_what_they_stand_for(name, dtype):
    # float weights that the dtype holds but for rounding: one device's forward pass over what the values stand for
    model = with_groups(FAMILIES[name]) if dtype == "int4" else FAMILIES[name]
    params = float_params(model)
    whole = dequantise_params(model, dtype, stored_params(model, params, dtype))
    step = step_of(model, {"data": 2, "tensor": 2}, weights=dtype)
    assert_close(with_cache(step, params, num_steps=1).logits, without_cache(model, whole, num_steps=1))


def test_an_int8_cache_holds_what_a_float_one_holds_but_for_rounding():
    model = FAMILIES["llama"]
    found = with_cache(step_of(model, {}, cache_dtype="int8"), float_params(model)).cache
    exact = on_one_device("llama").cache
    for name in ("cache_k", "cache_v"):
        scale = found[f"{name}_scale"][0, ..., None]
        error = found[name][0].astype(np.float32) * scale - exact[name][0]
        half = 0.5 + 127 * 2.0**-23  # x / scale and whole * scale are rounded to float32 too
        assert np.all(np.abs(error) <= half * scale), "the first layer's keys come from the same stream"
        assert np.abs(error).max() > 0
        assert 4 * found[name].nbytes == exact[name].nbytes


@pytest.mark.parametrize(
    ("axes", "options", "error", "message"),
    [
        ({"tensor": 6}, {}, InputError, r"N=8 of .* does not divide by tensor=6"),
        ({"pipeline": 2}, {}, CannotRunError, "pipeline=2 trains but does not generate"),
        ({"data": 8}, {}, InputError, "max_seqs=4 and num_pages=24 must divide over the 8 shards of sequences"),
        ({}, {"cache_dtype": "fp9"}, InputError, "cache dtype 'fp9' is not known"),
        ({}, {"weights": "int5"}, InputError, "weight dtype 'int5' is not known"),
    ],
)
def test_what_cannot_generate_is_refused(axes, options, error, message):
    with pytest.raises(error, match=message):
        step_of(LLAMA, axes, **options)


def test_learned_positions_end():
    model = replace(FAMILIES["gpt2"], max_positions=MAX_LEN - 1)
    with pytest.raises(InputError, match="has 23 learned positions; give at most that, not max_len=24"):
        step_of(model, {})
