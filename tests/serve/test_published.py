"""Published folders of narrow weights, as they are served: what is kept, what is widened, and the logits."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace

from meshwright.algebra.generation.program import Storage, weight_dtype
from meshwright.nn.hf import files
from meshwright.nn.hf.files import Entry, write_checkpoint
from meshwright.nn.hf.format import stored_parts
from meshwright.nn.hf.weights import load_params, save_adapter, source_of
from meshwright.nn.weights import init_params
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.serve.model_folder import open_model
from meshwright.serve.offline.slots import SlotEngine
from meshwright.serve.opening import open_engine
from meshwright.serve.options import EngineOptions
from meshwright.serve.request import TokenRequest
from meshwright.spec.hf.published import folder_weights
from meshwright.spec.hf.write import config_from_model
from meshwright.spec.model import Lora
from meshwright.spec.strategy import Strategy, make_mesh
from tests.logits import logits_fn
from tests.nn.families import FAMILIES
from tests.nn.hf import test_published
from tests.nn.hf.test_published import FORMS, PACKED, TOLERANCE, WRITTEN, folder_of, write_packed
from tests.parallel.generate_cases import logits_after as prompt_logits
from tests.tier import sampled

KEPT = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "fp8-tensor": jnp.float8_e4m3fn, "fp8-block": jnp.float8_e4m3fn,
        "int4": jnp.uint8}  # fmt: skip
"""Forms that are served as they are -> the dtype of their values; int4 are pairs in bytes."""
WIDE = {
    "int8-asymmetric": "the int8 weights have zero points",
    "int4-asymmetric": "the int4 weights have zero points",
    "nvfp4": "the fp4 weights have 4-bit floats",
    "mxfp4": "the fp4 weights have 4-bit floats",
    "awq": "the int4 weights have zero points",
    "gptq": "the int4 weights have zero points",
    "gptq-ordered": "the int4 weights have groups of inputs out of order",
}
PLAIN = ("embed", "final_norm", "attn_norm", "mlp_norm")


def logits_after(folder, tokens, axes=None, weights="as they are"):
    """Returns the logits after a prompt as generation computes them, and the weights on its devices."""
    source = open_model(folder)
    source = source if weights == "as they are" else source.served(weights, "tpu")
    mesh = make_mesh(axes or {})
    step = step_of(source.model, mesh, weights=weight_dtype(weights))
    params = step.place(load_params(source.model, folder, step.loaded_shardings, jnp.float32))
    return prompt_logits(step, params, np.repeat(tokens, 2, 0))[:1], by_name(params)


def step_of(model, mesh, **stored):
    storage = Storage(page_len=8, cache_dtype="fp32", **stored)
    return PackedStep(model, Strategy(mesh=mesh, state="fp32"), max_len=16, max_seqs=2, storage=storage)


def by_name(params):
    """One array of each name: on CPUs weights are tuples of layers."""
    return {name: array[0] if isinstance(array, tuple) else array for name, array in params.items()}


@pytest.mark.parametrize("form", sampled(FORMS, "int4", "int8", "fp8-block", "nvfp4"))
def test_generation_computes_what_the_library_does(form, tmp_path):
    found, params = logits_after(folder_of(form, tmp_path), WRITTEN["tokens"])
    tolerance = 0.1 if form == "nvfp4" else TOLERANCE  # whose library rounds to bfloat16
    np.testing.assert_allclose(found, WRITTEN[form][:, -1], atol=tolerance, rtol=0)
    dtypes = {name: array.dtype for name, array in params.items() if name not in PLAIN}
    values = {dtype for name, dtype in dtypes.items() if not name.endswith("_scale")}
    assert values == {np.dtype(KEPT.get(form, jnp.float32))}
    assert any(name.endswith("_scale") for name in dtypes) == (form in KEPT)


@pytest.mark.parametrize("form", ["fp8-block", "int4"])
def test_shards_of_narrow_weights_are_read_by_themselves(form, tmp_path):
    folder_of(form, tmp_path)
    whole, _ = logits_after(tmp_path, WRITTEN["tokens"])
    found, params = logits_after(tmp_path, WRITTEN["tokens"], {"fsdp": 2})
    assert any(len(array.sharding.device_set) == 2 and not array.is_fully_replicated for array in params.values())
    np.testing.assert_allclose(found, whole, atol=TOLERANCE, rtol=0)


def write_fp8(folder, model, block):
    """Writes random matrices in fp8, with a scale for each block of outputs and inputs."""
    rng, tensors = np.random.default_rng(1), {}
    for name, shape in {part.tensor: part.shape for part in stored_parts(model)}.items():
        plain = len(shape) != 2 or any(word in name for word in ("embed", "lm_head", ".gate.", "router"))
        values = rng.normal(size=shape).astype(np.float32)
        tensors[name] = values if plain else values.astype(ml_dtypes.float8_e4m3fn)
        if not plain:
            counts = [-(-size // each) for size, each in zip(shape, block, strict=True)]
            tensors[f"{name}_scale_inv"] = rng.random(counts).astype(np.float32) * 0.2 + 0.1
    entries = [Entry(n, t.shape, t.dtype, lambda t=t: t) for n, t in tensors.items()]
    codes = {np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_CODES", files._CODES | codes)
        write_checkpoint(folder, entries, max_bytes=10**9)
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    keys = config_from_model(model) | {"dtype": "float32", "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(keys))


BLOCKED = ["llama-biases", "phi3", "glm4", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"]


@pytest.mark.parametrize("family", sampled(BLOCKED, "deepseek_v3", "phi3"))
def test_blocks_of_fp8_stay_narrow_in_every_family(family, tmp_path):
    """Fused matrices, experts, latent attention: prefill and a step of generation, against the widened weights."""
    own = replace(FAMILIES[family], mtp_weight=0.0)
    write_fp8(tmp_path, own, (6, 4))
    source = open_model(tmp_path)
    tokens = np.arange(8)[None] % own.vocab_size
    step = step_of(source.model, make_mesh({}))
    params = step.place(load_params(source.model, tmp_path, step.loaded_shardings, jnp.float32))
    narrow = {name for name, array in by_name(params).items() if array.dtype == jnp.float8_e4m3fn}
    assert len(narrow) >= 7 * (family != "phi3")
    wide = replace(source.model, stored=None)
    floats, logits = load_params(wide, tmp_path, dtype=jnp.float32), jax.jit(logits_fn(wide))
    expected = np.asarray(logits(floats, tokens))
    scale, engine = np.abs(expected).max(), SlotEngine(step)
    prefix = engine.prefill(params, tokens[0, :7])
    np.testing.assert_allclose(prefix.logits, expected[0, 6], atol=1e-5 * scale, rtol=0)
    state = engine.insert(prefix, engine.init_decode_state(), 1)
    state.tokens[1] = tokens[0, 7]
    _, found = engine.generate(params, state)
    np.testing.assert_allclose(found[1], expected[0, 7], atol=1e-5 * scale, rtol=0)


def test_symmetric_groups_of_gptq_stay_narrow(tmp_path):
    """Two layers, experts one by one, and one layer whose attention is not quantised: that is widened, and says so."""
    write_packed(tmp_path, "gptq", sym=True)
    source = open_model(tmp_path)
    assert source.model.stored.group == 8
    assert {name for name, *_ in source.model.stored.matrices} == {
        f"layers.experts.{w}" for w in ("w_gate", "w_up", "w_down")
    }
    assert any(line.startswith("the int4 weights have layers that are stored in another form") for line in source.notes)
    tokens = np.arange(9)[None]
    found, params = logits_after(tmp_path, tokens)
    assert params["experts_w_up"].dtype == jnp.uint8
    model = replace(source.model, stored=None)
    expected = jax.jit(logits_fn(model))(load_params(model, tmp_path, dtype=jnp.float32), tokens)
    np.testing.assert_allclose(found, np.asarray(expected)[:, -1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("form", ["int4", "awq"])
def test_an_engine_serves_it_and_says_what_is_widened(form, tmp_path):
    write_packed(tmp_path, form) if form in PACKED else folder_of(form, tmp_path)
    options = EngineOptions(num_devices=1, max_requests=2, token_budget=8, page_len=4, max_len=16, cache_dtype="fp32")
    opened = open_engine(tmp_path, options, in_background=False)
    said = [line for line in opened.lines if "no kernel" in line]
    assert [line.startswith(WIDE.get(form, "?")) for line in said] == [True] * (form in WIDE)
    # a CPU would widen int4 in every step
    assert ("CPUs cannot multiply narrow weights: served in fp32" in opened.lines) == (form in KEPT)
    assert all(one.dtype.itemsize > 1 for one in jax.tree.leaves(opened.engine._params))
    prompt = [3, 7, 1, 5]
    (outputs,) = opened.engine.run([TokenRequest(prompt=tuple(prompt), max_tokens=4)])
    tokens = [one.token for one in outputs if one.token is not None]
    model = replace(opened.source.model, stored=None)
    params, logits = load_params(model, tmp_path, dtype=jnp.float32), jax.jit(logits_fn(model))
    for token in tokens:
        assert token == int(np.argmax(logits(params, np.asarray([prompt]))[0, -1]))
        prompt.append(token)
    assert len(tokens) == 4


LOADING = """
import sys, threading, time
from pathlib import Path
import jax, jax.numpy as jnp
from meshwright.algebra.generation.program import Storage
from meshwright.core.host_memory import keep_freed_memory
from meshwright.nn.hf.weights import load_params, save_adapter, source_of
from meshwright.nn.weights import init_params
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.serve.model_folder import open_model
from meshwright.spec.model import Lora
from meshwright.spec.strategy import Strategy, make_mesh

def anonymous_bytes():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], anonymous_bytes())

keep_freed_memory()  # as a server does
jax.block_until_ready(jnp.zeros(3) + 1)
source = open_model(Path(sys.argv[1]))
strategy = Strategy(mesh=make_mesh({}), state="bf16-adam")
step = PackedStep(source.model, strategy, max_len=32, max_seqs=2, storage=Storage(page_len=8, num_pages=8))
before, peak, done = anonymous_bytes(), [0], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
params = step.place(load_params(source.model, source.folder, step.loaded_shardings, jnp.bfloat16))
jax.block_until_ready(params)
time.sleep(0.01)
done.set()
watcher.join()
print(peak[0] - before, sum(array.nbytes for array in jax.tree.leaves(params)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["awq", "gptq"])
def test_a_host_holds_little_more_than_the_weights_while_they_are_loaded(form, tmp_path, monkeypatch):
    """Anonymous memory: pages of the mapped files are the kernel's to drop. AWQ is widened, GPTQ kept in int4."""
    monkeypatch.setattr(test_published, "GROUP", 128)
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 10, "vocab_size": 512}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    config = {"model_type": "llama", "torch_dtype": "bfloat16", **sizes, **heads}
    write_packed(tmp_path, form, config, group_size=128, **({"sym": True} if form == "gptq" else {}))
    command = [sys.executable, "-c", LOADING, str(tmp_path)]
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    peak, held = map(int, subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.split())
    assert held > (240e6 if form == "awq" else 100e6)
    assert held < peak < 1.2 * held


def test_an_adapter_stands_beside_narrow_weights(tmp_path):
    (base := tmp_path / "base").mkdir()
    own = open_model(folder_of("int4", base)).model
    model = replace(own, stored=None, lora=Lora(rank=2, alpha=4))
    drawn = {name: array + 0.1 for name, array in init_params(model, 3).items() if "_lora_" in name}
    fetch, dtypes = source_of(drawn)
    save_adapter(model, fetch, dtypes, tmp_path / "adapter", base=str(base))
    found, params = logits_after(tmp_path / "adapter", WRITTEN["tokens"])
    assert params["wq"].dtype == jnp.uint8
    wide = load_params(model, tmp_path / "adapter", dtype=jnp.float32)
    expected = np.asarray(jax.jit(logits_fn(model))(wide, WRITTEN["tokens"]))[:, -1]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    assert np.abs(expected - WRITTEN["int4"][:, -1]).max() > 0.1


def test_other_weights_are_made_from_the_wide_ones(tmp_path):
    found, params = logits_after(folder_of("int4", tmp_path), WRITTEN["tokens"], weights="int8")
    assert params["wq"].dtype == jnp.int8
    assert np.abs(found - WRITTEN["int4"][:, -1]).max() < 0.3
    assert "embed_scale" in params


def test_scales_of_outputs_that_generation_sums_are_widened(tmp_path):
    """Decode multiplies queries with the keys' projection of latent attention, over what are its outputs else."""
    config = {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = folder_weights(FAMILIES["deepseek_v3"], tmp_path, {})
    assert set(found.wide) == {("fp8", "scales of outputs over which generation sums")}
    assert len({name for name, *_ in found.stored.matrices}) > 8
    assert not any("wk_b" in name for name, *_ in found.stored.matrices)


def test_what_is_not_executed_is_said(tmp_path):
    notes = open_model(folder_of("int8", tmp_path)).notes
    assert notes == ("activations in int8 are not executed: they stay in the model's dtype",)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_model(tmp_path).notes[1] == "kv_cache_scheme is not used: choose the cache's dtype with --cache-dtype"
