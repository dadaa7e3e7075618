import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from meshwright.nn.hf.beside import keep_beside
from meshwright.nn.hf.tokenizer import read_tokenizer
from meshwright.nn.hf.weights import load_params
from meshwright.nn.weights import init_params
from meshwright.serve.model_folder import open_model
from meshwright.spec.catalogue import has_weights
from meshwright.spec.weights import num_params
from meshwright.train.data.tokenizer import save_tokenizer, train_tokenizer
from meshwright.train.weights import save_weights
from tests.train.small import MODEL as MINI

MODEL = replace(MINI, head_dim=12)
"""N * H is not D, so that a projection the wrong way round has another shape."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run, and its weights."""
    folder = tmp_path_factory.mktemp("run")
    params = init_params(MODEL, 0, dtype=jnp.bfloat16)
    save_tokenizer(train_tokenizer(["some text"], vocab_size=300), folder / "tokenizer.json")
    save_weights(MODEL, params, folder)
    return folder, params


def test_a_run_leaves_a_hugging_face_folder(run):
    folder, _ = run
    stored = load_file(folder / "model.safetensors")
    assert stored["model.layers.1.self_attn.k_proj.weight"].shape == (24, 32)
    assert stored["model.layers.1.self_attn.o_proj.weight"].shape == (32, 48)
    assert sum(t.size for t in stored.values()) == num_params(MODEL)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")


def test_the_config_says_where_a_text_ends(run, tmp_path):
    folder, params = run
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 0
    save_weights(MODEL, params, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] is None


def test_the_config_has_the_token_numbers_of_the_source(run, tmp_path):
    """A fine-tuned model begins, ends and pads its texts as the one that it comes from."""
    tokenizer, source, tuned = run[0] / "tokenizer.json", tmp_path / "source", tmp_path / "run"
    for name, table in (("config.json", {"bos_token_id": 1, "pad_token_id": 3}), ("generation_config.json", {"x": 1})):
        source.mkdir(exist_ok=True)
        (source / name).write_text(json.dumps(table))
    shutil.copyfile(tokenizer, source / "tokenizer.json")
    tuned.mkdir()
    keep_beside(source, tuned, read_tokenizer(tokenizer))
    save_weights(MODEL, run[1], tuned)
    config = json.loads((tuned / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 0, 3]


def test_a_run_is_read_back(run):
    folder, params = run
    opened = open_model(folder)
    found = load_params(opened.model, folder)
    assert replace(opened.model, name=MODEL.name) == MODEL
    assert found.keys() == params.keys()
    for name, expected in params.items():
        assert found[name].dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected))
    assert opened.text.decode(opened.text.encode("some text")) == "some text"
    assert has_weights(folder)


def test_a_folder_without_weights_is_none(tmp_path):
    assert not has_weights(tmp_path)
