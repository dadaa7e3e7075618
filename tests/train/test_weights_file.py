import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from meshwright.core.errors import InputError
from meshwright.nn.weights import init_params, params_from_hf
from meshwright.spec.weights import num_params
from meshwright.train.tokenizer import save_tokenizer, train_tokenizer
from meshwright.train.weights_file import hf_tensors, load_run, save_weights
from tests.train.small import MODEL as MINI

MODEL = replace(MINI, head_dim=12)
"""N * H is not D, so that a projection the wrong way round has another shape."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights_come_back_from_hugging_face_names(tied, dtype, tmp_path):
    model = replace(MODEL, tied_embeddings=tied)
    params = init_params(model, 0, dtype=dtype)
    save_weights(model, params, tmp_path)
    stored = load_file(tmp_path / "weights.safetensors")
    assert stored["model.layers.1.self_attn.k_proj.weight"].shape == (24, 32)
    assert stored["model.layers.1.self_attn.o_proj.weight"].shape == (32, 48)
    assert sum(t.size for t in stored.values()) == num_params(model)
    found = params_from_hf(model, stored)
    assert found.keys() == params.keys()
    for name, expected in params.items():
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected))


def test_a_run_is_read_back(tmp_path):
    save_weights(MODEL, init_params(MODEL, 0), tmp_path)
    save_tokenizer(train_tokenizer(["some text"], vocab_size=300), tmp_path / "tokenizer.json")
    model, params, tokenizer = load_run(tmp_path)
    assert replace(model, name=MODEL.name) == MODEL
    assert params["wq"].shape == (2, 32, 4, 12)
    assert tokenizer.decode(tokenizer.encode("some text").ids) == "some text"


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(InputError, match=r"has no weights.safetensors. Give the folder of a finished run"):
        load_run(tmp_path)


@pytest.mark.peer
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_takes_the_tensors(tied):
    torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    transformers = pytest.importorskip("transformers")
    from meshwright.spec.hf import config_from_model

    model = replace(MODEL, tied_embeddings=tied)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_from_model(model)))
    tensors = {n: torch.tensor(t) for n, t in hf_tensors(model, init_params(model, 0)).items()}
    expected = {n: p.shape for n, p in theirs.named_parameters()}
    assert {n: t.shape for n, t in tensors.items()} == expected
