"""`Model` to a Hugging Face ``config.json``, for every family: the way back of `spec.hf.read`."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from meshwright.spec.hf.defaults import ROPE_FIELDS
from meshwright.spec.model import Model, RopeScaling

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Numbers of special tokens: facts of a tokenizer, which a model does not have."""


def config_from_model(model: Model) -> dict[str, Any]:
    """The config.json object of a model, such that `spec.hf.read.model_from_config` returns the same model.

    A decoder that was nested in a model of several kinds of input is written as the text model it is (`text_model`).
    """
    if model.family == "gpt2":
        return _head(model) | _gpt2(model)
    return _head(model) | _common(model) | _rope(model) | _FAMILY_KEYS.get(model.family, _nothing)(model)


def text_model(model: Model) -> Model:
    """The model with the names of a text-only checkpoint: what is written, whatever was read."""
    return replace(model, weights_prefix="model.") if model.family == "gemma3" else model


def _head(model: Model) -> dict[str, Any]:
    return {
        "architectures": [_ARCHITECTURES[model.family]],
        "model_type": "gemma3_text" if model.family == "gemma3" else model.family,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        # Left out, these would be the numbers of the published tokenizer.
        **dict.fromkeys(TOKEN_KEYS),
    }


def _gpt2(model: Model) -> dict[str, Any]:
    return {
        "n_embd": model.d_model,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_positions": model.max_positions,
        "n_inner": model.d_ff,
        "activation_function": model.activation,
        "layer_norm_epsilon": model.norm_eps,
    }


def _common(model: Model) -> dict[str, Any]:
    widths = {
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
    }
    return widths | {
        **({} if model.latent_attention else {"head_dim": model.head_dim}),
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": model.activation,
    }


def _rope(model: Model) -> dict[str, Any]:
    scaling = _scaling_object(model.rope_scaling)
    if scaling is None and model.family == "gpt_oss":  # where null means yarn
        scaling = {"rope_type": "default"}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}


def _scaling_object(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    optional = {
        "original_max_position_embeddings": scaling.original_max_positions,
        **{key: getattr(scaling, key) for key in ROPE_FIELDS},
        "short_factor": list(scaling.short_factor) or None,
        "long_factor": list(scaling.long_factor) or None,
        "truncate": None if scaling.truncate else False,
    }
    kept = {key: value for key, value in optional.items() if value is not None}
    return {"rope_type": scaling.kind, "factor": scaling.factor} | kept


# -- what each family adds -----------------------------------------------------------------------------


def _nothing(model: Model) -> dict[str, Any]:
    return {}


def _llama(model: Model) -> dict[str, Any]:
    return {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}


def _window(model: Model) -> dict[str, Any]:
    """One window for all layers, or none."""
    return {"sliding_window": model.sliding_window}


def _layer_types(model: Model) -> dict[str, Any]:
    sliding = set(model.sliding_layers)
    kinds = ["sliding_attention" if layer in sliding else "full_attention" for layer in range(model.num_layers)]
    return {"layer_types": kinds, "sliding_window": model.sliding_window}


def _qwen(model: Model) -> dict[str, Any]:
    return _layer_types(model) | {
        "use_sliding_window": bool(model.sliding_layers),
        "max_window_layers": min(model.sliding_layers, default=model.num_layers),
    }


def _qwen3(model: Model) -> dict[str, Any]:
    return _qwen(model) | {"attention_bias": model.qkv_bias}


def _gemma(model: Model) -> dict[str, Any]:
    return {"attention_bias": model.qkv_bias, "hidden_activation": model.activation}


def _gemma2(model: Model) -> dict[str, Any]:
    # The window is a number in every config of these families, also where no layer uses it.
    window = {"sliding_window": model.sliding_window or model.max_positions}
    local = {} if model.rope_local_theta is None else {"rope_local_base_freq": model.rope_local_theta}
    scalar = model.query_pre_attn_scalar or model.head_dim
    scores = {
        # transformers takes a whole number only
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
    }
    return _gemma(model) | _layer_types(model) | window | local | scores


def _phi3(model: Model) -> dict[str, Any]:
    """The length trained on stands beside the scaling, which holds its two lists of factors only."""
    keys = _window(model) | {"partial_rotary_factor": model.rope_fraction}
    scaling = model.rope_scaling
    if scaling is None or scaling.kind != "longrope":
        return keys
    lists = {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
    given = {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    original = scaling.original_max_positions or model.max_positions
    if scaling.factor != model.max_positions / original:
        given["factor"] = scaling.factor
    return keys | {
        "original_max_position_embeddings": original,
        "rope_scaling": {"type": "longrope", **lists, **given},
    }


def _mixtral(model: Model) -> dict[str, Any]:
    return _window(model) | {"num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}


def _gpt_oss(model: Model) -> dict[str, Any]:
    return _mixtral(model) | _layer_types(model) | {"attention_bias": model.qkv_bias}


def _qwen_moe(model: Model) -> dict[str, Any]:
    return {
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.d_ff_expert,
        "norm_topk_prob": model.gates_sum_to_one,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(model.dense_layers),
    }


def _qwen2_moe(model: Model) -> dict[str, Any]:
    return (
        _qwen(model)
        | _qwen_moe(model)
        | {
            "shared_expert_intermediate_size": model.d_ff_shared,
            "qkv_bias": model.qkv_bias,
        }
    )


def _qwen3_moe(model: Model) -> dict[str, Any]:
    window = _window(model) | {"use_sliding_window": bool(model.sliding_layers)}
    return window | _qwen_moe(model) | {"attention_bias": model.qkv_bias}


def _deepseek(model: Model) -> dict[str, Any]:
    first = len(model.dense_layers)
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    return {name: getattr(model, name) for name in names} | {
        "attention_bias": model.qkv_bias,
        "q_lora_rank": model.q_lora_rank or None,
        "n_routed_experts": model.num_experts,
        "n_shared_experts": model.num_shared_experts or None,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.d_ff_expert,
        "first_k_dense_replace": first,
        "moe_layer_freq": 1,
        "norm_topk_prob": model.gates_sum_to_one,
        "routed_scaling_factor": model.routed_scale,
        "n_group": model.expert_groups or None,
        "topk_group": model.groups_per_token or None,
        **({"topk_method": "group_limited_greedy" if model.expert_groups else "greedy"} if _is_v2(model) else {}),
    }


def _is_v2(model: Model) -> bool:
    return model.family == "deepseek_v2"


_FAMILY_KEYS: dict[str, Callable[[Model], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _window,
    "qwen2": _qwen,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma2,
    "phi3": _phi3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}
