"""Weight tables against transformers' own modules, built on the meta device where they hold no memory."""

import math
import re

import pytest

from meshwright.spec import catalogue
from meshwright.spec.hf.families import formats
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import FAMILIES
from meshwright.spec.weights import mtp_params, num_active_params, num_params, params_by_part, weight_table

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own deprecations

_DENSE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
_MANY = {key: value for key, value in _DENSE.items() if key != "num_key_value_heads"}
_FALCON = {key: value for key, value in _MANY.items() if key != "intermediate_size"}
_MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
_MLA |= {"n_routed_experts": 8, "num_experts_per_tok": 2}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_T5 = {"d_model": 64, "d_kv": 24, "d_ff": 96, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
_T5 |= {"vocab_size": 128}
_GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2}
_BART = {"d_model": 64, "vocab_size": 128, "max_position_embeddings": 48, "pad_token_id": 1}
_BART |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
_BART |= {"encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
SMALL = {
    "llama": _DENSE,
    "llama-biased-tied": _DENSE
    | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-wide-heads": _DENSE | {"model_type": "llama", "head_dim": 24},
    "mistral": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "qwen3-biased": _DENSE | {"model_type": "qwen3", "attention_bias": True, "head_dim": 32},
    "gemma": _DENSE,
    "gemma2": _DENSE,
    "gemma3": _DENSE | {"model_type": "gemma3_text"},
    "gemma3n": _DENSE
    | {"model_type": "gemma3n_text", "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 120}
    | {"num_hidden_layers": 12, "num_kv_shared_layers": 5, "laurel_rank": 8, "altup_num_inputs": 3},
    "gemma4": _DENSE
    | {"model_type": "gemma4_text", "attention_k_eq_v": True, "num_global_key_value_heads": 1, "head_dim": 24}
    | {"hidden_size_per_layer_input": 12, "num_hidden_layers": 12, "vocab_size_per_layer_input": 128}
    | {"num_kv_shared_layers": 5, "use_double_wide_mlp": True},
    "gemma4-moe": _DENSE
    | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "enable_moe_block": True}
    | {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 80},
    "phi3": _DENSE | {"pad_token_id": 0},
    "mixtral": _DENSE | {"num_local_experts": 4},
    "qwen2_moe": _DENSE | _MOE | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    "qwen3_moe": _DENSE | _MOE | {"decoder_sparse_step": 2},
    "deepseek_v2": _DENSE | _MLA,
    "deepseek_v2-full-query": _DENSE | _MLA | {"model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": _DENSE | _MLA | {"attention_bias": True, "n_group": 4},
    "gpt_oss": _DENSE | {"num_local_experts": 4},
    "olmo2": _DENSE,
    "olmo2-biased": _DENSE | {"model_type": "olmo2", "attention_bias": True},
    "smollm3": _DENSE | {"pad_token_id": 0},
    "glm4": _DENSE | {"pad_token_id": 0},
    "granite": _DENSE | {"mlp_bias": True},
    "t5": _T5,
    "t5-own-head": _T5 | {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": _T5,
    "umt5": _T5,
    "glm4_moe": _DENSE | _GROUPED | {"use_qk_norm": True, "attention_bias": True, "head_dim": 20},
    "solar_open": _DENSE | _GROUPED | {"head_dim": 20, "first_k_dense_replace": 0},
    "dots1": _DENSE | _GROUPED | {"attention_bias": True},
    "exaone4": _DENSE,
    "exaone_moe": _DENSE | _MOE,
    "hy_v3": _DENSE | _MOE | {"num_shared_experts": 2},
    "minimax_m2": _DENSE | {"num_local_experts": 8, "head_dim": 20, "rotary_dim": 10},
    "olmo3": _DENSE,
    "seed_oss": _DENSE | {"attention_out_bias": True},
    "ernie4_5": _DENSE | {"use_bias": True},
    "ernie4_5_moe": _DENSE | {"moe_num_experts": 8, "moe_intermediate_size": 32},
    "hunyuan_v1_dense": _DENSE | {"attention_bias": True, "head_dim": 20},
    "hunyuan_v1_moe": _DENSE | {"num_experts": 4, "moe_topk": 2, "head_dim": 20},
    "arcee": _DENSE,
    "starcoder2": _DENSE,
    "nemotron": _DENSE | {"attention_bias": True, "mlp_bias": True},
    "stablelm": _DENSE | {"qk_layernorm": True},
    "stablelm-parallel": _DENSE | {"model_type": "stablelm", "use_parallel_residual": True, "use_qkv_bias": True},
    "phi": _DENSE,
    "cohere": _DENSE | {"use_qk_norm": True},
    "cohere2": _DENSE,
    "gpt_neox": _MANY,
    "falcon": _FALCON,
    "falcon-groups": _FALCON | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-in-turn": _FALCON | {"model_type": "falcon", "parallel_attn": False, "bias": True},
    "opt": _FALCON | {"ffn_dim": 80},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 3, "n_head": 4},
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8},
    "bart": _BART,
    "mbart": _BART,
    "marian": _BART,
    "whisper": _BART | {"num_mel_bins": 20, "encoder_attention_heads": 2, "encoder_ffn_dim": 80},
    "ministral3": _DENSE | {"head_dim": 20},
    "mistral4": _DENSE | _MLA,
    "llama4": _DENSE
    | {"model_type": "llama4_text", "intermediate_size_mlp": 80, "num_local_experts": 4, "head_dim": 20},
    "llama4-interleaved": _DENSE
    | {"model_type": "llama4_text", "num_local_experts": 4, "moe_layers": [1], "attention_bias": True}
    | {"intermediate_size_mlp": 80},
}


STACKED = {old: new for form in formats().values() for old, new in form.in_memory.items()}
"""Parts of names of experts in published files -> in transformers' memory."""


def keys_of(name):
    return {"model_type": name} | SMALL[name]


def meta_parameters(keys):
    """Name to shape of every parameter of transformers' model for these keys."""
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to compare with")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.parity import auto_class

    keys = dict(keys.get("text_config", keys))
    keys.pop("quantization_config", None)
    family = keys.pop("model_type").replace("kimi_k2", "deepseek_v3")
    config = transformers.AutoConfig.for_model(family, **keys)
    with torch.device("meta"):
        model = auto_class(family).from_config(config)
    head = {"lm_head.weight": tuple(model.lm_head.weight.shape)} if keys.get("tie_word_embeddings") is False else {}
    # T5's class ties its head in any case, and unties it when it reads another
    arrays = {name: array for name, array in model.named_parameters() if not name.endswith("correction_bias")}
    return {name: tuple(array.shape) for name, array in arrays.items()} | head


def canonical(name):
    """One name for an array whether experts are stored one by one or stacked, as newer transformers does."""
    for published, stacked in STACKED.items():
        name = name.replace(published, stacked)
    name = name.replace("language_model.model.", "model.")
    name = name.replace("embed_out.", "lm_head.")  # as transformers 5 has it in memory
    name = re.sub(r"experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight", "experts.gate_up_proj", name)
    return re.sub(r"experts\.\d+\.(down_proj|w2)\.weight", "experts.down_proj", name)


def elements_by_name(sizes):
    totals = {}
    for name, size in sizes:
        totals[canonical(name)] = totals.get(canonical(name), 0) + size
    return totals


def stored_elements(model):
    """Canonical stored name to elements, from the table's rows alone."""
    sizes = []
    for row in weight_table(model):
        if row.tied_to or row.part == "buffer":
            continue
        experts = range(row.shape[0]) if "{expert}" in row.hf_name or "{head}" in row.hf_name else (0,)
        for layer in row.layers or (0,):
            size = math.prod(row.shape) // len(experts)
            sizes += [(row.hf_name.format(layer=layer, expert=expert, head=expert), size) for expert in experts]
    return elements_by_name(sizes)


def test_every_family_has_a_small_config():
    assert {model_from_config(keys_of(name)).family for name in SMALL} == set(FAMILIES)


@pytest.mark.parametrize("name", SMALL)
def test_names_and_sizes_equal_transformers(name):
    theirs = elements_by_name((key, math.prod(shape)) for key, shape in meta_parameters(keys_of(name)).items())
    model = model_from_config(keys_of(name))
    assert stored_elements(model) == theirs
    assert num_params(model) == sum(theirs.values())


@pytest.mark.parametrize("name", catalogue.models())
def test_published_models_count_as_transformers_does(name):
    theirs = meta_parameters(catalogue.entry(name).config)
    assert num_params(catalogue.load_model(name)) == sum(math.prod(shape) for shape in theirs.values())


def test_llama_matrices_are_stored_as_outputs_by_inputs():
    keys = keys_of("llama")
    stored = meta_parameters(keys)
    for row in weight_table(model_from_config(keys)):
        name = row.hf_name.format(layer=1)
        if row.name == "embed" or row.kind == "vector":
            assert stored[name] == row.shape
            continue
        contracted = 2 if row.name == "layers.wo" else 1
        inputs, outputs = math.prod(row.shape[:contracted]), math.prod(row.shape[contracted:])
        assert stored[name] == (outputs, inputs), row.name


def test_rows_of_a_llama_in_einsum_order():
    rows = {row.name: row for row in weight_table(catalogue.load_model("llama3-8b"))}
    assert {name: "".join(row.dims) for name, row in rows.items()} == {
        "embed": "VD",
        "layers.attn_norm": "D",
        "layers.wq": "DNH",
        "layers.wk": "DKH",
        "layers.wv": "DKH",
        "layers.wo": "NHD",
        "layers.mlp_norm": "D",
        "layers.w_gate": "DF",
        "layers.w_up": "DF",
        "layers.w_down": "FD",
        "final_norm": "D",
        "unembed": "DV",
    }
    assert rows["layers.wk"].shape == (4096, 8, 128)
    assert rows["layers.wk"].repeat == 32
    assert rows["embed"].repeat == 1


def test_tied_unembedding_is_a_row_that_counts_nothing():
    tied = model_from_config(keys_of("llama") | {"tie_word_embeddings": True})
    unembed = weight_table(tied)[-1]
    assert (unembed.name, unembed.tied_to, unembed.num_params) == ("unembed", "embed", 0)
    untied = model_from_config(keys_of("llama"))
    assert num_params(untied) - num_params(tied) == 128 * 64


def test_parts_add_up_and_experts_dominate_a_mixture():
    model = catalogue.load_model("deepseek-v3")
    parts = params_by_part(model)
    assert sum(parts.values()) == num_params(model)
    assert parts["experts"] == 58 * 256 * 3 * 7168 * 2048
    assert parts["router"] == 58 * 7168 * 256


def test_layers_that_predict_further_tokens_are_counted_beside_the_model():
    """The hub counts 685B in the published files: these layers with copies of the embedding and the head."""
    model = catalogue.load_model("deepseek-v3")
    layer = 256 * 3 * 7168 * 2048 + 3 * 7168 * 2048 + 7168 * 256 + 2 * 7168
    attention = 7168 * (1536 + 576) + 1536 + 512 + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert mtp_params(model) == layer + attention + 2 * 7168**2 + 3 * 7168
    copies = 2 * 129280 * 7168
    assert abs(num_params(model) + mtp_params(model) + copies - 685e9) < 1e9
    assert mtp_params(catalogue.load_model("kimi-k2")) == 0


def test_active_parameters_leave_out_the_experts_not_chosen():
    model = catalogue.load_model("mixtral-8x7b")
    idle = 32 * 6 * 3 * 4096 * 14336
    assert num_params(model) - num_active_params(model) == idle
    dense = catalogue.load_model("llama3-8b")
    assert num_active_params(dense) == num_params(dense)


def test_layers_without_experts_have_the_dense_rows():
    rows = {row.name: row for row in weight_table(catalogue.load_model("deepseek-v3"))}
    assert rows["layers.w_up"].layers == (0, 1, 2)
    assert rows["layers.experts.w_up"].repeat == 58
    assert rows["layers.experts.w_up"].active_fraction == 8 / 256
