"""Writes a `Model` as a Hugging Face ``config.json``: the inverse of `spec.hf.read`, from the same rows."""

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from meshwright.spec.hf.families import ROPE_KEYS, HfFields, formats
from meshwright.spec.hf.read import MASK_KEYS, OWN_FIELDS, model_from_config
from meshwright.spec.model import Model, RopeScaling

TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of special tokens: these belong to a tokenizer, so they are written as null."""


def config_from_model(model: Model) -> HfFields:
    """Returns the config.json object of a model, such that `spec.hf.read.model_from_config` returns the same model.

    A decoder that was nested in a multimodal model is written as a text model (see `text_model`). Fields that the
    family has no keys for are under `OWN_FIELDS`, which transformers does not read.
    """
    config = _of_family(model)
    back = model_from_config(config, model.name)
    elsewhere = {*_ELSEWHERE, *["encoder"] * bool(formats()[model.family].encoder)}
    names = (name for name in model.__struct_fields__ if name not in elsewhere)
    own_fields = {n: msgspec.to_builtins(v) for n in names if (v := getattr(model, n)) != getattr(back, n)}
    return config | ({OWN_FIELDS: own_fields} if own_fields else {})


_ELSEWHERE = ("name", "weights_prefix", "stored", "lora", "mtp_weight", "num_mtp_layers")
"""Fields of `Model` that a folder keeps outside config.json: with its weights, in an adapter, or nowhere."""


def _of_family(model: Model) -> HfFields:
    """Returns the config.json object of a model, with the keys of its family only."""
    form = formats()[model.family]
    camel_name = _CLASSES.get(model.family, model.family.title().replace("_", ""))
    head_name = "ForConditionalGeneration" if model.encoder else "ForCausalLM"
    head_name = "MTModel" if model.family == "marian" else head_name
    config: HfFields = {
        "architectures": ["GPT2LMHeadModel" if model.family == "gpt2" else f"{camel_name}{head_name}"],
        "model_type": f"{model.family}_text" if model.family in _TEXT_HALVES else model.family,
        # Left out, these would be the numbers of the published tokenizer.
        **dict.fromkeys(TOKEN_KEYS),
    }
    alias_of = {key: alias for alias, key in form.aliases.items()}
    for field, key in form.keys.items():
        value = getattr(model, field)
        config.setdefault(alias_of.get(key, key), (value or None) if key in form.nullable else value)
    if "rope_parameters" in form.computed:
        config = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_local_base_freq")}
    elif "rope_theta" in form.keys.values():
        config |= _rope(model)
    config |= {alias_of.get(key, key): getattr(model.encoder, field) for field, key in form.encoder.items()}
    config |= {key: getattr(model, key) for key in MASK_KEYS if getattr(model, key)}
    return config | {key: _COMPUTED[key](model) for key in form.computed}


_TEXT_HALVES = ("gemma3", "gemma3n", "gemma4", "llama4")
"""Families whose text models have a model_type that ends in _text, as the one without is multimodal."""
_CLASSES = {
    "gemma3n": "Gemma3n",
    "smollm3": "SmolLM3",
    "mbart": "MBart",
    "stablelm": "StableLm",
    "gpt_neox": "GPTNeoX",
    "opt": "OPT",
    "gpt_bigcode": "GPTBigCode",
    "gptj": "GPTJ",
    "mt5": "MT5",
    "umt5": "UMT5",
    "minimax_m2": "MiniMaxM2",
    "hy_v3": "HYV3",
    "ernie4_5": "Ernie4_5",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "hunyuan_v1_moe": "HunYuanMoEV1",
}
"""Family -> the first part of its class names in transformers, if that is not its name in camel case."""


def text_model(model: Model) -> Model:
    """Returns the model as it is written: with the weight names of a text-only checkpoint, and only the MTP layers that
    have weights."""
    return replace(model, weights_prefix=formats()[model.family].prefix, num_mtp_layers=len(model.mtp_layers))


def _rope_table(model: Model) -> HfFields:
    """Returns the rotary keys of a model with proportional or no scaling."""
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    factor = {"factor": scaling.factor} if scaling.factor != 1 else {}
    return {"rope_type": scaling.kind, "partial_rotary_factor": scaling.fraction, **factor}


def _rope(model: Model) -> HfFields:
    scaling = model.rope_scaling
    if model.family == "olmo3":
        full_table = {"rope_type": "default", **_scaling_table(scaling), "rope_theta": model.rope_theta}
        sliding_table = {"rope_type": "default", "rope_theta": model.rope_local_theta}
        return {"rope_parameters": {"full_attention": full_table, "sliding_attention": sliding_table}}
    if scaling is None:  # in a config of gpt-oss null means yarn
        return {"rope_scaling": {"rope_type": "default"} if model.family == "gpt_oss" else None}
    value_by_key = _scaling_table(scaling)
    if model.query_temper and scaling.kind == "yarn":
        own_keys = {"rope_theta": model.rope_theta, "llama_4_scaling_beta": model.query_temper}
        return {"rope_parameters": {**value_by_key, **own_keys}}
    if model.family != "phi3" or scaling.kind != "longrope":
        return {"rope_scaling": value_by_key}
    # Phi-3 has the original length outside the scaling, and a factor only where it is not the quotient of lengths.
    original_len = scaling.original_max_positions or model.max_positions
    key_names = ("short_factor", "long_factor", "attention_factor", "factor")
    table = {key: value_by_key[key] for key in key_names if key in value_by_key}
    if scaling.factor == model.max_positions / original_len:
        del table["factor"]
    return {"original_max_position_embeddings": original_len, "rope_scaling": {"type": "longrope", **table}}


def _scaling_table(scaling: RopeScaling | None) -> HfFields:
    """Returns a rotary scaling as a table of a config, without default values; {} for None."""
    if scaling is None:
        return {}
    defaults, fields = msgspec.to_builtins(RopeScaling(kind="")), msgspec.to_builtins(scaling).items()
    return {ROPE_KEYS[name]: value for name, value in fields if name == "factor" or value != defaults[name]}


_COMPUTED: dict[str, Callable[[Model], Any]] = {
    # These have a window as a number in every config, also where no layer uses it, or would rotate without one.
    "sliding_window": lambda m: (
        m.max_positions
        if m.sliding_window is None
        and (
            m.family in ("gemma2", "gemma3", "gemma3n", "gemma4", "olmo3")
            or (formats()[m.family].global_unrotated and len(m.unrotated_layers) == m.num_layers)
        )
        else m.sliding_window
    ),
    "layer_types": lambda model: [
        f"{'chunked' if model.chunked_windows else 'sliding'}_attention"
        if n in model.sliding_layers
        else "full_attention"
        for n in range(model.num_layers)
    ],
    "attention_chunk_size": lambda model: model.sliding_window or model.max_positions,
    "attn_temperature_tuning": lambda model: model.query_temper > 0,
    "moe_layers": lambda model: list(model.moe_layers),
    "interleave_moe_layer_step": lambda model: 1,  # the list counts
    "rope_parameters": lambda model: {
        "full_attention": {"rope_theta": model.rope_theta, **_rope_table(model)},
        "sliding_attention": {"rope_theta": model.rope_local_theta, "rope_type": "default"},
    },
    "num_global_key_value_heads": lambda model: model.num_global_kv_heads if model.values_from_keys else None,
    "vocab_size_per_layer_input": lambda model: model.layer_vocab_size or model.vocab_size,
    "intermediate_size": lambda model: [
        model.d_ff_wide if n in model.wide_layers else model.d_ff for n in range(model.num_layers)
    ],
    "activation_sparsity_pattern": lambda model: [
        model.gate_sparsity if n in model.sparse_layers else 0.0 for n in range(model.num_layers)
    ],
    "enable_moe_block": lambda model: model.num_experts > 0,
    "num_experts": lambda model: model.num_experts or None,
    "top_k_experts": lambda model: model.experts_per_token or None,
    "moe_intermediate_size": lambda model: model.d_ff_expert or None,
    "no_rope_layers": lambda model: [int(n not in model.unrotated_layers) for n in range(model.num_layers)],
    "no_rope_layer_interval": lambda model: 1,  # the list counts
    "use_sliding_window": lambda model: bool(model.sliding_layers),
    "max_window_layers": lambda model: min(model.sliding_layers, default=model.num_layers),
    "hidden_act": lambda model: model.activation,
    "hidden_activation": lambda model: model.activation,
    # a whole number where possible, since transformers accepts no other
    "query_pre_attn_scalar": lambda m: int(s) if (s := m.query_pre_attn_scalar or m.head_dim) == int(s) else s,
    "decoder_sparse_step": lambda model: 1,
    "mlp_only_layers": lambda model: list(model.dense_layers),
    "mlp_layer_types": lambda model: [
        "dense" if n in model.dense_layers else "sparse" for n in range(model.num_layers)
    ],
    "moe_layer_start_index": lambda model: model.moe_layers[0],
    "moe_layer_end_index": lambda model: model.moe_layers[-1],
    "moe_layer_interval": lambda model: min((b - a for a, b in itertools.pairwise(model.moe_layers)), default=1),
    "rotary_dim": lambda model: model.rotated_width,
    "first_k_dense_replace": lambda model: len(model.dense_layers),
    "moe_layer_freq": lambda model: 1,
    "norm_topk_prob": lambda model: model.gates_sum_to_one,
    "num_nextn_predict_layers": lambda model: len(model.mtp_layers),
    "n_group": lambda model: model.expert_groups or None,
    "topk_group": lambda model: model.groups_per_token or None,
    "feed_forward_proj": lambda m: (
        f"{'gated-' * m.gated}{'gelu' if m.gated and m.activation == 'gelu_new' else m.activation}"
    ),
    "tie_word_embeddings": lambda model: model.tied_embeddings,
    "scale_decoder_outputs": lambda model: model.logit_divisor != 1,
    "num_kv_heads": lambda model: model.num_kv_heads,
    "multi_query": lambda model: model.num_kv_heads == 1,
    "parallel_attn": lambda model: model.parallel_block,
    "num_ln_in_parallel_attn": lambda model: 1 if model.shared_norm else 2 if model.parallel_block else None,
    # of Falcon: without it queries have one kv head or as many as they are, and a parallel block one norm
    "new_decoder_architecture": lambda model: (
        model.parallel_block and (not model.shared_norm or model.num_kv_heads not in (1, model.num_heads))
    ),
    "topk_method": lambda model: "group_limited_greedy" if model.expert_groups else "greedy",
}
"""Key of a config -> function that computes its value, for keys that are not a copy of one field."""
