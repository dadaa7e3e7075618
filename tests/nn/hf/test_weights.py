import json
import math
import os
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from meshwright.algebra.transformer import rows
from meshwright.core.errors import InputError
from meshwright.nn.hf import weights
from meshwright.nn.hf.files import Entry, StoredTensor, write_checkpoint
from meshwright.nn.hf.format import checked_parts, stored_parts
from meshwright.nn.weights import Params, param_shapes, stacked_shape
from meshwright.parallel.mesh import device_mesh
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import Model
from meshwright.spec.strategy import make_mesh
from meshwright.spec.weights import num_params, weight_table
from tests.nn.families import FAMILIES, LLAMA


def random_params(model: Model, *, dtype=np.float32) -> dict[str, np.ndarray]:
    """On the host: what JAX slices it compiles first."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape.shape).astype(dtype) for name, shape in param_shapes(model).items()}


def on_device(params: dict[str, np.ndarray]) -> Params:
    return {name: jnp.asarray(array) for name, array in params.items()}


def published(model: Model) -> dict[str, np.ndarray]:
    """The random weights in their published form."""
    params = random_params(model)
    entries = weights.hf_entries(
        model, lambda name, index: params[name][index], {n: a.dtype for n, a in params.items()}
    )
    return {entry.name: entry.make() for entry in entries}


def require_equal(found: Params, expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), array, err_msg=name)


@pytest.fixture(scope="module")
def tensors():
    """Every family in its published form."""
    return {name: published(model) for name, model in FAMILIES.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_back_from_the_published_form(family, tensors):
    model = FAMILIES[family]
    buffers = sum(math.prod(w.shape) * w.repeat for w in weight_table(model) if w.part == "buffer")
    assert sum(array.size for array in tensors[family].values()) == num_params(model) + buffers
    require_equal(weights.read_params(model, tensors[family]), random_params(model))


def joined(*arrays: np.ndarray) -> np.ndarray:
    """Heads side by side, [D, all of them]."""
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], 1)


BY_HAND = {
    ("llama", "layers.1.self_attn.q_proj.weight"): lambda p: joined(p["wq"][1]).T,
    ("llama", "layers.1.self_attn.o_proj.weight"): lambda p: p["wo"][1].reshape(48, 32).T,
    ("gpt2", "h.0.attn.c_attn.weight"): lambda p: joined(p["wq"][0], p["wk"][0], p["wv"][0]),
    ("gpt2", "h.1.attn.c_attn.bias"): lambda p: np.concatenate([p[n][1].ravel() for n in ("bq", "bk", "bv")]),
    ("phi3", "layers.0.self_attn.qkv_proj.weight"): lambda p: joined(p["wq"][0], p["wk"][0], p["wv"][0]).T,
    ("phi3", "layers.2.mlp.gate_up_proj.weight"): lambda p: joined(p["w_gate"][2], p["w_up"][2]).T,
    ("mixtral", "layers.1.block_sparse_moe.experts.2.w3.weight"): lambda p: p["experts_w_up"][1, 2].T,
    # Layer 2 is the second of the kind that has experts.
    ("qwen2_moe", "layers.2.mlp.experts.3.down_proj.weight"): lambda p: p["experts_w_down_moe"][1, 3].T,
    ("qwen2_moe", "layers.0.mlp.shared_expert_gate.weight"): lambda p: p["shared_gate_moe"][:1],
    ("gpt_oss", "layers.1.mlp.experts.gate_up_proj"): lambda p: np.stack(
        [p["experts_w_gate_moe"][0], p["experts_w_up_moe"][0]], -1
    ).reshape(4, 32, 96),
    ("deepseek_v2", "layers.0.self_attn.kv_b_proj.weight"): lambda p: (
        joined(np.concatenate([p["wk_b"][0], p["wv_b"][0]], -1)).T
    ),
    ("deepseek_v2", "layers.0.self_attn.kv_a_proj_with_mqa.weight"): lambda p: joined(p["wkv_a"][0], p["wk_rope"][0]).T,
}
"""A tensor of a checkpoint, without the model's prefix -> what it must hold, written out for one layer."""


@pytest.mark.parametrize(("family", "name"), BY_HAND, ids="-".join)
def test_tensors_hold_what_they_are_said_to_hold(family, name, tensors):
    prefix = FAMILIES[family].weights_prefix
    np.testing.assert_array_equal(
        tensors[family][prefix + name], BY_HAND[family, name](random_params(FAMILIES[family]))
    )


# -- forms in which a checkpoint may come --------------------------------------------------------------


def test_names_without_the_prefix_are_found(tensors):
    bare = {n.removeprefix("transformer."): a for n, a in tensors["gpt2"].items()}
    require_equal(weights.read_params(FAMILIES["gpt2"], bare), random_params(FAMILIES["gpt2"]))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_decoder_nested_in_a_larger_model_is_found(prefix, tensors):
    nested = {n.replace("model.", prefix, 1): a for n, a in tensors["gemma3"].items()}
    require_equal(weights.read_params(FAMILIES["gemma3"], nested), random_params(FAMILIES["gemma3"]))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_may_be_stacked(family, tensors):
    """As transformers holds them in memory: [E, 2 F, D] and [E, D, F]."""
    model = FAMILIES[family]
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    names = {n.replace(".block_sparse_moe.", ".mlp."): a for n, a in tensors[family].items()}
    stacked = {n: a for n, a in names.items() if ".experts." not in n}
    for layer in model.moe_layers:
        stem = f"model.layers.{layer}.mlp.experts."
        of = {
            part: np.stack([names[f"{stem}{e}.{part}.weight"] for e in range(model.num_experts)])
            for part in (gate, up, down)
        }
        stacked |= {stem + "gate_up_proj": np.concatenate([of[gate], of[up]], 1), stem + "down_proj": of[down]}
    require_equal(weights.read_params(model, stacked), random_params(model))


def test_a_stored_copy_of_tied_weights_is_not_needed_nor_written(tensors):
    model = FAMILIES["qwen2"]
    assert "lm_head.weight" not in tensors["qwen2"]
    embed = tensors["qwen2"]["model.embed_tokens.weight"]
    require_equal(weights.read_params(model, {**tensors["qwen2"], "lm_head.weight": embed}), random_params(model))
    for other in (embed + 1, embed.T):
        with pytest.raises(InputError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            checked_parts(model, {**tensors["qwen2"], "lm_head.weight": other})


@pytest.mark.parametrize(
    ("family", "name", "passes"),
    [
        ("llama", "model.layers.0.self_attn.q_norm.weight", False),
        ("llama", "model.layers.3.mlp.up_proj.weight", False),
        ("llama", "model.layers.0.self_attn.q_proj.bias", False),
        ("llama", "model.layers.0.self_attn.q_proj.zeros.bias", True),
        ("llama", "embed_tokens.weight", False),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("llama", "model.layers.0.attn.masked_bias", False),
        ("gpt2", "transformer.h.0.attn.masked_bias", True),
        ("gemma3", "vision_tower.vision_model.post_layernorm.weight", True),
        ("gemma2", "vision_tower.vision_model.post_layernorm.weight", False),
        ("deepseek_v3", "model.layers.3.eh_proj.weight", True),
        ("deepseek_v3", "model.layers.4.eh_proj.weight", False),
    ],
)
def test_tensors_without_a_place_are_refused_by_name(family, name, passes, tensors):
    given = {**tensors[family], name: np.full(3, "zeros" not in name, np.float32)}
    if passes:
        assert checked_parts(FAMILIES[family], given)
        return
    with pytest.raises(InputError, match=f"the checkpoint has {name}, which {family} has no place for"):
        checked_parts(FAMILIES[family], given)


def test_a_tensor_in_two_files_is_refused(tensors, tmp_path):
    for name in ("a", "b"):
        save_file({"w": np.zeros(2, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(InputError, match=r"a\.safetensors and .*b\.safetensors both have the tensor w"):
        weights.load_params(LLAMA, tmp_path)


# -- reading, shard by shard ----------------------------------------------------------------------------

_AXES = {"D": "fsdp", "N": "tensor", "K": "tensor", "F": "tensor", "Fe": "tensor", "V": "tensor", "E": "fsdp"}


def shardings_of(model: Model) -> dict[str, NamedSharding]:
    """Two axes on every array that has room for them, on eight devices."""
    mesh = device_mesh(make_mesh({"fsdp": 4, "tensor": 2}))
    found = {}
    for name, weight in rows(model).items():
        spec = [None] * (len(stacked_shape(weight)) - len(weight.dims))
        taken: set[str] = set()
        for dim, size in zip(weight.dims, weight.shape, strict=True):
            axis = _AXES.get(dim)
            fits = axis is not None and axis not in taken and size % mesh.shape[axis] == 0
            spec.append(axis if fits else None)
            taken |= {axis} if fits and axis else set()
        found[name] = NamedSharding(mesh, PartitionSpec(*spec))
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gpt_oss", "deepseek_v2", "qwen2_moe"])
def test_each_device_reads_its_own_shards(family, tensors, tmp_path):
    model, shardings = FAMILIES[family], shardings_of(FAMILIES[family])
    save_file(tensors[family], tmp_path / "model.safetensors")
    found = weights.load_params(model, tmp_path, shardings)
    assert all(found[name].sharding == sharding for name, sharding in shardings.items())
    require_equal(found, random_params(model))


def test_every_byte_is_read_once_and_never_more_than_a_shard(tensors, tmp_path, monkeypatch):
    model = LLAMA
    save_file(tensors["llama"], tmp_path / "model.safetensors")
    sizes, read = [], StoredTensor.__getitem__

    def counted(tensor, box):
        part = read(tensor, box)
        sizes.append(part.nbytes)
        return part

    monkeypatch.setattr(StoredTensor, "__getitem__", counted)
    found = weights.load_params(model, tmp_path, shardings_of(model))
    assert sum(sizes) == num_params(model) * 4
    layers = {n: model.num_layers if w.layers else 1 for n, w in rows(model).items()}
    assert max(sizes) == max(array.addressable_data(0).nbytes // layers[name] for name, array in found.items())


@pytest.mark.slow
def test_host_memory_stays_at_the_weights_and_a_shard(tmp_path):
    """Emulated devices live in the host's memory: it holds the weights once, and not a second time to read them."""
    model = replace(LLAMA, d_model=1024, d_ff=3072, num_layers=4, vocab_size=8192, head_dim=64, num_heads=16)
    total = 2 * num_params(model)
    zeros = {
        place.tensor: Entry(
            place.tensor,
            place.shape,
            np.dtype(ml_dtypes.bfloat16),
            lambda shape=place.shape: np.zeros(shape, ml_dtypes.bfloat16),
        )
        for place in stored_parts(model)
    }
    write_checkpoint(tmp_path, list(zeros.values()), max_bytes=10**9)
    assert total > 100e6
    jax.block_until_ready(jnp.zeros(3) + 1)
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous_bytes())

    before, watcher = anonymous_bytes(), threading.Thread(target=watch)
    watcher.start()
    params = weights.load_params(model, tmp_path, shardings_of(model))
    time.sleep(0.01)
    done.set()
    watcher.join()
    largest_shard = max(array.addressable_data(0).nbytes for array in params.values())
    assert peak[0] - before < 1.1 * total + 2 * largest_shard


def anonymous_bytes() -> int:
    """Memory of this process that is no file."""
    with open(f"/proc/{os.getpid()}/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


# -- files ----------------------------------------------------------------------------------------------


def test_large_checkpoints_are_cut_into_files_with_an_index(tensors, tmp_path):
    model, params = LLAMA, random_params(LLAMA)
    files = weights.save_hf(model, on_device(params), tmp_path, 20_000)
    assert len(files) > 2
    assert [f.name for f in files[:1]] == [f"model-00001-of-{len(files):05}.safetensors"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == num_params(model) * 4
    stored = {name: array for file in files for name, array in load_file(file).items()}
    assert {name: file for file in files for name in load_file(file)} == {
        name: tmp_path / file for name, file in index["weight_map"].items()
    }
    for name, array in tensors["llama"].items():
        np.testing.assert_array_equal(stored[name], array)
    assert replace(model_from_config(tmp_path), name=model.name) == model
    require_equal(weights.load_params(model, tmp_path), params)
    assert [f.name for f in weights.save_hf(model, on_device(params), tmp_path)] == ["model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["SHA256SUMS", "config.json", "model.safetensors"]


def test_sharded_weights_are_written_as_whole_tensors(tensors, tmp_path):
    params = jax.device_put(random_params(LLAMA), shardings_of(LLAMA))
    weights.save_hf(LLAMA, params, tmp_path)
    for name, array in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(array, tensors["llama"][name])


def test_a_part_of_sharded_weights_is_gathered_by_itself():
    """As several processes write: no device of one of them has all of an array."""
    whole = random_params(FAMILIES["mixtral"])["experts_w_up"]
    array = jax.device_put(whole, shardings_of(FAMILIES["mixtral"])["experts_w_up"])
    part = weights.gathered_part(array, (2, 3))
    assert part.is_fully_replicated
    np.testing.assert_array_equal(part, whole[2, 3])


def test_bf16_goes_in_and_out(tmp_path):
    params = random_params(LLAMA, dtype=ml_dtypes.bfloat16)
    weights.save_hf(LLAMA, on_device(params), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    require_equal(weights.load_params(LLAMA, tmp_path), params)
    wide = weights.load_params(LLAMA, tmp_path, dtype=jnp.float32)
    require_equal(wide, {name: array.astype(np.float32) for name, array in params.items()})


def test_a_folder_is_converted_tensor_by_tensor(tensors, tmp_path):
    model, source, target = FAMILIES["gpt2"], tmp_path / "from", tmp_path / "to"
    source.mkdir()
    bare = {n.removeprefix("transformer."): a for n, a in tensors["gpt2"].items()}
    save_file(bare, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 7}))
    weights.convert_hf(model, source, target, dtype="bf16")
    assert weights.token_numbers(target) == {"eos_token_id": 7}
    assert sorted(load_file(target / "model.safetensors")) == sorted(tensors["gpt2"])
    expected = {n: a.astype(ml_dtypes.bfloat16) for n, a in random_params(model).items()}
    require_equal(weights.load_params(model, target), expected)


# -- refusals -------------------------------------------------------------------------------------------


def test_missing_and_misshapen_tensors_are_named(tensors):
    missing = {n: a for n, a in tensors["llama"].items() if "layers.1.mlp.up_proj" not in n}
    with pytest.raises(InputError, match=r"lacks model.layers.1.mlp.up_proj.weight \(w_up\). Give one made for"):
        weights.read_params(LLAMA, missing)
    wrong = {**tensors["llama"], "model.norm.weight": np.zeros(31)}
    with pytest.raises(InputError, match=r"model.norm.weight has shape \(31,\); llama needs \(32,\)"):
        weights.read_params(LLAMA, wrong)


def test_quantised_checkpoints_are_refused(tensors):
    blocks = {"model.embed_tokens.weight": np.zeros((64, 32)), "model.layers.0.mlp.experts.gate_up_proj_blocks": 0}
    with pytest.raises(InputError, match=r"is quantised \(it has .*_blocks\), and no quantization_config"):
        weights.read_params(FAMILIES["gpt_oss"], blocks)


def test_folders_without_whole_files_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"has neither \*.safetensors nor pytorch_model.bin. Give the folder"):
        weights.load_params(LLAMA, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(InputError, match=r"model.safetensors is not a whole safetensors file"):
        weights.load_params(LLAMA, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1-of-2.safetensors"}}')
    with pytest.raises(InputError, match=r"model-1-of-2.safetensors is missing, and the index of its folder names it"):
        weights.load_params(LLAMA, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{"x" * 300}"}}}}')
    with pytest.raises(InputError, match=r"File name too long"):
        weights.load_params(LLAMA, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(InputError, match=r"holds no JSON object\. Mend the file, or fetch it again"):
        weights.load_params(LLAMA, tmp_path)
