"""Packed rows of several sequences, in chunks and one by one: the logits of the forward pass, in any split."""

import itertools
import math
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.program import Storage
from meshwright.algebra.sizes import OpSizes
from meshwright.core.errors import CannotRunError, InputError
from meshwright.nn import cache
from meshwright.nn.quantisation import stored_params
from meshwright.parallel.generation.packed_step import PackedShape, PackedStep
from meshwright.parallel.mesh import abstract_mesh
from meshwright.spec.strategy import GENERATION_RULES, LAYOUTS, Strategy, make_mesh
from tests.parallel.generate_cases import (
    FAMILIES,
    LLAMA,
    MAX_LEN,
    assert_close,
    dequantise_params,
    float_params,
    packed,
    rows_of,
    with_groups,
)
from tests.tier import sampled

PAGE_LEN, NUM_SEQS, NUM_PAGES = 4, 3, 40
WINDOWED = ("mistral", "gpt_oss", "gemma3", "llama4")
STEPS = (
    [(0, 0, 7), (1, 0, 1)],
    [(1, 1, 2), (0, 7, 12), (2, 0, 9)],
    [(2, 9, 10), (0, 12, 13), (1, 2, 3)],
    [(1, 3, 4), (2, 10, 11)],
)
"""Of each step (sequence, from position, to position): a chunk beside one row, decoding beside chunks, decoding."""


def packed_step(model, axes=None, layout="prompts", **options):
    strategy = Strategy(mesh=make_mesh(axes or {}), state=options.pop("state", "fp32"), assignment=LAYOUTS[layout])
    owners = math.prod(
        (axes or {}).get(axis, 1) for axis in LAYOUTS[layout].get("cache", GENERATION_RULES["cache"])["B"]
    )
    storage = Storage(page_len=PAGE_LEN, **{"num_pages": NUM_PAGES, "cache_dtype": "fp32", **options})
    step = PackedStep(model, strategy, max_len=MAX_LEN, max_seqs=-(-NUM_SEQS // owners) * owners, storage=storage)
    assert step.num_owners == owners
    return step


def pages_of(step):
    """The pages of each sequence, among those of its owner, in no order."""
    each, random = NUM_PAGES // step.num_owners, np.random.default_rng(3)
    free = [owner * each + random.permutation(each) for owner in range(step.num_owners)]
    return np.array([free[s % len(free)][s // len(free) * 6 :][:6] for s in range(NUM_SEQS)])


def run(step, params):
    """The logits of each part of `STEPS`, [parts, V]."""
    placed, cache, rows, pages = step.place(params), step.init_cache(), rows_of(step.model), pages_of(step)
    found = []
    for parts in STEPS:
        size, longest = (16, 16) if any(end - start > 1 for _, start, end in parts) else (4, 1)
        given, last = packed(step, parts, rows, pages, size, longest)
        logits, cache = step.step(placed, cache, jnp.zeros(step.max_seqs, jnp.int32), given, longest)
        found.append(np.asarray(logits)[last])
    return np.concatenate(found)


def reference(model, params):
    from tests.logits import logits_fn

    every = np.asarray(jax.jit(logits_fn(model))(params, jnp.asarray(rows_of(model))))
    return np.stack([every[sequence, end - 1] for parts in STEPS for sequence, _, end in parts])


@pytest.mark.parametrize("name", sampled(FAMILIES, "llama"))
def test_every_family_has_the_logits_of_the_forward_pass(name):
    model = FAMILIES[name]
    params = float_params(model)
    assert_close(run(packed_step(model), params), reference(model, params))


@pytest.mark.parametrize("name", ["gemma2", *(pytest.param(x, marks=pytest.mark.slow) for x in WINDOWED)])
def test_layers_with_a_window_keep_their_window(name):
    """Each sequence has four pages for it, of the six that it has in other layers, again and again."""
    model = FAMILIES[name]
    step = packed_step(model, window_pages=4 * NUM_SEQS)
    assert step.has_windows
    shapes = {row.shape[0] for row in step.table}
    assert shapes == ({4 * NUM_SEQS} if name == "mistral" else {NUM_PAGES, 4 * NUM_SEQS})
    params = float_params(model)
    assert_close(run(step, params), reference(model, params))


SPLITS = {
    "heads": ("llama", {"tensor": 4}, "prompts"),
    "experts": ("mixtral", {"expert": 4}, "prompts"),
    "2-D weights": ("llama", {"context": 2, "tensor": 4}, "widths"),
    "latents over sequences": ("deepseek_v2", {"context": 2}, "sequences"),
    "more devices than kv heads": ("llama", {"tensor": 8}, "prompts"),
    "rows, prompts": ("llama", {"data": 2, "context": 2, "tensor": 2}, "prompts"),
    "gathered weights": ("llama", {"fsdp": 4}, "gathered"),
    "caches over sequences": ("llama", {"context": 2, "tensor": 4}, "sequences"),
    "caches over positions": ("llama", {"context": 2, "tensor": 4}, "positions"),
    "2-D weights, windows": ("gemma2", {"context": 4, "tensor": 2}, "widths"),
    "experts, sinks": ("gpt_oss", {"expert": 2, "tensor": 2}, "prompts"),
    "experts, latents": ("deepseek_v3", {"expert": 2, "tensor": 2}, "prompts"),
}


@pytest.mark.parametrize("split", sampled(SPLITS, "experts"))
def test_what_a_plan_splits_gives_the_same(split):
    name, axes, layout = SPLITS[split]
    model = FAMILIES[name]
    params = float_params(model)
    assert_close(run(packed_step(model, axes, layout), params), reference(model, params))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek_v2", marks=pytest.mark.slow)])
def test_pages_in_fp8_have_what_numpy_rounds(name, monkeypatch):
    """Against pages in float32 of values that were rounded before; those beyond the range are its ends."""
    model = FAMILIES[name]
    params = float_params(model)
    found = run(packed_step(model, cache_dtype="fp8"), params)
    narrow = ml_dtypes.float8_e4m3fn
    with monkeypatch.context() as patched:
        patched.setattr(cache, "stored", lambda values, dtype: values.astype(narrow).astype(dtype))
        rounded = run(packed_step(model, cache_dtype="fp32"), params)
    assert_close(found, rounded)
    assert np.abs(found - reference(model, params)).max() > 1e-3
    np.testing.assert_array_equal(cache.stored(jnp.array([1e4, -1e4]), narrow).astype(np.float32), [448, -448])


@pytest.mark.parametrize("name", sampled(["llama", "deepseek_v2"], "llama"))
def test_pages_in_int8_are_near(name):
    model = FAMILIES[name]
    params = float_params(model)
    found, wanted = run(packed_step(model, cache_dtype="int8"), params), reference(model, params)
    assert 1e-5 < np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.slow
def test_int8_pages_are_split_as_they_are_on_one_device():
    params, int8 = float_params(LLAMA), {"cache_dtype": "int8"}
    split = run(packed_step(LLAMA, {"context": 2, "tensor": 4}, "positions", **int8), params)
    whole = run(packed_step(LLAMA, **int8), params)
    np.testing.assert_array_equal(split.argmax(axis=1), whole.argmax(axis=1))
    np.testing.assert_allclose(split, whole, rtol=0, atol=1e-4 * np.abs(whole).max())  # a value is rounded otherwise


def test_the_collectives_of_split_pages_are_derived():
    steps = packed_step(LLAMA, {"context": 2, "tensor": 4}, "positions").derived.blocks[1].forward
    attention = next(place for place, step in enumerate(steps) if step.op == "cached_attention")
    assert str(steps[attention].result) == "o_own[B, T, N_tensor, H]{U_context}"
    after = [(step.op, step.axes, step.reduction) for step in steps[attention + 1 :] if step.is_collective][:3]
    assert after == [
        ("all_reduce", ("context",), "max"),
        ("all_reduce", ("context",), "sum"),
        ("reduce_scatter", ("context",), "sum"),
    ]


def test_loops_over_layers_give_the_same(monkeypatch):
    """The form of accelerators: weights and caches stay stacks."""
    params, step = float_params(LLAMA), packed_step(LLAMA)
    monkeypatch.setattr(step, "unrolled", False)
    assert_close(run(step, params), reference(LLAMA, params))


@pytest.mark.parametrize(
    ("name", "num_kv_heads", "cache_dtype", "state"),
    sampled(
        [
            *itertools.product(["llama"], (1, 2, 8), ("fp32", "bf16", "int8", "fp8"), ("fp32", "bf16-adam")),
            *itertools.product(["deepseek_v2"], (1,), ("fp32", "bf16", "int8", "fp8"), ("fp32", "bf16-adam")),
        ],
        ("llama", 1, "fp32", "fp32"),
        ("llama", 2, "bf16", "bf16-adam"),
        ("llama", 1, "int8", "bf16-adam"),
        ("deepseek_v2", 1, "fp8", "fp32"),
    ),
)
def test_a_step_copies_no_pool(name, num_kv_heads, cache_dtype, state):
    model = FAMILIES[name]
    if name == "llama":
        model = replace(model, num_heads=8, num_kv_heads=num_kv_heads)
    step = packed_step(model, num_pages=8192, cache_dtype=cache_dtype, state=state)
    assert temporary_bytes(step) < min(row.num_bytes // row.num_layers for row in step.table)


@pytest.mark.slow
@pytest.mark.parametrize(("num_kv_heads", "dtype", "state"), [(1, "bf16", "bf16-adam"), (8, "fp32", "fp32")])
def test_a_larger_pool_takes_no_longer(num_kv_heads, dtype, state):
    model = replace(LLAMA, num_heads=8, num_kv_heads=num_kv_heads)
    steps = [packed_step(model, num_pages=pages, cache_dtype=dtype, state=state) for pages in (256, 8192)]
    given = [(step.place(float_params(model)), step.init_cache()) for step in steps]
    pages = np.arange(NUM_SEQS * 6).reshape(NUM_SEQS, 6)
    rows, _ = packed(steps[0], [(0, 9, 10), (1, 9, 10), (2, 9, 10)], rows_of(model), pages, 4)
    seconds, latest = [[], []], jnp.zeros(NUM_SEQS, jnp.int32)
    for _ in range(200):
        for number, step in enumerate(steps):
            params, cache = given[number]
            started = time.perf_counter()
            found = step.step(params, cache, latest, rows, 1)
            jax.block_until_ready(found)
            seconds[number].append(time.perf_counter() - started)
            given[number] = params, found[1]
    few, many = (min(each) for each in seconds)
    assert many < 1.5 * few  # 1.05 on an idle machine; a copy of the larger pool alone takes ten times the step


def temporary_bytes(step):
    """Of a step that decodes eight sequences; a copy of an array is in them."""
    return step.compiled(PackedShape(rows=8, sequences=8, outputs=8, longest=1)).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("name", "state"),
    sampled(
        [*itertools.product(["llama", "gemma3", "gpt2", "deepseek_v3", "mixtral"], ("fp32", "bf16-adam"))],
        ("llama", "bf16-adam"),
        ("deepseek_v3", "fp32"),
    ),
)
def test_a_step_copies_and_widens_no_weight(name, state):
    wide = {} if name == "mixtral" else {"d_ff": 2048}
    step = packed_step(replace(FAMILIES[name], d_model=512, vocab_size=4096, **wide), state=state)
    assert temporary_bytes(step) < 512 * 1024


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_loops_over_layers_copy_no_pool(name, monkeypatch):
    step = packed_step(FAMILIES[name], num_pages=8192)
    monkeypatch.setattr(step, "unrolled", False)
    assert temporary_bytes(step) < min(row.num_bytes // row.num_layers for row in step.table)


GROUPED = with_groups(LLAMA)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "axes"),
    [
        *(("int4", {"tensor": 2}), ("fp8", {"tensor": 2}), ("int8", {"tensor": 2})),
        *(("int8", {}), ("fp8", {}), ("int4", {})),
    ],
)
def test_quantised_weights_are_products_with_what_they_stand_for(dtype, axes):
    params = float_params(GROUPED)
    whole = dequantise_params(GROUPED, dtype, stored_params(GROUPED, params, dtype))
    assert_close(run(packed_step(GROUPED, axes, weights=dtype), params), reference(GROUPED, whole))


def test_loops_over_layers_read_pairs_of_int4(monkeypatch):
    params, step = float_params(GROUPED), packed_step(GROUPED, weights="int4")
    whole = dequantise_params(GROUPED, "int4", stored_params(GROUPED, params, "int4"))
    monkeypatch.setattr(step, "unrolled", False)
    assert_close(run(step, params), reference(GROUPED, whole))


@pytest.mark.parametrize("dtype", ["", "int8", "fp8", "int4"])
def test_the_weights_of_a_device_have_the_bytes_that_are_declared(dtype):
    """What is priced, the weights and scales of the derived program, is what lies on a device, byte for byte."""
    step = packed_step(GROUPED, {"tensor": 2}, weights=dtype)
    held = {name: jax.tree.leaves(arrays) for name, arrays in step.place(float_params(GROUPED)).items()}
    sizes = OpSizes(dims=GROUPED.dims, mesh=step.strategy.mesh, state="fp32")
    declared = {name: sizes.bytes(step.declared[name]) * len(layers) for name, layers in held.items()}
    found = {name: sum(one.addressable_shards[0].data.nbytes for one in layers) for name, layers in held.items()}
    assert found == declared
    weights = step.derived.program.of_role("weight", "vector")
    assert set(held) == {variable.name for variable in weights}, "nothing is held beside"


def test_tokens_come_from_the_devices_where_a_row_says_so():
    params, step = float_params(LLAMA), packed_step(LLAMA)
    rows, pages = rows_of(LLAMA), np.arange(6)[None]
    given, _ = packed(step, [(0, 0, 1)], rows, pages, 2)
    latest = jnp.asarray([0, 0, int(rows[0, 0])], jnp.int32)
    placed = step.place(params)
    plain, _ = step.step(placed, step.init_cache(), latest, given, 1)
    sources = np.array([2, -1], np.int32)
    drawn, _ = step.step(placed, step.init_cache(), latest, given._replace(sources=sources, tokens=0 * sources), 1)
    np.testing.assert_array_equal(np.asarray(plain)[0], np.asarray(drawn)[0])


def test_what_cannot_run_is_refused():
    with pytest.raises(InputError, match=r"Pg=40 of .* does not divide by data=3"):
        packed_step(LLAMA, {"data": 3})
    with pytest.raises(CannotRunError, match="pipeline=2 trains but does not generate"):
        packed_step(LLAMA, {"pipeline": 2})
    with pytest.raises(CannotRunError, match="weights in fp4 are planned, not executed"):
        packed_step(LLAMA, weights="fp4")
    with pytest.raises(
        InputError, match=r"Fg=3 of w_down_scale.* does not divide by tensor=2. Use weights without groups"
    ):
        packed_step(LLAMA, {"tensor": 2}, weights="int4")


@pytest.mark.parametrize("cache_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("family", ["deepseek_v2", "gemma2"])
def test_it_is_lowered_for_a_tpu_that_is_not_there(family, cache_dtype):
    """Latents have scales of slots alone, heads one for each."""
    step = packed_step(FAMILIES[family], cache_dtype=cache_dtype).on(abstract_mesh(make_mesh({})), "tpu")
    for longest in (1, 8):
        assert "cache_" in step.lower(PackedShape(8, 2, 2, longest)).as_text(debug_info=True)
