import json

import pytest
from msgspec.structs import replace

from meshwright.core.errors import InputError
from meshwright.spec import catalogue
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.hf.write import config_from_model, text_model
from meshwright.spec.model import Encoder, Model, RopeScaling


def read_back(model: Model) -> Model:
    return model_from_config(json.loads(json.dumps(config_from_model(model))), model.name)


@pytest.mark.parametrize("name", catalogue.models())
def test_every_model_of_the_catalogue_survives_the_round_trip(name):
    """In keys that transformers has."""
    model = catalogue.load_model(name)
    assert read_back(model) == text_model(model)
    assert "meshwright" not in config_from_model(model)


LONGROPE = RopeScaling(
    kind="longrope", factor=4.0, original_max_positions=512, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8
)
YARN = RopeScaling(kind="yarn", factor=8.0, original_max_positions=256, beta_fast=16.0, truncate=False)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama3-8b", {"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
        ("mistral-7b", {"sliding_window": None, "sliding_layers": ()}),
        ("qwen3-8b", {"sliding_window": 128, "sliding_layers": (2, 5), "rope_scaling": YARN}),
        ("gemma2-9b", {"sliding_window": None, "sliding_layers": (), "attention_softcap": None}),
        ("gemma3-27b", {"sliding_layers": (0, 3), "rope_scaling": None}),
        ("phi3-mini", {"rope_scaling": LONGROPE, "max_positions": 2048, "rope_fraction": 0.5}),
        ("phi3-mini", {"rope_scaling": replace(LONGROPE, factor=3.0, attention_factor=1.1), "max_positions": 2048}),
        ("mixtral-8x7b", {"sliding_window": 64, "sliding_layers": tuple(range(32))}),
        ("qwen3-30b-a3b", {"dense_layers": (1, 3), "gates_sum_to_one": False}),
        ("gpt-oss-20b", {"rope_scaling": None}),
        ("llama4-scout", {"sliding_layers": (0, 1, 3), "query_temper": 0.0, "dense_layers": (1, 2)}),
        ("llama4-maverick", {"sliding_window": None, "sliding_layers": (), "unrotated_layers": (1, 2)}),
        ("gpt2", {"tied_embeddings": False, "d_ff": 1000}),
        ("falcon-40b", {"shared_norm": True}),
        ("falcon-7b", {"num_kv_heads": 71, "tied_embeddings": False}),
        (
            "falcon-7b",
            {"parallel_block": False, "shared_norm": False, "qkv_bias": True, "out_bias": True} | {"mlp_bias": True},
        ),
        ("gpt-neox-20b", {"parallel_block": False, "qkv_bias": False, "out_bias": False, "rope_theta": 500.0}),
        ("gpt-j-6b", {"rope_fraction": 0.5, "d_ff": 1000}),
        ("starcoder", {"num_kv_heads": 48}),
        ("opt-125m", {"qkv_bias": False, "out_bias": False, "mlp_bias": False}),
        ("command-r7b", {"sliding_layers": (0, 3), "unrotated_layers": (1, 2, *range(4, 32)), "logit_multiplier": 0.3}),
        ("stablelm-3b", {"head_qk_norm": True, "parallel_block": True, "shared_norm": True, "qkv_bias": True}),
    ],
)
def test_what_differs_from_the_published_model_survives_too(name, changes):
    model = replace(text_model(catalogue.load_model(name)), **changes)
    assert read_back(model) == model


def test_a_nested_decoder_is_written_as_the_text_model_it_is():
    nested = replace(catalogue.load_model("gemma3-27b"), weights_prefix="language_model.model.")
    assert config_from_model(nested)["model_type"] == "gemma3_text"
    assert read_back(nested).weights_prefix == "model."


def test_what_a_family_has_no_keys_for_is_kept():
    """As options set it: an encoder beside a llama, a bound on scores. Others read the rest."""
    encoder = Encoder(num_layers=2, length=8, start_token=3)
    model = replace(catalogue.load_model("tiny"), encoder=encoder, attention_softcap=30.0, relative_buckets=8)
    written = config_from_model(model)
    assert written["meshwright"].keys() == {"encoder", "attention_softcap", "relative_buckets"}
    assert read_back(model) == model
    for own_fields, words in (({"colour": 1}, "colour is not a field"), (5, "meshwright is 5"), ({"d_ff": 0}, "d_ff")):
        with pytest.raises(InputError, match=words):
            model_from_config(written | {"meshwright": own_fields}, "x")
