"""The ``config.json`` of every family: the key that holds each field of a `Model`, and what an absent key means.

Reading and writing use the same rows. A key has the name that most families give it; `ALIASES` are other spellings.
"""

from typing import Any

import msgspec

from meshwright.spec.model import RopeScaling

KEYS = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "qkv_bias": "attention_bias",
    "out_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "rope_theta": "rope_theta",
}
"""Field of a Model -> key. The first of two fields of one key is the one that is written."""

ROPE_KEYS = {name: name for name in RopeScaling.__struct_fields__} | {
    "kind": "rope_type",
    "original_max_positions": "original_max_position_embeddings",
}
"""Field of a RopeScaling -> key in ``rope_scaling`` or ``rope_parameters``."""

ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
}

NULLABLE = {
    *("num_key_value_heads", "head_dim", "n_inner", "q_lora_rank", "n_shared_experts"),
    *("attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor", "rope_local_base_freq"),
}
"""Keys that may be null or absent: the field keeps the Model's default, or follows from other fields."""

COMMON: dict[str, Any] = {
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}
"""What transformers takes for absent keys, where the family's `Format` does not say otherwise."""


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """The config of one family.

    ``keys`` are rows beside or instead of `KEYS`, ``fixed`` fields that every model of the family has, ``defaults``
    what transformers takes for absent keys, ``only`` the values of keys that no published model changes. Written are
    the rows but for fixed fields and those ``unwritten``, spelled as in ``aliases``, and the keys ``computed`` from
    several fields.
    """

    keys: dict[str, str] = {}
    fixed: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    only: dict[str, Any] = {}
    computed: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


_NO_BIAS = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_LAYER_WINDOWS = ("sliding_window", "layer_types")
_QWEN_WINDOWS = (*_LAYER_WINDOWS, "use_sliding_window", "max_window_layers")
_QWEN = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_EXPERT_KEYS = {"num_experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
_QWEN_MOE_KEYS = _EXPERT_KEYS | {"d_ff_expert": "moe_intermediate_size", "gates_sum_to_one": "norm_topk_prob"}
_QWEN_MOE = _QWEN | {"decoder_sparse_step": 1, "norm_topk_prob": False}
_GEMMA = {
    "vocab_size": 256000,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA_FIXED = {"norm_unit_offset": True, "embed_scale": True, "mlp_bias": False}
_GEMMA2 = _GEMMA | {
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2_KEYS = {
    "activation": "hidden_activation",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}
_GEMMA2_COMPUTED = (*_LAYER_WINDOWS, "hidden_act", "query_pre_attn_scalar")
_LATENT_RANKS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_KEYS = (
    {name: name for name in _LATENT_RANKS}
    | _EXPERT_KEYS
    | {
        "d_ff_expert": "moe_intermediate_size",
        "num_shared_experts": "n_shared_experts",
        "routed_scale": "routed_scaling_factor",
    }
)
GROUP_KEYS = {"expert_groups": "n_group", "groups_per_token": "topk_group"}
"""Rows of routers that look at groups of experts."""
_DEEPSEEK_COMPUTED = ("first_k_dense_replace", "moe_layer_freq", "n_group", "topk_group")

FORMATS: dict[str, Format] = {
    "llama": Format(),
    "mistral": Format(
        fixed=_NO_BIAS,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        computed=("sliding_window",),
    ),
    "qwen2": Format(
        fixed=_NO_BIAS | {"qkv_bias": True}, defaults=_QWEN | {"num_key_value_heads": 32}, computed=_QWEN_WINDOWS
    ),
    "qwen3": Format(
        fixed={"qk_norm": True, "mlp_bias": False},
        defaults=_QWEN | {"num_key_value_heads": 32, "head_dim": 128},
        computed=_QWEN_WINDOWS,
    ),
    "gemma": Format(fixed=_GEMMA_FIXED, defaults=_GEMMA | {"num_key_value_heads": 16}, computed=("hidden_activation",)),
    "gemma2": Format(
        keys=_GEMMA2_KEYS,
        fixed=_GEMMA_FIXED | {"post_norms": True},
        defaults=_GEMMA2 | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        computed=_GEMMA2_COMPUTED,
    ),
    "gemma3": Format(
        keys=_GEMMA2_KEYS | {"rope_local_theta": "rope_local_base_freq"},
        fixed=_GEMMA_FIXED | {"post_norms": True, "qk_norm": True},
        defaults=_GEMMA2
        | {
            "vocab_size": 262208,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
        },
        computed=_GEMMA2_COMPUTED,
    ),
    "gpt2": Format(
        keys={"d_ff": "n_inner", "norm_eps": "layer_norm_epsilon", "activation": "activation_function"},
        fixed=dict.fromkeys(("learned_positions", *_NO_BIAS), True) | {"norm": "layer_norm", "gated": False},
        defaults={
            "vocab_size": 50257,
            "max_position_embeddings": 1024,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        unwritten=("num_kv_heads", "head_dim", "rope_theta"),
        aliases=("n_embd", "n_layer", "n_head", "n_positions"),
    ),
    "phi3": Format(
        keys={"rope_fraction": "partial_rotary_factor"},
        fixed=_NO_BIAS,
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
        },
        computed=("sliding_window",),
    ),
    "mixtral": Format(
        keys=_EXPERT_KEYS | {"d_ff_expert": "intermediate_size"},
        # The softmax over the chosen experts is that over all of them, made to sum to one again.
        fixed=_NO_BIAS | {"gates_sum_to_one": True},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_experts": 8,
        },
        computed=("sliding_window",),
        aliases=("num_local_experts",),
    ),
    "qwen2_moe": Format(
        keys=_QWEN_MOE_KEYS | {"qkv_bias": "qkv_bias", "d_ff_shared": "shared_expert_intermediate_size"},
        fixed={"out_bias": False, "mlp_bias": False},
        defaults=_QWEN_MOE | {"num_key_value_heads": 16, "qkv_bias": True},
        computed=(*_QWEN_WINDOWS, "decoder_sparse_step", "mlp_only_layers"),
    ),
    "qwen3_moe": Format(
        keys=_QWEN_MOE_KEYS,
        fixed={"qk_norm": True, "mlp_bias": False},
        defaults=_QWEN_MOE | {"num_key_value_heads": 4},
        computed=("sliding_window", "use_sliding_window", "decoder_sparse_step", "mlp_only_layers"),
    ),
    "deepseek_v2": Format(
        keys=_DEEPSEEK_KEYS,
        fixed={"mlp_bias": False},
        defaults=_LATENT_RANKS
        | {
            "moe_layer_freq": 1,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
        },
        computed=(*_DEEPSEEK_COMPUTED, "norm_topk_prob", "topk_method"),
        unwritten=("head_dim",),
        aliases=("n_routed_experts",),
    ),
    "deepseek_v3": Format(
        keys=_DEEPSEEK_KEYS | GROUP_KEYS | {"gates_sum_to_one": "norm_topk_prob"},
        fixed={"mlp_bias": False, "router_scores": "sigmoid"},
        defaults=_LATENT_RANKS
        | {
            "moe_layer_freq": 1,
            "max_position_embeddings": 4096,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        computed=_DEEPSEEK_COMPUTED,
        unwritten=("head_dim",),
        aliases=("n_routed_experts",),
    ),
    "gpt_oss": Format(
        keys=_EXPERT_KEYS | {"d_ff_expert": "intermediate_size"},
        fixed=dict.fromkeys(("gates_sum_to_one", "mlp_bias", "router_bias", "attention_sinks"), True),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "attention_bias": True,
            "num_experts_per_tok": 4,
        },
        only={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        computed=_LAYER_WINDOWS,
        aliases=("num_local_experts",),
    ),
}

KNOWN_KEYS = {
    *("model_type", "rope_scaling", "rope_parameters", *COMMON, *ALIASES, *KEYS.values(), *ROPE_KEYS.values()),
    *(key for one in FORMATS.values() for key in (*one.defaults, *one.keys.values(), *one.computed)),
}
"""Keys that are not misspelt names of others."""
