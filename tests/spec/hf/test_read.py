"""Hugging Face configs: spellings, defaults and one clear line for each thing that can be wrong."""

import json

import pytest

from meshwright.core.errors import InputError
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import RopeScaling
from tests.nn.families import CONFIGS

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own deprecations

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
# What a config of the family must say itself; everything else is left to the defaults.
REQUIRED = {
    "llama": {},
    "mistral": {"num_attention_heads": 8},
    "qwen2": {"num_attention_heads": 32},
    "qwen3": {"num_attention_heads": 32},
    "gemma": {"num_attention_heads": 16},
    "gemma2": {},
    "gemma3_text": {},
    "gpt2": {},
    "phi3": {"pad_token_id": 0},
    "mixtral": {"num_attention_heads": 8},
    "qwen2_moe": {
        "num_attention_heads": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": {
        "num_attention_heads": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": {"num_attention_heads": 8, "num_local_experts": 4},
    "olmo2": {},
    "smollm3": {"pad_token_id": 0},
    "glm4": {"pad_token_id": 0},
    "granite": {},
    "glm4_moe": {"num_attention_heads": 8, **_ROUTED},
    "solar_open": {"num_attention_heads": 8, **_ROUTED},
    "dots1": {"num_attention_heads": 32, "n_group": 1, "topk_group": 1, **_ROUTED},
    "exaone4": {"num_attention_heads": 32},
    "exaone_moe": {"num_attention_heads": 32, "num_experts": 8, "moe_intermediate_size": 32},
    "hy_v3": {"num_attention_heads": 8, "num_experts": 8, "moe_intermediate_size": 32},
    "minimax_m2": {"num_attention_heads": 8, "num_local_experts": 8},
    "olmo3": {},
    "seed_oss": {"num_attention_heads": 8},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_intermediate_size": 32},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "arcee": {},
    "starcoder2": {"num_attention_heads": 8},
    "nemotron": {},
    "stablelm": {"num_attention_heads": 32},
    "phi": {},
    "cohere": {},
    "cohere2": {},
    "gpt_neox": {},
    "falcon": {},
    "opt": {"ffn_dim": 80},
    "gpt_bigcode": {},
    "gptj": {"rotary_dim": 8},
    "ministral3": {"num_attention_heads": 8},
    "mistral4": {"num_attention_heads": 32, **_ROUTED},
    "llama4_text": {"num_attention_heads": 8, "intermediate_size_mlp": 80, "num_local_experts": 4},
}


OWN_D_FF = ("gpt2", "falcon", "opt", "gpt_bigcode", "gptj")
"""Families that have no key intermediate_size."""


_T5 = {"d_model": 64, "d_kv": 24, "d_ff": 96, "num_layers": 3, "num_heads": 4, "vocab_size": 128}
_BART = {"d_model": 64, "vocab_size": 128}
_BART |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
_BART |= {"encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
PAIRS = {"t5": _T5, "mt5": _T5, "umt5": _T5, "bart": _BART, "mbart": _BART, "marian": _BART, "whisper": _BART}
"""The same of encoder-decoders, in their own spelling."""


@pytest.mark.parametrize("model_type", PAIRS)
def test_absent_keys_of_encoder_decoders_mean_what_transformers_means(model_type):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.AutoConfig.for_model(model_type, **PAIRS[model_type])
    ours = model_from_config({"model_type": model_type, **PAIRS[model_type]})
    assert ours.num_kv_heads == ours.num_heads
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    if "decoder_layers" in PAIRS[model_type]:
        assert (ours.activation, ours.embed_scale) == (theirs.activation_function, theirs.scale_embedding)
        positions = ours.max_positions, ours.encoder.max_positions, ours.encoder.length
        if model_type == "whisper":
            assert positions == (theirs.max_target_positions, *(theirs.max_source_positions,) * 2)
            assert ours.encoder.features == theirs.num_mel_bins
        else:
            assert positions == (theirs.max_position_embeddings,) * 3
        return
    assert (ours.num_layers, ours.encoder.num_layers) == (theirs.num_decoder_layers, theirs.num_layers)
    assert (ours.gated, ours.activation) == (theirs.is_gated_act, theirs.dense_act_fn)
    buckets = theirs.relative_attention_num_buckets, theirs.relative_attention_max_distance
    assert (ours.relative_buckets, ours.relative_distance) == buckets
    assert ours.norm_eps == theirs.layer_norm_epsilon


def test_a_head_of_its_own_is_read_from_the_file_and_from_what_transformers_made_of_it():
    """transformers 5 says tied in any case; its T5 has no divided stream in a model whose file said otherwise."""
    files = [{"tie_word_embeddings": False}, {"tie_word_embeddings": True, "scale_decoder_outputs": False}]
    for keys in files:
        model = model_from_config({"model_type": "t5", **_T5, **keys})
        assert (model.tied_embeddings, model.logit_divisor) == (False, 1.0)
    assert model_from_config({"model_type": "t5", **_T5}).logit_divisor == 8.0
    assert model_from_config({"model_type": "mt5", **_T5}).logit_divisor == 1.0


@pytest.mark.parametrize("model_type", REQUIRED)
def test_absent_keys_mean_what_transformers_means(model_type):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    keys = {**LLAMA, **REQUIRED[model_type]}
    keys.pop("model_type")
    if model_type in OWN_D_FF:
        keys.pop("intermediate_size")
    theirs = transformers.AutoConfig.for_model(model_type, **keys)
    ours = model_from_config({"model_type": model_type, **keys})
    num_kv_heads = 1 if getattr(theirs, "multi_query", False) else ours.num_heads
    assert ours.num_kv_heads == (getattr(theirs, "num_key_value_heads", None) or num_kv_heads)
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.max_positions == theirs.max_position_embeddings
    eps_names = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
    assert ours.norm_eps == next((getattr(theirs, name) for name in eps_names if hasattr(theirs, name)), 1e-5)
    kinds = getattr(theirs, "layer_types", None)
    if kinds is not None:
        assert ours.sliding_layers == tuple(i for i, kind in enumerate(kinds) if kind != "full_attention")
    rope = getattr(theirs, "rope_parameters", None)
    if model_type in ("gemma3_text", "olmo3"):
        assert ours.rope_local_theta == rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if rope is not None:
        assert ours.rope_theta == rope["rope_theta"]
        assert (ours.rope_scaling.kind if ours.rope_scaling else "default") == rope["rope_type"]


def test_layers_of_llama4_are_those_that_are_listed_or_every_so_many():
    keys = LLAMA | REQUIRED["llama4_text"] | {"model_type": "llama4_text", "num_hidden_layers": 8, "head_dim": 8}
    model = model_from_config(
        keys | {"interleave_moe_layer_step": 2, "no_rope_layers": [], "attn_temperature_tuning": 4}
    )
    assert (model.moe_layers, model.unrotated_layers, model.sliding_layers) == (
        (1, 3, 5, 7),
        (3, 7),
        (0, 1, 2, 4, 5, 6),
    )
    assert (model.query_temper, model.temper_length, model.sliding_window) == (0.1, 8192, 8192)
    listed = {"moe_layers": [2], "no_rope_layers": [0, *[1] * 7], "attention_chunk_size": None}
    model = model_from_config(keys | listed | {"attn_temperature_tuning": False})
    assert (model.moe_layers, model.unrotated_layers, model.sliding_layers) == ((2,), (0,), ())
    assert (model.query_temper, model.sliding_window) == (0.0, None)


def test_an_opt_with_a_projection_or_norms_after_is_refused():
    """opt-350m has both."""
    opt = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(InputError, match=r"^toy: word_embed_proj_dim is 32 and hidden_size 64\. .*opt-350m"):
        model_from_config(opt | {"vocab_size": 128, "word_embed_proj_dim": 32}, "toy")
    with pytest.raises(InputError, match=r"^toy: do_layer_norm_before is False\. Only True is known here\.$"):
        model_from_config(opt | {"vocab_size": 128, "do_layer_norm_before": False}, "toy")


def test_both_spellings_of_rope_give_the_same_model():
    older = LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}
    newer = LLAMA | {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3_ROPE}}
    assert model_from_config(older) == model_from_config(newer)
    assert model_from_config(older).rope_scaling == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )


def test_older_name_of_the_rope_type():
    model = model_from_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert model.rope_scaling == RopeScaling(kind="linear", factor=4.0)


@pytest.mark.peer
@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_gelu_is_read_as_transformers_reads_it(family):
    """The first Gemma's released configs say gelu and mean its approximation by tanh; later ones say which."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    key = "hidden_act" if family == "gemma" else "hidden_activation"
    theirs = transformers.AutoConfig.for_model(family, **{key: "gelu"})
    ours = model_from_config(LLAMA | {"model_type": family, key: "gelu"} | REQUIRED[family])
    assert ours.activation == getattr(theirs, key) == ("gelu_pytorch_tanh" if family == "gemma" else "gelu")


def test_gemma3_of_the_newer_spelling_has_a_theta_per_kind_of_layer():
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    text = {"hidden_size": 64, "num_hidden_layers": 12, "rope_parameters": rope}
    model = model_from_config({"model_type": "gemma3", "text_config": text})
    assert (model.rope_theta, model.rope_local_theta, model.rope_scaling.factor) == (1e6, 10000.0, 8.0)
    assert model.weights_prefix == "language_model.model."
    assert [layer for layer in range(12) if layer not in model.sliding_layers] == [5, 11]


def test_null_differs_from_absent():
    assert model_from_config(LLAMA | {"model_type": "mistral", "num_key_value_heads": 4}).sliding_window == 4096
    no_window = LLAMA | {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": None}
    assert model_from_config(no_window).sliding_window is None


def test_qwen_windows_are_off_unless_switched_on():
    keys = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 4, "sliding_window": 16, "max_window_layers": 1}
    assert model_from_config(keys).sliding_layers == ()
    assert model_from_config(keys | {"use_sliding_window": True}).sliding_layers == (1,)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "lama"}, "toy: model_type 'lama' is not known. Did you mean 'llama'?"),
        ({"hidden_size": "64"}, "toy: hidden_size is '64'. Write a whole number instead."),
        ({"num_hidden_layers": True}, "toy: num_hidden_layers is True. Write a whole number instead."),
        ({"tie_word_embeddings": 1}, "toy: tie_word_embeddings is 1. Write true or false instead."),
        ({"hidden_size": -64}, "toy: hidden_size is -64. Write a number that is not negative."),
        (
            {"num_attention_heads": 3},
            "toy: num_attention_heads=3 does not divide hidden_size=64, and head_dim is not given. "
            "Set head_dim, or a number of heads that divides 64.",
        ),
        (
            {"num_key_value_heads": 3},
            "toy: num_key_value_heads=3 does not divide num_attention_heads=4. Use a divisor of 4.",
        ),
        (
            {"rope_scaling": {"rope_type": "lama3"}},
            "toy: rope_type 'lama3' is not known. Did you mean 'llama3'?",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": ["a"]}},
            "toy: short_factor is not a list of numbers. Write numbers only.",
        ),
        (
            {"model_type": "deepseek_v2", "n_routed_experts": 2, "num_experts_per_tok": 1, "kv_lora_rank": 0}
            | {"moe_intermediate_size": 8},
            "toy: kv_lora_rank=0 must be at least 1.",
        ),
        ({"rope_scaling": {"rope_type": [1]}}, "toy: rope_type is [1]. Write a name in quotes instead."),
        ({"num_hidden_layers": 400_000_000}, "toy: num_hidden_layers is 400,000,000. Write at most 10,000."),
        ({"vocab_size": 10**400}, "toy: vocab_size is a number of 401 digits: give a finite number, at most 1e+60."),
        ({"rope_theta": float("nan")}, "toy: rope_theta is nan: give a finite number, at most 1e+60."),
        (
            {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
            | {"mlp_only_layers": [[1]]},
            "toy: mlp_only_layers is [[1]]. Write a list of numbers.",
        ),
        ({"rope_scaling": "yes"}, "toy: rope_scaling is 'yes'. Write an object or null instead."),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "toy: the key 'low_freq_factor' is missing. A llama config needs it: add it to the file.",
        ),
        (
            {"model_type": "gpt_oss", "num_local_experts": 4, "num_key_value_heads": 4, "layer_types": ["x"]},
            "toy: layer_types has 1 entries for num_hidden_layers=2. Give one entry per layer.",
        ),
    ],
)
def test_bad_values_are_refused_in_one_line(change, text):
    with pytest.raises(InputError) as caught:
        model_from_config(LLAMA | change, "toy")
    assert str(caught.value) == text


def test_sizes_that_do_not_suit_are_told_by_the_keys_of_the_file():
    """A name of the family's, another spelling that the file has, groups of experts, and fields that are its own."""
    wrong_sizes = [
        ("gpt2", {"n_head": 3}, "n_head=3 does not divide n_embd="),
        ("mixtral", {"num_experts_per_tok": 99}, "num_experts_per_tok=99 of num_local_experts="),
        ("glm4_moe", {"n_group": 4}, "n_group=4 and topk_group="),
        ("t5", {"decoder_start_token_id": 999}, "decoder_start_token_id=999 is no token of the"),
        ("llama", {"meshwright": {"d_ff": 0}}, "d_ff=0 must be at least 1"),
    ]
    for family, keys, words in wrong_sizes:
        with pytest.raises(InputError) as caught:
            model_from_config(CONFIGS[family] | keys, "toy")
        assert str(caught.value).startswith(f"toy: {words}")


def test_the_longer_contexts_of_a_hunyuan_are_a_larger_theta():
    """By the width of its heads, which the file may leave out."""
    keys = CONFIGS["hunyuan_v1_dense"] | {"rope_theta": 1e4}
    scaled = {"rope_scaling": {"type": "dynamic", "alpha": 50.0}}
    theta = {width: model_from_config(keys | scaled | {"head_dim": width}, "toy").rope_theta for width in (12, None)}
    width_left_out = keys["hidden_size"] // keys["num_attention_heads"]
    assert theta == pytest.approx(
        {12: 1e4 * 50 ** (12 / 10), None: 1e4 * 50 ** (width_left_out / (width_left_out - 2))}
    )
    for alpha, width, words in (("x", 12, "alpha is 'x'"), (-1.0, 12, "alpha is -1"), (50.0, 2, "heads 2 wide")):
        wrong = {"rope_scaling": {"type": "dynamic", "alpha": alpha}, "head_dim": width}
        with pytest.raises(InputError, match=words):
            model_from_config(keys | wrong, "toy")


def test_impossible_sizes_are_told_with_the_file(tmp_path):
    """The model's name is that of its folder."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 0}))
    with pytest.raises(InputError) as caught:
        model_from_config(tmp_path)
    assert str(caught.value) == f"{tmp_path / 'config.json'}: num_hidden_layers=0 must be at least 1."


@pytest.mark.parametrize(
    ("key", "given", "text"),
    [
        ("vocab_size", {}, "the key 'vocab_size' is missing. A llama config needs it: add it to the file."),
        (
            "hidden_size",
            {"hiden_size": 64},
            "the key 'hidden_size' is missing. The file has 'hiden_size': rename it to 'hidden_size'.",
        ),
        ("model_type", {}, "the key 'model_type' is missing. Add one of: llama, mistral"),
    ],
)
def test_missing_keys_are_named(key, given, text):
    keys = {name: value for name, value in LLAMA.items() if name != key} | given
    with pytest.raises(InputError) as caught:
        model_from_config(keys)
    assert str(caught.value).startswith(f"config: {text}")


def test_messages_name_a_key_as_its_family_does():
    with pytest.raises(InputError, match=r"the key 'n_layer' is missing\. A gpt2 config needs it"):
        model_from_config({"model_type": "gpt2", "n_embd": 8, "n_head": 2}, "toy")
    with pytest.raises(InputError, match=r"^toy: n_layer is 400,000\. Write at most 10,000\.$"):
        model_from_config({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 400_000}, "toy")


@pytest.mark.parametrize(("key", "need"), [("hidden_size", "a whole number"), ("attention_bias", "true or false")])
def test_a_key_that_is_null_is_not_called_missing(key, need):
    with pytest.raises(InputError) as caught:
        model_from_config(LLAMA | {key: None})
    assert str(caught.value) == f"config: {key} is null. Write {need} instead."


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            '{"model_type": "llama",\n "hidden_size": }',
            r"config\.json:2:17: broken JSON \(Expecting value\)\. Mend the file",
        ),
        ("[1, 2]", r"config\.json holds no JSON object\. Mend the file"),
        (b"\xff\xfe\x00", r"config\.json is not text in UTF-8 \(byte 0\)\. Mend the file"),
        ("", r"config\.json:1:1: broken JSON \(Expecting value\)"),
    ],
)
def test_broken_files_say_where(tmp_path, content, text):
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=text):
        model_from_config(tmp_path)


def test_missing_files_and_empty_folders(tmp_path):
    for path in (tmp_path, tmp_path / "nothing.json"):
        with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\)\. Give the path of"):
            model_from_config(path)


def test_names_come_from_the_folder_or_the_file(tmp_path):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "other.json").write_text(json.dumps(LLAMA))
    assert model_from_config(folder).name == "my-llama"
    assert model_from_config(folder / "other.json").name == "other"
    assert model_from_config(folder, "given").name == "given"


def test_layers_of_gemma4_are_named_as_transformers_writes_them():
    """With a leading zero from ten layers on."""
    keys = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    keys |= {"intermediate_size": 48, "num_hidden_layers": 12, "hidden_size_per_layer_input": 0}
    layer_types = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    table = {"05": {"head_dim": 16}, "11": {"head_dim": 16}}
    model = model_from_config(
        keys | {"model_type": "gemma4_text", "layer_types": layer_types, "per_layer_config": table}, "x"
    )
    assert model.global_head_dim == 16
    with pytest.raises(InputError, match="alike in all layers without a window"):
        model_from_config(
            keys
            | {"model_type": "gemma4_text", "layer_types": layer_types, "per_layer_config": {"05": {"head_dim": 16}}},
            "x",
        )


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("t5", "relative_attention_num_buckets"),
        ("whisper", "num_mel_bins"),
        ("llama4", "attention_chunk_size"),
        ("gemma4", "sliding_window"),
    ],
)
def test_zeros_that_mean_nothing_are_refused(case, key):
    with pytest.raises(InputError, match=rf"{key} is 0|sliding_window=0"):
        model_from_config(CONFIGS[case] | {key: 0}, "x")
