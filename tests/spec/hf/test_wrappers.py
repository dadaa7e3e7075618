"""Which keys of a multimodal model's config are its decoder's, without any weights."""

import json

import pytest
from msgspec.structs import replace

from meshwright.core.errors import FileWarning, InputError
from meshwright.spec.hf.families import tables
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.hf.write import config_from_model
from meshwright.spec.model import FAMILIES

PLAIN = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 72,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def test_older_files_of_qwen_have_the_decoder_beside_the_other_parts():
    vision = {"depth": 2, "embed_dim": 8}
    nested = {"model_type": "qwen2_vl", "text_config": PLAIN | {"model_type": "qwen2_vl_text"}, "vision_config": vision}
    rope = {"type": "mrope", "mrope_section": [2, 2, 2]}
    flat = PLAIN | {"model_type": "qwen2_vl", "vision_config": vision, "vision_start_token_id": 7, "rope_scaling": rope}
    assert model_from_config(flat, "toy") == model_from_config(nested, "toy")
    assert model_from_config(flat, "toy").rope_theta == 1e6


@pytest.mark.parametrize(
    ("outer", "inner", "expected"), [(None, None, False), (None, True, True), (True, False, True), (False, True, False)]
)
def test_the_wrapper_says_whether_embeddings_are_tied(outer, inner, expected):
    text = PLAIN | {"model_type": "mistral"} | ({} if inner is None else {"tie_word_embeddings": inner})
    keys = {"model_type": "mistral3", "text_config": text}
    model = model_from_config(keys | ({} if outer is None else {"tie_word_embeddings": outer}))
    assert model.tied_embeddings is expected


def test_an_omni_model_has_its_decoder_two_levels_down():
    text = PLAIN | {"model_type": "qwen2_5_omni_text"}
    whole = {
        "model_type": "qwen2_5_omni",
        "thinker_config": {"model_type": "qwen2_5_omni_thinker", "text_config": text},
    }
    model = model_from_config(whole, "toy")
    assert model.weights_prefix == "thinker.model."
    assert replace(model, weights_prefix="model.") == model_from_config(whole["thinker_config"], "toy")


def test_a_file_of_a_multimodal_model_says_in_one_line_what_is_left_out(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": PLAIN | {"model_type": "llama"}})
    )
    with pytest.warns(FileWarning, match="of this llava the decoder of text is read; its other parts are left out"):
        model = model_from_config(tmp_path)
    written = config_from_model(model)
    assert (written["model_type"], written["architectures"]) == ("llama", ["LlamaForCausalLM"])


def test_a_decoder_that_is_not_known_is_refused_by_its_own_name():
    with pytest.raises(InputError, match="model_type 'qwen9' is not known"):
        model_from_config({"model_type": "llava", "text_config": PLAIN | {"model_type": "qwen9"}})


@pytest.mark.peer
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_sizes_that_files_of_llava_leave_out_are_those_of_transformers(family):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    keys = {"model_type": "llava_next", "text_config": {"model_type": family, "num_hidden_layers": 2}}
    model, theirs = model_from_config(keys, "toy"), transformers.AutoConfig.for_model(family, num_hidden_layers=2)
    assert (model.num_layers, model.d_model, model.d_ff) == (2, theirs.hidden_size, theirs.intermediate_size)
    assert (model.num_heads, model.vocab_size) == (theirs.num_attention_heads, theirs.vocab_size)
    with pytest.raises(InputError, match="key 'intermediate_size' is missing"):
        model_from_config({"model_type": "mistral3", "text_config": keys["text_config"] | {"hidden_size": 8}})


def test_a_wrapper_without_a_decoder_in_it_is_refused_by_its_own_name():
    """The first files of LLaVA have the keys of their decoder beside others."""
    with pytest.raises(InputError, match=r"^toy: a llava needs the key 'text_config', with its decoder\. Add it\.$"):
        model_from_config(PLAIN | {"model_type": "llava", "mm_hidden_size": 8}, "toy")
    with pytest.raises(InputError, match=r"^toy: model_type is \['llama'\]\. Write a name in quotes instead\.$"):
        model_from_config({"model_type": "llava", "text_config": PLAIN | {"model_type": ["llama"]}}, "toy")


def test_the_first_files_of_exaone_4_5_name_its_decoder_otherwise():
    text = PLAIN | {"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": "LLG"}
    keys = {"model_type": "exaone4_5", "text_config": text}
    old = {"model_type": "exaone4_5", "text_config": text | {"model_type": "exaone4_5_text"}}
    assert model_from_config(old, "toy") == model_from_config(keys, "toy")


def test_text_halves_are_of_families():
    assert {half["model_type"] for half in tables()["text_halves"].values()} <= set(FAMILIES)
