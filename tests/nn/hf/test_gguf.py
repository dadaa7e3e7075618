"""Models written as GGUF as llama.cpp's conversion does: config, tensors, folders; and files that are no models."""

import shutil
import struct
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from meshwright.core.errors import InputError
from meshwright.nn.hf.adapter import base_folder, open_tensors
from meshwright.nn.hf.files import DTYPES
from meshwright.nn.hf.gguf import GgufTensor, as_folder
from meshwright.nn.hf.gguf_tokenizer import CONTROL, NORMAL
from meshwright.nn.hf.weights import hf_entries, load_params
from meshwright.nn.weights import param_shapes
from meshwright.serve.model_folder import open_model
from meshwright.spec.catalogue import load_model, weights_of
from meshwright.spec.hf.read import model_from_config
from tests.logits import logits_fn
from tests.nn.hf.gguf_files import CONFIGS, VOCAB, write_gguf

MODELS = {name: model_from_config(config, name) for name, config in CONFIGS.items()}
NO_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 24)).astype(np.int32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))


def random_params(model, seed=0):
    """Random values everywhere, so that no bias and no norm hides."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.2, shape.shape).astype(np.float32) for name, shape in param_shapes(model).items()}


def published(model, params):
    """Tensors by their published names."""
    dtypes = dict.fromkeys(params, np.dtype(np.float32))
    entries = hf_entries(model, lambda name, index: params[name][index], dtypes)
    return {entry.name: entry.make() for entry in entries}


@pytest.fixture
def written(tmp_path):
    """Writes a case, and returns the path, the model and the values."""

    def write(case, kind=Kind.F32, **more):
        model, path = MODELS[case], tmp_path / f"{case}.gguf"
        params = random_params(model)
        write_gguf(path, model, published(model, params), kind, **more)
        return path, model, params

    return write


@pytest.mark.parametrize("case", CONFIGS)
def test_a_file_is_the_model_that_was_converted(case, written):
    path, model, params = written(case)
    assert load_model(path) == model
    assert weights_of(str(path)) == str(path)
    found = load_params(model, path)
    assert found.keys() == params.keys()
    for name, value in params.items():  # 1 is added to a gemma's norms and taken away again
        atol = 1.2e-7 if model.family.startswith("gemma") and "norm" in name else 0
        np.testing.assert_allclose(found[name], value, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q5_1, Kind.Q4_0, Kind.BF16, Kind.F16])
def test_quantised_matrices_are_widened(case, kind, written):
    """Each row is rounded by itself, so rows in another order, and stacked ones, are those of the published tensor."""
    path, model, params = written(case, kind)
    with open_tensors(model, path) as tensors:
        found = {name: tensor[tuple(map(slice, [0] * 9, tensor.shape))] for name, tensor in tensors.items()}
        dtypes = {tensor.dtype for tensor in tensors.values()}
    assert dtypes == {DTYPES["fp16" if kind == Kind.F16 else "bf16"]}
    block, rounded = gguf.GGML_QUANT_SIZES[kind][0], 0
    for name, value in published(model, params).items():
        turned = model.family == "gpt2" and ".h." in name and value.ndim > 1
        value = value.T if turned else value
        if value.ndim > 1 and value.shape[-1] % block == 0:
            value = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(value), kind), kind)
            rounded += 1
        np.testing.assert_array_equal(found[name], value.T if turned else value, err_msg=name)
    assert rounded > 5


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.Q3_K, Kind.IQ4_XS, Kind.Q5_0, Kind.F32, Kind.BF16])
def test_a_box_reads_its_own_blocks_alone(kind):
    rng, (size, num_bytes) = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[kind]
    # bytes whose halves of floats are finite
    data = rng.integers(0, 0x60, (4, 768 // size * num_bytes)).astype(np.uint8)
    rows = np.asarray([2, 0, 3, 1])
    whole = gguf.quants.dequantize(data, kind)
    asked = []

    class Watched(np.ndarray):
        def __getitem__(self, box):
            found = np.ndarray.__getitem__(self, box)
            asked.append(found.size)
            return np.asarray(found)

    tensor = GgufTensor(data.view(Watched), kind, DTYPES["bf16"], rows)
    assert tensor.shape == whole.shape == (4, 768)
    np.testing.assert_array_equal(tensor[slice(1, 3), slice(250, 300)], whole[[0, 3], 250:300])
    assert asked[-1] == 2 * num_bytes * (-(-300 // size) - 250 // size)
    np.testing.assert_array_equal(GgufTensor(data, kind, DTYPES["bf16"], transposed=True)[slice(5, 9), slice(1, 4)],
                                  whole[1:4, 5:9].T)  # fmt: skip


QUICK, PEERS = ("llama", "gemma3"), ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma2", "phi3", "gpt2")
"""Cases whose weights transformers reads from GGUF; the config is given, as it reads less of that."""


@pytest.mark.peer
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in PEERS)])
def test_logits_are_those_of_transformers(case, written, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    transformers = pytest.importorskip("transformers")
    path, model, _ = written(case, Kind.Q8_0)
    config = transformers.AutoConfig.for_model(**CONFIGS[case], **dict.fromkeys(NO_TOKENS))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    expected = theirs.eval()(torch.tensor(TOKENS, dtype=torch.long)).logits.detach().numpy()
    found = jax.jit(logits_fn(model))(load_params(model, path, None, jnp.float32), jnp.asarray(TOKENS))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# -- folders ------------------------------------------------------------------------------------------


def test_a_file_is_opened_as_a_folder_with_what_is_beside_it(written, tmp_path):
    path, model, _ = written("llama", Kind.Q8_0)
    folder = as_folder(path)
    assert folder.name == "llama"
    assert as_folder(folder) == folder
    assert as_folder(path) == folder
    opened = open_model(path)
    assert (opened.model, opened.dtype) == (model, "bf16")
    assert opened.text.decode([3, 4]) == "3 4"  # it has no tokenizer
    assert as_folder(tmp_path) == folder  # the only model there
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert (as_folder(path) / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert as_folder(path) != folder


def test_answers_end_with_what_the_template_writes_after_one(written, tmp_path):
    """Also where the template is beside the file, whose metadata ends texts with another token, or with none."""
    tokens = ["<|im_end|>", *map(chr, range(ord("!"), ord("~")))]
    types = [CONTROL] + [NORMAL] * (len(tokens) - 1)
    path, _, _ = written(
        "llama", tokenizer_model="gpt2", tokenizer_pre="gpt-2", token_list=tokens, token_types=types, eos_token_id=7
    )
    assert open_model(path).end_tokens == {7}
    assert open_model(path).text.decode([0, 40, 41]) == tokens[40] + tokens[41]
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    assert open_model(path).end_tokens == {7, 0}


def test_a_folder_with_a_config_keeps_it(written, tmp_path):
    path, model, params = written("llama")
    folder = tmp_path / "folder"
    shutil.copytree(as_folder(path), folder)
    assert as_folder(folder) == folder
    np.testing.assert_array_equal(load_params(model, folder)["embed"], params["embed"])


def test_an_adapter_may_name_a_file_as_its_base(written, tmp_path):
    path, _, _ = written("llama")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{path}"}}')
    assert base_folder(tmp_path / "adapter") == as_folder(path)


def test_a_model_in_several_files_is_one(written, tmp_path):
    path, model, params = written("llama")
    names = [f"big-{number:05}-of-00002.gguf" for number in (1, 2)]
    for name, half in zip(names, (lambda n: "blk.0" in n, lambda n: "blk.0" not in n), strict=True):
        reader = gguf.GGUFReader(path)
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        for field in reader.fields.values():
            if not field.name.startswith(("GGUF.", "general.arch")):
                writer.add_key_value(field.name, field.contents(), field.types[0])
        for tensor in reader.tensors:
            if half(tensor.name):
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    path.unlink()
    for place in (tmp_path, tmp_path / names[1]):
        assert load_model(place).name == "big"
        for name, value in load_params(model, place).items():
            np.testing.assert_array_equal(value, params[name])
    (tmp_path / names[0]).unlink()
    with pytest.raises(InputError, match=r"big-00001-of-00002\.gguf is missing, one of 2 files of big\. Fetch it\."):
        load_model(tmp_path / names[1])


# -- files that are no models -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is cut short: it ends in its header. Fetch it again."),
        (lambda data: b"PK\3\4" + data[4:], "is not a GGUF file. Fetch it again."),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "is GGUF version 0x1; 2 and 3 are read"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "is GGUF version 0x3000000; 2 and 3 are read"),
        (lambda data: data[:200], "is cut short: it ends in its header. Fetch it again."),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "is cut short|has .* twice, or with"),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], "is cut short|has a value of type"),
        (lambda data: data[:24] + b"\xff" * 8 + data[32:], "is cut short: it ends in its header"),
        (lambda data: data[:-900], "is cut short or damaged: .* bytes and has .*. Fetch it again."),
        (
            lambda data: data.replace(b"llama", b"bloom"),
            "the architecture 'bloom' is not read from GGUF. Known: ",
        ),
    ],
)
def test_a_file_that_is_no_model_is_refused_in_one_line(change, message, written, tmp_path):
    path, model, _ = written("llama")
    broken = tmp_path / "broken" / "model.gguf"
    broken.parent.mkdir()
    broken.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=message) as error:
        load_params(model, broken)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"head_count": "four"}, "metadata that no model has"),
        ({"head_count": 0}, r"its metadata lacks llama.attention.head_count, or has 0 there. Fetch it again."),
        ({"block_count": [1, 2]}, "num_hidden_layers is .* Write a whole number"),
        ({"rope_scaling_type": "ntk"}, "rope_type 'ntk' is not known"),
        ({"logit_scale": 0.5}, "the key 'logit_scale' of a llama config is not known, so that its 0.5 may change"),
    ],
)
def test_metadata_that_no_model_has_is_refused(more, message, written, monkeypatch):
    kinds = {str: "add_string", int: "add_uint32", list: "add_array", float: "add_float32"}
    keys = {"head_count": "attention.head_count", "rope_scaling_type": "rope.scaling.type"}

    def added(name):
        def add(writer, value):
            getattr(writer, kinds[type(value)])(f"llama.{keys.get(name, name)}", value)

        return add

    for name in more:
        monkeypatch.setattr(gguf.GGUFWriter, f"add_{name}", added(name))
    path, _, _ = written("llama", **more)
    with pytest.raises(InputError, match=message):
        load_model(path)


def test_types_and_tensors_that_are_not_known_are_named(written, tmp_path):
    path, model, _ = written("llama")
    data = bytearray(path.read_bytes())
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", 99)
    path.write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"token_embd\.weight is of type 99, which the installed package gguf"):
        load_params(model, path)
    data[at : at + 4] = struct.pack("<I", 0)
    path.write_bytes(bytes(data[: at + 4]) + struct.pack("<Q", 7) + bytes(data[at + 12 :]))
    with pytest.raises(InputError, match=r"token_embd\.weight begins at no multiple of 32 bytes\. Fetch it again"):
        load_params(model, path)
    path.write_bytes(bytes(data).replace(b"ffn_up", b"ffn_ap"))
    with pytest.raises(InputError, match=r"the checkpoint lacks model\.layers\.0\.mlp\.up_proj\.weight"):
        load_params(model, path)


def test_a_folder_with_several_models_asks_for_one(written, tmp_path):
    path, _, _ = written("llama")
    shutil.copy(path, tmp_path / "other.gguf")
    with pytest.raises(InputError, match=r"has 2 models: llama, other\. Give the file of one of them\."):
        load_model(tmp_path)
    (tmp_path / "other.gguf").rename(tmp_path / "mmproj-other.gguf")  # a vision tower beside its model
    assert load_model(tmp_path) == MODELS["llama"]


def test_without_the_package_a_line_says_how_to_install_it(written, monkeypatch):
    path, model, _ = written("llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert load_model(path) == model
    with pytest.raises(InputError, match=r"needs gguf: pip install 'meshwright\[gguf\]'"):
        load_params(model, path)


def test_blocks_are_widened_with_a_line(written):
    path, _, _ = written("llama", Kind.Q8_0)
    (note,) = open_model(path).notes
    assert note.startswith("the Q8_0 weights have blocks of GGUF, for which there is no kernel: served in bf16, ")
