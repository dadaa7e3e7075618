"""Prefill and generation with a cache against the forward pass without one; every mesh against one device."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation import quantised_weights
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import CannotRunError, InputError
from meshwright.hlo.collectives import collectives
from meshwright.nn.quantisation import stored_params
from meshwright.parallel.generation.generate_step import GenerateStep
from meshwright.spec.strategy import held_dims
from tests.parallel.generate_cases import (
    DEFAULT,
    FAMILIES,
    LENGTHS,
    LLAMA,
    MAX_LEN,
    NUM_STEPS,
    Run,
    assert_close,
    dequantise_params,
    float_params,
    rows_of,
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
            ("llama", {"context": 8}, "positions", {}),
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
    if name == "llama" and not options:
        assert_collectives_are_derived(step)


def _written(cache: np.ndarray) -> np.ndarray:
    """Slots of a row's own tokens: what padding leaves behind them is nobody's business."""
    last = np.minimum(LENGTHS + NUM_STEPS, cache.shape[2])
    written = np.arange(cache.shape[2]) < last[:, None]
    return np.where(written.reshape(1, *written.shape, *[1] * (cache.ndim - 3)), cache, 0)


def assert_collectives_are_derived(step: GenerateStep) -> None:
    mesh = step.strategy.mesh
    for length, derived in (
        (step.padded_length(int(LENGTHS.max())), step.prefill_declared),
        (0, step.generate_declared),
    ):
        found = compiled_traffic(collectives(step.compiled(length).as_text(), mesh), mesh)
        dims = {**held_dims(step.model.dims, mesh), "B": step.batch_seqs, "T": length or 1, "S": step.max_len}
        expected = derived_traffic(derived, dims, mesh, num_microbatches=1, width=4)
        assert found == expected
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
    step = step_of(replace(FAMILIES[name], num_layers=4), axes, **options)
    mesh = step.strategy.mesh
    dims = {**step.model.dims, "B": step.batch_seqs, "S": step.max_len}
    for length, derived in ((16, step.prefill_declared), (0, step.generate_declared)):
        tokens = step.batch_seqs * (length or 1)
        # an expert has slots for its mean share of the choices
        slots = tokens * step.model.experts_per_token // max(step.model.num_experts, 1)
        sizes = {**dims, "T": length or 1, "C": slots}
        expected = derived_traffic(derived, sizes, mesh, num_microbatches=1, width=4)
        assert compiled_traffic(collectives(step.compiled(length).as_text(), mesh), mesh) == expected


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
    quantised = jax.jit(lambda given: stored_params(model, given, dtype))(params)
    step = step_of(model, {"data": 2, "tensor": 2}, weights=dtype)
    whole = dequantise_params(model, dtype, quantised)
    assert_close(with_cache(step, params, num_steps=1).logits, without_cache(model, whole, num_steps=1))
    placed = step.place(params)
    assert {name: array.shape for name, array in placed.items()} == {n: s.shape for n, s in step.param_shapes.items()}
    for weight, array in placed.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(quantised[weight]))
    heads = next(weight for weight in params if weight.startswith("wo"))
    width = DTYPE_BYTES[quantised_weights(model, dtype)[heads][0].dtype]
    assert placed[heads].addressable_shards[0].data.nbytes == width * params[heads].size / 2


def test_an_int8_cache_holds_what_a_float_one_holds_but_for_rounding():
    model = FAMILIES["llama"]
    found = with_cache(step_of(model, {}, cache_dtype="int8"), float_params(model)).cache
    exact = on_one_device("llama").cache
    for name in ("cache_k", "cache_v"):
        scale = found[f"{name}_scale"][0, ..., None]
        error = _written((found[name][0].astype(np.float32) * scale - exact[name][0])[None])
        half = 0.5 + 127 * 2.0**-23  # x / scale and whole * scale are rounded to float32 too
        assert np.all(np.abs(error[0]) <= half * scale), "the first layer's keys come from the same stream"
        assert np.abs(error).max() > 0
        assert 4 * found[name].nbytes == exact[name].nbytes


def test_each_program_is_compiled_once():
    model = FAMILIES["llama"]
    step = step_of(model, {})
    params, rows = step.place(float_params(model)), rows_of(model)
    cache = step.init_cache()
    for length in (9, 12, 16):
        padded = step.padded_length(length)
        logits, cache = step.prefill(params, cache, rows[:, :padded], np.full(len(LENGTHS), length))
        for count in range(2):
            tokens = jnp.argmax(logits, axis=-1) if count else rows[:, length]
            logits, cache = step.generate(params, cache, tokens, np.full(len(LENGTHS), length + count))
    assert len(step._compiled) == 2


def test_lengths_of_prompts_are_few():
    step = step_of(LLAMA, {})
    assert [step.padded_length(n) for n in (1, 8, 9, 16, 17, 24)] == [8, 8, 16, 16, 24, 24]
    split = step_of(LLAMA, {"tensor": 4, "context": 2})
    assert [split.padded_length(n) for n in (1, 9, 24)] == [8, 16, 24]


@pytest.mark.parametrize(
    ("axes", "options", "error", "message"),
    [
        ({"tensor": 6}, {}, InputError, r"N=8 of .* does not divide by tensor=6"),
        ({"pipeline": 2}, {}, CannotRunError, "pipeline=2 trains but does not generate"),
        ({"data": 8}, {}, InputError, "B=4 of .* does not divide by data=8"),
        ({}, {"cache_dtype": "fp9"}, InputError, "cache_dtype is 'fp9'. Give bf16, fp32, int8 or fp8"),
        ({}, {"weights": "int5"}, InputError, "weights is 'int5'. Give as they are, int8, fp8 or int4"),
    ],
)
def test_what_cannot_generate_is_refused(axes, options, error, message):
    with pytest.raises(error, match=message):
        step_of(LLAMA, axes, **options)


def test_learned_positions_end():
    model = replace(FAMILIES["gpt2"], max_positions=MAX_LEN - 1)
    with pytest.raises(InputError, match="has 23 learned positions, and 24 are asked for"):
        step_of(model, {})


def test_prompts_that_do_not_fit_are_refused():
    step, rows = step_of(LLAMA, {}), np.zeros((4, 32), np.int32)
    for tokens, lengths in ((rows, [1, 1, 1, 32]), (rows[:, :8], [0, 1, 1, 1]), (rows[:, :8], [9, 1, 1, 1])):
        with pytest.raises(InputError, match="the cache holds 24"):
            step.prefill({}, {}, tokens, np.array(lengths))
    with pytest.raises(InputError, match="3 prompts with 3 lengths; the step takes 4"):
        step.prefill({}, {}, rows[:3, :8], np.ones(3, int))
