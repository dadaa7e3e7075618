"""The catalogue of published models: names, sources, and counts as their makers state them."""

from decimal import Decimal

import pytest

from meshwright.core.errors import InputError
from meshwright.spec import catalogue
from meshwright.spec.model import FAMILIES
from meshwright.spec.weights import num_active_params, num_params, weight_table

PUBLISHED = [name for name in catalogue.models() if catalogue.entry(name).published]
MIXTURES = [name for name in PUBLISHED if catalogue.entry(name).published.active_params]


def printed(text):
    """The count that is printed and one unit in its last digit: 46.7e9 and 0.1e9 for ``"46.7B"``."""
    digits = Decimal(text.rstrip("TBM"))
    scale = {"T": 10**12, "B": 10**9, "M": 10**6}.get(text[-1], 1)
    return digits * scale, Decimal(10) ** digits.as_tuple().exponent * scale


WITHOUT_ENTRY = {"exaone_moe", "arcee"}
"""Families whose published sizes are not all known."""


def test_catalogue_holds_the_models_people_ask_for():
    names = catalogue.models()
    assert len(names) >= 25
    assert {"llama3-8b", "llama3-70b", "llama3-405b", "llama2-13b", "gpt3-175b", "tiny"} <= set(names)
    assert {catalogue.load_model(name).family for name in names} == set(FAMILIES) - WITHOUT_ENTRY


@pytest.mark.parametrize("name", catalogue.models())
def test_every_file_names_its_source(name):
    entry = catalogue.entry(name)
    assert entry.source
    assert entry.published is None or entry.published.source
    assert catalogue.load_model(name).name == name


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_is_the_published_one(name):
    # Makers round or cut the last digit they print, so less than one unit of it may differ.
    stated, unit = printed(catalogue.entry(name).published.params)
    assert abs(num_params(catalogue.load_model(name)) - stated) < unit


@pytest.mark.parametrize("name", MIXTURES)
def test_active_parameters_are_the_published_ones(name):
    published = catalogue.entry(name).published
    model = catalogue.load_model(name)
    embedding = sum(row.num_params for row in weight_table(model) if row.part == "embedding")
    active = num_active_params(model) - (0 if published.active_counts_embedding else embedding)
    stated, unit = printed(published.active_params)
    assert abs(active - stated) < unit


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_llama_totals_to_the_last_parameter(name, total):
    assert num_params(catalogue.load_model(name)) == total


def test_tiny_is_what_the_demo_trains():
    tiny = catalogue.load_model("tiny")
    assert (tiny.family, tiny.num_layers, tiny.d_model, tiny.num_heads, tiny.num_kv_heads) == ("llama", 8, 256, 8, 4)
    assert (tiny.vocab_size, tiny.tied_embeddings, tiny.max_positions) == (4096, False, 2048)


def test_sliding_layers_of_published_models():
    assert catalogue.load_model("gemma3-27b").sliding_layers[:6] == (0, 1, 2, 3, 4, 6)
    assert catalogue.load_model("gpt-oss-20b").sliding_layers == tuple(range(0, 24, 2))
    assert catalogue.load_model("mixtral-8x7b").sliding_window is None
    assert catalogue.load_model("qwen2.5-72b").sliding_layers == ()


@pytest.mark.parametrize("given", ["llama3-7b", "lama3-8b", "../llama3-8b", "no/such/place"])
def test_unknown_names_are_refused_in_one_line(given):
    with pytest.raises(InputError) as caught:
        catalogue.load_model(given)
    assert "\n" not in str(caught.value)


def test_a_near_miss_names_the_nearest_model():
    with pytest.raises(InputError, match=r"^model 'lama3-8b' is neither in the catalogue.*Did you mean 'llama3-8b'\?$"):
        catalogue.load_model("lama3-8b")


def test_a_path_is_read_as_a_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}')
    assert catalogue.load_model(str(tmp_path)).d_ff == 32
    assert catalogue.load_model(str(tmp_path / "config.json")).name == tmp_path.name
