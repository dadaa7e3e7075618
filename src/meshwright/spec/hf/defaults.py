"""What transformers takes for keys that a published ``config.json`` leaves out, per family; and other names of keys."""

from typing import Any

COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "sliding_window": None,
}
_QWEN = {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}
_GEMMA = {
    "vocab_size": 256000,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
}
_GEMMA2 = _GEMMA | {
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": _QWEN | {"num_key_value_heads": 32},
    "qwen3": _QWEN | {"num_key_value_heads": 32, "head_dim": 128},
    "gemma": _GEMMA | {"num_key_value_heads": 16},
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA2
    | {
        "vocab_size": 262208,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
    },
    "gpt2": {
        "vocab_size": 50257,
        "max_position_embeddings": 1024,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    "phi3": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
    },
    "mixtral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "num_experts": 8,
    },
    "qwen2_moe": _QWEN | _QWEN_MOE | {"num_key_value_heads": 16, "qkv_bias": True},
    "qwen3_moe": _QWEN | _QWEN_MOE | {"num_key_value_heads": 4},
    "deepseek_v2": _DEEPSEEK
    | {"n_shared_experts": 2, "first_k_dense_replace": 0, "topk_method": "greedy", "routed_scaling_factor": 1.0},
    "deepseek_v3": _DEEPSEEK
    | {
        "max_position_embeddings": 4096,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
    },
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
}
KNOWN_KEYS = (
    {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
    | {"num_experts_per_tok", "moe_intermediate_size", "rope_scaling", "rope_parameters", "model_type"}
    | set(COMMON).union(*DEFAULTS.values())
    | set(ALIASES)
)
ROPE_KINDS = {"linear", "dynamic", "yarn", "longrope", "llama3"}
ROPE_FIELDS = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)
