"""Every key of a config is honoured, known to be without effect, or refused or named."""

import copy
import json
from fnmatch import fnmatchcase

import pytest

from meshwright.core.errors import FileWarning, InputError
from meshwright.spec.hf.families import FIELDS_FILE, config_fields, formats, tables
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import FAMILIES
from tests.nn.families import CONFIGS
from tests.spec.hf.config_fields import table
from tests.spec.hf.test_read import LLAMA, OWN_D_FF, PAIRS, REQUIRED

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own deprecations

CASES = {name.removesuffix("_text"): LLAMA | keys | {"model_type": name} for name, keys in REQUIRED.items()}
CASES |= {name: {key: value for key, value in CASES[name].items() if key != "intermediate_size"} for name in OWN_D_FF}
CASES |= {name: keys | {"model_type": name} for name, keys in PAIRS.items()}


def refused(family: str, **keys) -> str:
    with pytest.raises(InputError) as caught:
        model_from_config(CASES[family] | keys, "toy")
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gemma3", "use_bidirectional_attention", True),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "sliding_window", 8),
        ("llama", "attention_dropout", 0.2),
        ("llama", "n_inner", 12),
        ("llama", "quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("llama", "quantization_config", {"quant_method": "mxfp4"}),
        ("gpt2", "head_dim", 8),
        ("gpt2", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("gpt2", "add_cross_attention", True),
        ("mistral", "attention_bias", True),
        ("mixtral", "router_jitter_noise", 0.1),
        ("deepseek_v2", "moe_layer_freq", 2),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v3", "rope_interleave", False),
        ("gpt_oss", "swiglu_limit", 5.0),
        ("falcon", "alibi", True),
        ("phi", "qk_layernorm", True),
        ("opt", "_remove_final_layer_norm", True),
        ("cohere2", "use_gated_activation", False),
        ("mbart", "tie_word_embeddings", False),
    ],
)
def test_keys_without_a_meaning_here_are_refused_by_name(family, key, value):
    text = refused(family, **{key: value})
    assert key in text.split(" is ")[0]
    assert "Only" in text or "Remove it" in text
    if key not in ("topk_method", "tie_word_embeddings"):
        assert model_from_config(CASES[family] | {key: None}) == model_from_config(CASES[family])


def test_a_message_says_what_to_write():
    assert refused("llama", num_atention_heads=4) == (
        "toy: the key 'num_atention_heads' of a llama config is not known, so that its 4 may change what the model "
        "computes. Remove it if it has no effect. Did you mean 'num_attention_heads'?"
    )
    assert refused("llama", quantization_config={"quant_method": "bitsandbytes"}) == (
        "toy: quantization_config is 'bitsandbytes'. Only fp8, compressed-tensors, awq, gptq, mxfp4 (of gpt_oss) is "
        "known here. Give the weights in one of these or in bf16, or take quantization_config out to plan the shapes "
        "alone."
    )
    assert refused("llama", rope_scaling={"rope_type": "linear", "factor": 2.0, "ramp": 3}).startswith(
        "toy: the key 'ramp' of a llama config is not known"
    )


def test_a_scaling_of_sliding_layers_is_refused():
    rope = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    assert "of sliding layers is" in refused("gemma3", rope_parameters=rope)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("lama", "llama"), ("GPT-OSS", "gpt_oss"), ("deepseek-v3", "deepseek_v3")]
    + [(name, "") for name in ("bloom", "mpt", "xglm", "llama5", "ministral")],
)
def test_only_a_spelling_of_a_family_is_suggested(name, meant):
    with pytest.raises(InputError) as caught:
        model_from_config(LLAMA | {"model_type": name}, "toy")
    hint = f"Did you mean {meant!r}?" if meant else f"Known: {', '.join(FAMILIES)}."
    assert str(caught.value) == f"toy: model_type {name!r} is not known. {hint}"


def test_a_family_whose_operation_is_missing_is_refused_by_that():
    with pytest.raises(InputError) as caught:
        model_from_config(LLAMA | {"model_type": "qwen3_next"}, "toy")
    assert str(caught.value) == (
        "toy: model_type 'qwen3_next' needs recurrent layers (gated delta nets), which this version does not have."
    )
    with pytest.raises(InputError, match="model_type 'bert' needs an encoder without a decoder, which this version"):
        model_from_config(LLAMA | {"model_type": "bert"}, "toy")
    refused = [name for names in tables()["missing_operations"].values() for name in names]
    assert len(set(refused)) == len(refused)
    assert not {*FAMILIES, *tables()["text_halves"], *tables()["wrappers"]} & {*refused}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma2", {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}),
        ("gemma3_text", {"cache_implementation": "hybrid", "sliding_window_pattern": 6}),
        (
            "smollm3",
            {"max_window_layers": 28, "use_sliding_window": False, "sliding_window": None, "pretraining_tp": 2},
        ),
        ("qwen3_moe", {"max_window_layers": 48, "num_local_experts": 4}),
        ("llama", {"forced_eos_token_id": 2, "max_new_tokens": 9, "prefill_chunk_size": 4, "initializer_range": 0.1}),
        ("deepseek_v3", {"pretraining_tp": 2, "output_router_logits": True}),
    ],
)
def test_keys_that_transformers_knows_and_no_model_reads_are_of_no_effect(family, keys):
    case = CASES[family.removesuffix("_text")]
    assert model_from_config(case | keys, "toy") == model_from_config(case, "toy")


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma2", {"sliding_window_size": 9}),
        ("phi", {"rotary_dim": 6}),
        ("starcoder2", {"activation_function": "gelu", "layer_norm_epsilon": 1e-3, "attention_softmax_in_fp32": True}),
        ("gptj", {"rotary": True}),
        ("gemma4", {"use_bidirectional_attention": "vision"}),
        ("exaone4", {"num_nextn_predict_layers": 1, "mtp_loss_scaling_factor": 0.05, "mtp_share_layers": True}),
        ("exaone_moe", {"num_nextn_predict_layers": 1, "first_last_k_dense_replace": 1}),
        ("llama", {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "type_vocab_size": 16}),
    ],
)
def test_keys_of_published_files_that_code_of_their_family_does_not_read_are_of_no_effect(family, keys):
    case = CASES.get(family, CONFIGS.get(family))
    assert model_from_config(case | keys, "toy") == model_from_config(case, "toy")


def test_a_key_that_nobody_knows_is_named_in_a_warning_unless_its_name_says_numbers():
    plain = model_from_config(CASES["llama"], "toy")
    with pytest.warns(FileWarning) as caught:
        assert model_from_config(CASES["llama"] | {"made_by": "us", "notes": {"heads": 3}}, "toy") == plain
    assert [str(one.message) for one in caught] == [
        f"toy: the key {key!r} is no key of a llama config, and is not read." for key in ("made_by", "notes")
    ]
    assert model_from_config(CASES["llama"] | {"made_by": None, "heads_too": False}, "toy") == plain
    for key in ("extra_heads", "expertScale", "rope_thing", "mamba_d_state", "clip_qkv"):
        assert repr(key) in refused("llama", **{key: 3})


@pytest.mark.peer
def test_the_table_of_fields_is_of_the_transformers_that_is_installed():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    assert config_fields()["transformers"] == transformers.__version__


@pytest.mark.peer
@pytest.mark.slow
def test_the_table_of_fields_is_as_it_is_made():
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert json.loads(FIELDS_FILE.read_text()) == table()


def other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return value[1:]
    return {"gelu": "silu"}.get(value, "gelu") if isinstance(value, str) else (value or 1) * 2 + 1


@pytest.mark.peer
@pytest.mark.parametrize("family", sorted(CASES))
def test_all_keys_of_transformers_are_decided(family):
    """A key of theirs that is not declared harmless changes the model or is refused."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    form, base = formats()[family], transformers.PretrainedConfig().to_dict()
    theirs = transformers.AutoConfig.for_model(CASES[family]["model_type"]).to_dict()
    plain = model_from_config(CASES[family])
    silent = set()
    for key in theirs.keys() - base.keys() - {"rope_parameters", "layer_types"}:
        harmless = form.only.get(key) == [] or any(fnmatchcase(key, one) for one in form.harmless)
        value = theirs[key] if theirs[key] is not None else CASES[family].get(key, 8)
        try:
            changed = harmless or any(
                model_from_config(CASES[family] | on | {key: other(value)}) != plain for on in ({}, SWITCHES)
            )
        except InputError:
            changed = True
        silent |= set() if changed else {key}
    assert silent <= WITHOUT_EFFECT.get(family, set())


SWITCHES = {"use_sliding_window": True, "topk_method": "group_limited_greedy"}
"""Keys that switch others on."""
WITHOUT_EFFECT = {
    "gemma2": {"hidden_act"},
    "deepseek_v2": {"num_key_value_heads"},
    "deepseek_v3": {"num_key_value_heads"},
}
"""Keys that no code of transformers' model reads."""


_HEAD_DIM = ("qwen2", "qwen2_moe", "qwen3_moe", "phi3", "olmo2", "smollm3", "granite", "glm4_moe", "dots1", "exaone4")
_HEAD_DIM += ("exaone_moe", "olmo3", "ernie4_5_moe", "starcoder2", "phi", "cohere")
BY_GETATTR = dict.fromkeys(_HEAD_DIM, "head_dim") | {"minimax_m2": "rotary_dim"}
"""A key that code of a family reads though its configuration class does not have it."""


@pytest.mark.peer
@pytest.mark.parametrize("family", sorted(CASES))
def test_no_key_is_honoured_that_transformers_ignores(family):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.for_model(CASES[family]["model_type"])
    older = {"rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern", "num_experts"}
    older |= {"rotary_pct", "rotary_emb_base"}  # of gpt_neox
    older |= {"decoder_start_token_id"}  # read by its generation
    by_getattr = {BY_GETATTR.get(family, "")}
    names = {*config.to_dict(), *config.attribute_map, "partial_rotary_factor"} | older | by_getattr
    honoured = formats()[family].known - names
    assert honoured <= {key for key, values in formats()[family].only.items()} | {"moe_layer_freq"}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_saves_is_read(name):
    """With every key at its default, as `save_pretrained` of version 5 writes them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    keys = copy.deepcopy(CONFIGS[name])
    saved = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys).to_dict()
    assert model_from_config(saved, name) == model_from_config(CONFIGS[name], name)
