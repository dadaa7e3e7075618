"""Matrices as published folders quantise them, against the libraries that write them.

compressed-tensors wrote the folders in ``tests/data/published`` (`write.py` there); transformers writes its fp8 here.
AWQ and GPTQ are packed here as their authors describe it. `PACKED` was compared by hand, 2026-11-28, with
``dequantize_gemm`` of AutoAWQ (awq/utils/packing_utils.py) and ``forward`` of AutoGPTQ
(auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py) and ``dequantize_weight`` of GPTQModel
(gptqmodel/nn_modules/qlinear/__init__.py): all entries were equal.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from meshwright.algebra.transformer import rows
from meshwright.core.errors import CannotRunError, InputError
from meshwright.nn.hf.adapter import open_tensors
from meshwright.nn.hf.format import stored_parts
from meshwright.nn.hf.gguf import open_files
from meshwright.nn.hf.published import why_refused, with_floats
from meshwright.nn.hf.weights import load_params, read_params
from meshwright.spec.hf.published import folder_weights, quantisation_of
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.hf.write import config_from_model
from tests.logits import logits_fn
from tests.nn.families import CONFIGS, FAMILIES
from tests.parallel.generate_cases import dequantise_params
from tests.parity import their_model

DATA = Path(__file__).parents[2] / "data" / "published"
FORMS = sorted(file.stem for file in DATA.glob("*.safetensors"))
WRITTEN = np.load(DATA / "logits.npz")
TOLERANCE = 1e-5
"""Largest difference of logits up to 7 in float32."""


def folder_of(form, path):
    shutil.copy(DATA / f"{form}.safetensors", path / "model.safetensors")
    shutil.copy(DATA / f"{form}.json", path / "config.json")
    return path


def logits_of(model, params, tokens):
    return np.asarray(jax.jit(logits_fn(model))(params, jnp.asarray(tokens)))


def tensors_of(folder):
    with open_tensors(model_from_config(folder), folder) as tensors:
        return {name: whole(tensor) for name, tensor in tensors.items()}


def whole(tensor):
    return np.asarray(tensor[tuple(slice(0, size) for size in tensor.shape)])


def test_every_form_is_there():
    assert {"int8", "int8-asymmetric", "int4", "int4-asymmetric", "fp8", "fp8-tensor", "fp8-block", "nvfp4"} < {*FORMS}


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_compressed_tensors(form, tmp_path):
    model = model_from_config(folder_of(form, tmp_path))
    params = load_params(model, tmp_path, dtype=jnp.float32)
    if form == "nvfp4":  # which the library dequantises in bfloat16
        narrow = {name: params[name].astype(jnp.bfloat16) for name in rows(model) if name.startswith("w")}
        params |= {name: array.astype(jnp.float32) for name, array in narrow.items()}
    found = logits_of(model, params, WRITTEN["tokens"])
    np.testing.assert_allclose(found, WRITTEN[form], atol=TOLERANCE, rtol=0)
    assert np.abs(WRITTEN[form]).max() > 1


@pytest.mark.parametrize("form", FORMS)
def test_a_part_is_the_part_of_the_whole(form, tmp_path):
    model = model_from_config(folder_of(form, tmp_path))
    with open_tensors(model, tmp_path) as tensors:
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
            every = whole(tensors[name])
            box = (slice(3, 26), slice(5, 15))
            np.testing.assert_array_equal(tensors[name][box], every[box])
            assert every.dtype == np.float32
            assert every.any()


# -- fp8 of transformers ----------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"weight_block_size": [8, 16]}),
        ("phi3", {"weight_block_size": [8, 16]}),
        ("qwen3", {"weight_block_size": None}),
        ("llama", {"weight_block_size": [8, 16], "scale_fmt": "ue8m0"}),
    ],
)
def test_logits_are_those_of_transformers_in_fp8(family, settings, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    keys = config_from_model(FAMILIES[family]) | {"dtype": "float32", "pad_token_id": None}
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**{**keys, "model_type": family})
    ).float()
    config = transformers.FineGrainedFP8Config(**settings)
    quantise = Fp8Quantize(type("Quantizer", (), {"quantization_config": config}))
    state = {}
    for name, parameter in theirs.state_dict().items():
        made = quantise.convert({name: parameter}) if "_proj.weight" in name else {name: parameter}
        state |= {key: value.detach().contiguous() for key, value in made.items()}
    assert sum(key.endswith("_scale_inv") for key in state) >= 4 * FAMILIES[family].num_layers
    theirs.config.tie_word_embeddings or state.setdefault("lm_head.weight", theirs.lm_head.weight.detach())
    from safetensors.torch import save_file as save_torch

    save_torch(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(keys | {"quantization_config": config.to_dict()}))
    tokens = np.arange(12)[None] % FAMILIES[family].vocab_size
    reader = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = reader(torch.tensor(tokens)).logits.numpy()
    model = model_from_config(tmp_path)
    found = logits_of(model, load_params(model, tmp_path, dtype=jnp.float32), tokens)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


# -- AWQ and GPTQ -----------------------------------------------------------------------------------------

GROUP, SEED = 8, 3


def packed(values, axis, order=range(8)):
    """Packs unsigned numbers of 4 bits, eight to a word: the one at ``order[i]`` goes to the i-th four bits."""
    split = np.moveaxis(values.astype(np.uint32), axis, -1)
    split = split.reshape(*split.shape[:-1], -1, 8)
    words = sum(split[..., number] << np.uint32(4 * place) for place, number in enumerate(order))
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def awq(codes, zeros, scales, index):
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # of AWQ's kernels, awq/modules/linear/gemm.py
    return {"qweight": packed(codes, 1, order), "qzeros": packed(zeros, 1, order), "scales": scales}


def gptq(codes, zeros, scales, index):
    parts = {"qweight": packed(codes, 0), "qzeros": packed((zeros - 1) & 15, 1), "scales": scales}
    return parts | {"g_idx": index.astype(np.int32), "bias": np.zeros(scales.shape[1], np.float16)}


def gptq_v2(codes, zeros, scales, index):
    return gptq(codes, zeros, scales, index) | {"qzeros": packed(zeros, 1)}


PACKED = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}),
    "gptq-ordered": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True}),
    "gptq_v2": (
        gptq_v2,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq_v2"},
    ),
}
CONFIG = {
    "model_type": "mixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 10,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
    "torch_dtype": "float32",
}  # fmt: skip
"""A model with experts one by one, and a layer that is not quantised."""


def write_packed(folder, form, config=CONFIG, **changes):
    """Writes a folder in a form, and returns its weights as floats."""
    pack, keys = PACKED[form]
    symmetric = {**keys, **changes}.get("sym", form != "awq") is True
    model, rng = model_from_config(config), np.random.default_rng(SEED)
    shapes = {part.tensor: part.shape for part in stored_parts(model)}
    tensors, floats = {}, {}
    for name, shape in shapes.items():
        inputs = shape[-1]
        if len(shape) < 2 or any(word in name for word in ("embed", "lm_head", ".gate.", "layers.1.self_attn")):
            floats[name] = tensors[name] = rng.normal(size=shape).astype(np.float32)
            continue
        index = np.arange(inputs) // GROUP
        if keys.get("desc_act"):
            index = rng.permutation(index)
        codes = rng.integers(0, 16, (inputs, shape[0]))
        zeros = rng.integers(1, 16, (inputs // GROUP, shape[0])) * (not symmetric) + 8 * symmetric
        scales = (rng.random((inputs // GROUP, shape[0])) * 0.05 + 0.01).astype(np.float16)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{end}": part for end, part in pack(codes, zeros, scales, index).items()}
        floats[name] = ((codes - zeros[index]) * scales[index].astype(np.float32)).T
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": keys | changes}))
    return floats


@pytest.mark.parametrize("form", PACKED)
def test_awq_and_gptq_are_read_as_they_are_packed(form, tmp_path):
    floats, found = write_packed(tmp_path, form), tensors_of(tmp_path)
    for name, expected in floats.items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=0, err_msg=name)
    model = model_from_config(tmp_path)
    params = load_params(model, tmp_path, dtype=jnp.float32)  # AutoGPTQ's biases of zeros are no foreign tensors
    (plain := tmp_path / "plain").mkdir()
    save_file({name: np.ascontiguousarray(array) for name, array in floats.items()}, plain / "model.safetensors")
    expected = load_params(model, plain, dtype=jnp.float32)
    tokens = np.arange(9)[None]
    np.testing.assert_allclose(logits_of(model, params, tokens), logits_of(model, expected, tokens), atol=TOLERANCE)


def test_groups_of_inputs_may_be_listed(tmp_path):
    """compressed-tensors before 0.20 wrote ``weight_g_idx`` for groups in the order of activations."""
    from meshwright.spec.hf.published import Quantisation, Scheme

    rng = np.random.default_rng(SEED)
    codes, index, scale = rng.integers(0, 16, (3, 16)), rng.permutation(np.arange(16) // 8), rng.random((3, 2))
    parts = {"weight_packed": packed(codes, 1), "weight_scale": scale, "weight_g_idx": index.astype(np.int32)}
    scheme = Scheme(dtype="int4", inputs=8, in_order=False)
    named = Quantisation(method="compressed-tensors", schemes=(("Linear", scheme),))
    found = with_floats({f"x.{end}": part for end, part in parts.items()}, named, np.dtype(np.float32))
    expected = (codes - 8) * scale[:, index].astype(np.float32)
    np.testing.assert_allclose(whole(found["x.weight"]), expected, rtol=1e-6)


def test_old_keys_of_awq_are_read():
    table = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True}
    assert quantisation_of({"quantization_config": table}, family="llama", what="toy").schemes[0][1].inputs == 64
    assert "w_bit=3. Only 4 is read" in refused(**table | {"w_bit": 3})


def test_scales_in_16_bits_leave_float32_weights_in_float32(tmp_path):
    write_packed(tmp_path, "awq")
    model = model_from_config(tmp_path)
    with open_tensors(model, tmp_path) as tensors:
        wide = {name: whole(tensor) for name, tensor in tensors.items() if tensor.dtype.itemsize < 4}
        assert not wide
    with open_files(tmp_path) as tensors:
        assert {tensor.dtype.name for tensor in tensors.values()} == {"int32", "float16", "float32"}
        assert folder_weights(model, tmp_path, tensors).dtype == "fp32"


# -- what is refused --------------------------------------------------------------------------------------


def broken(folder, form="int4", drop=(), change=lambda tensors: None, **keys):
    """Returns the message for a folder without the tensors ``drop``, with others changed, and keys of its config."""
    with open_files(folder_of(form, folder)) as stored:
        tensors = {n: whole(tensor) for n, tensor in stored.items() if not n.endswith(tuple(drop) or "?")}
    change(tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= keys
    quantisation = quantisation_of(config, family="llama", what="toy")
    with pytest.raises(InputError) as caught:
        with_floats(tensors, quantisation, np.dtype(np.float32))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def flat(end):
    return lambda tensors: tensors.update({n: t.reshape(-1) for n, t in tensors.items() if n.endswith(end)})


def whole_numbers(end):
    return lambda tensors: tensors.update({n: t.astype(np.int8) for n, t in tensors.items() if n.endswith(end)})


def cut(end, box):
    def change(tensors):
        for name in [name for name in tensors if name.endswith(end)]:
            tensors[name] = np.ascontiguousarray(tensors[name][box])

    return change


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"drop": ["q_proj.weight_scale"]},
            "q_proj.weight: the checkpoint lacks its scales. Fetch it and its config",
        ),
        (
            {"form": "nvfp4", "drop": ["v_proj.weight_global_scale"]},
            "v_proj.weight: the checkpoint lacks its global scale. Fetch it",
        ),
        ({"actorder": "group"}, "down_proj.weight: the checkpoint lacks its list of groups"),
        ({"drop": ["q_proj.weight_packed"]}, "q_proj.weight: the checkpoint lacks its values"),
        (
            {"group_size": 8},
            "scales of shape (32, 1); by quantization_config (32, 16) in int4, groups of 1 outputs x 8 inputs, needs",
        ),
        ({"num_bits": 8}, "values of shape (32, 2); by quantization_config (32, 16) in int8, groups of 1"),
        ({"change": cut("o_proj.weight_packed", np.s_[:, :2])}, "o_proj.weight: values of shape (32, 2)"),
        ({"change": cut("o_proj.weight_packed", np.s_[0])}, "o_proj.weight: values of shape (4,) are not a matrix"),
        ({"symmetric": False}, "lacks its zero points. Fetch it and its config"),
        (
            {"form": "int4-asymmetric", "change": cut("k_proj.weight_zero_point", np.s_[:1])},
            "k_proj.weight: zero points of shape (1, ",
        ),
        ({"form": "fp8-block", "change": flat("q_proj.weight_scale")}, "q_proj.weight: scales of shape (6,)"),
        ({"form": "fp8", "change": whole_numbers("q_proj.weight_scale")}, "scales in int8 are not floats"),
    ],
)
def test_what_is_missing_or_misshapen_is_named(given, says, tmp_path):
    assert says in broken(tmp_path, **given)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda index: index + 9, "the groups of its 16 inputs must be 0 to 1, and as its config"),
        (lambda index: index[:-1], r"list of groups of shape \(15,\); by quantization_config"),
    ],
)
def test_groups_that_are_not_there_are_refused(change, says, tmp_path):
    from safetensors.numpy import load_file

    write_packed(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {name: change(index) for name, index in tensors.items() if name.endswith("v_proj.g_idx")}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=rf"v_proj.weight: {says}"):
        load_params(model_from_config(tmp_path), tmp_path)


def test_narrow_values_without_scales_are_refused(tmp_path):
    model = model_from_config(folder_of("int8", tmp_path))
    from safetensors.numpy import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "scale" not in n}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"_proj.weight is stored in int8 without scales. Give a folder with"):
        load_params(model, tmp_path)


def refused(**config):
    with pytest.raises((InputError, CannotRunError)) as caught:
        quantisation_of({"quantization_config": config}, family="llama", what="toy")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("method", ["bitsandbytes", "quanto", "torchao", "hqq", "aqlm", "eetq", "mxfp4", None, 3])
def test_other_methods_are_refused_by_name(method):
    said = refused(quant_method=method, load_in_4bit=True)
    named = f"is {method!r}" if method else "names no quant_method"
    assert said.startswith(f"toy: quantization_config {named}. Only fp8, compressed-tensors, awq, gptq")
    assert "or in bf16" in said


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "awq", "version": "gemv"}, "weights with version='gemv' are not read"),
        ({"quant_method": "awq", "bits": 3}, "bits=3. Only 4 is read"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3. Only 4 or 8 is read"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format='marlin' are not read"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size=0. Write a positive number"),
        ({"quant_method": "gptq", "dynamic": {"+:.*down.*": {"bits": 8}}}, "settings of its own for '+:.*down.*'"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size=128. Write outputs and inputs"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size=[0, 128]. Write outputs"),
        ({"weight_block_size": [8, 8]}, "quantization_config names no quant_method. Only fp8"),
        ({"quant_method": "compressed-tensors"}, "is not understood (it lacks 'config_groups'). Mend"),
        ({"config_groups": {"a": {"weights": None}}}, "is not understood (a part has another form). Mend it."),
        ({"config_groups": {}, "ignore": ["re:((("]}, "is not understood (missing )"),
        (
            {"config_groups": {}, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "format='sparse-24-bitmask' are not read",
        ),
        ({"config_groups": {}, "transform_config": {"config_groups": {"u": 1}}}, "transform_config changes what"),
        ({"config_groups": {}, "format": "marlin-24"}, "format='marlin-24' are not read"),
        ({"config_groups": {"a": {"weights": {"strategy": "token"}}}}, "strategy='token' are not read"),
    ],
)
def test_forms_that_are_not_understood_are_refused(config, says):
    assert says in refused(**config)


def test_float8_is_read_from_files(tmp_path):
    """safetensors does not read these dtypes as NumPy's."""
    import torch
    from safetensors.torch import save_file as save_torch

    from meshwright.nn.hf.files import open_checkpoint

    values = torch.arange(24.0).reshape(4, 6)
    save_torch({"a": values.to(torch.float8_e4m3fn), "b": values.bfloat16()}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as tensors:
        found = tensors["a"][1:3, 2:5]
        assert found.dtype == ml_dtypes.float8_e4m3fn
        np.testing.assert_array_equal(found.astype(np.float32), values.to(torch.float8_e4m3fn).float()[1:3, 2:5])
        np.testing.assert_array_equal(tensors["b"][1:3, 2:5].astype(np.float32), values[1:3, 2:5])


def test_experts_of_llama4_may_be_stored_one_by_one(tmp_path):
    """As quantised files have them: [out, in] each, in fp8 with a scale of each output."""
    import torch
    from safetensors.torch import save_file as save_torch

    model, rng = FAMILIES["llama4"], np.random.default_rng(SEED)
    floats = {part.tensor: rng.normal(size=part.shape).astype(np.float32) / 4 for part in stored_parts(model)}
    tensors = {name: torch.from_numpy(array) for name, array in floats.items() if ".experts." not in name}
    for name, array in floats.items():
        stem, _, last = name.partition(".experts.")
        pieces = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
        for piece, values in zip(pieces, np.split(array, max(len(pieces), 1), axis=-1), strict=False):
            for number, matrix in enumerate(values):  # views of the floats, which are rounded below
                scale = np.abs(matrix.T).max(1, keepdims=True) / 448
                narrow = torch.from_numpy((matrix.T / scale).copy()).to(torch.float8_e4m3fn)
                matrix[:] = (narrow.float().numpy() * scale).T
                tensors[f"{stem}.experts.{number}.{piece}.weight"] = narrow
                tensors[f"{stem}.experts.{number}.{piece}.weight_scale"] = torch.from_numpy(scale)
    save_torch(tensors, tmp_path / "model.safetensors")
    keys = json.loads((DATA / "fp8.json").read_text())["quantization_config"]
    ignored = ["re:.*self_attn", "re:.*router", "re:.*shared_expert", "lm_head"]
    config = config_from_model(model) | {"quantization_config": keys | {"ignore": ignored}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    expected = read_params(model, floats)
    for name, array in load_params(model, tmp_path, dtype=jnp.float32).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, err_msg=name)
    with open_files(tmp_path) as files:
        stored = folder_weights(model, tmp_path, files).stored
    assert [name for name, *_ in stored.matrices] == [f"layers.experts.w_{name}" for name in ("gate", "up", "down")]
    kept = load_params(replace(model, stored=stored), tmp_path)
    for name, array in dequantise_params(replace(model, stored=stored), "", kept).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, err_msg=name)


def test_tables_that_transformers_does_not_save_are_not_missed(tmp_path):
    """Marian's sinusoids: the folder is whole without them, and not without any other tensor."""
    pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    their_model(CONFIGS["marian"]).save_pretrained(tmp_path)
    model = model_from_config(tmp_path / "config.json", "x")
    with open_files(tmp_path) as tensors:
        assert not any("embed_positions" in name for name in tensors)
        assert why_refused(model, tensors, None) == ""
        (left_out, *_) = [name for name in tensors if name.endswith("fc1.weight")]
        rest = {name: tensor for name, tensor in tensors.items() if name != left_out}
        assert left_out in why_refused(model, rest, None)
