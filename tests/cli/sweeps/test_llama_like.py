"""Models of a given size."""

import pytest

from meshwright.cli.sweeps.fields import llama_like
from meshwright.core.errors import InputError
from meshwright.spec.catalogue import load_model
from meshwright.spec.weights import num_params


@pytest.mark.parametrize("size", ["500M", "1B", "3B", "7B", "13B", "30B", "70B", "175B", "405B", "1T", "10T"])
def test_a_model_of_about_that_size(size):
    found = llama_like(size)
    wanted = {"M": 1e6, "B": 1e9, "T": 1e12}[size[-1]] * float(size[:-1])
    assert num_params(found) == pytest.approx(wanted, rel=0.05)
    assert 40 < found.d_model / found.num_layers < 256
    assert found.num_heads % found.num_kv_heads == 0


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b"])
def test_the_published_models_come_out(name):
    published, found = load_model(name), llama_like(name.removeprefix("llama3-").upper())
    for field in ("num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        if (name, field) != ("llama3-70b", "d_ff"):
            assert getattr(found, field) == getattr(published, field)
    assert found.tied_embeddings == published.tied_embeddings


def test_sizes_out_of_range():
    with pytest.raises(InputError, match="size 1k is out of range"):
        llama_like("1k")
