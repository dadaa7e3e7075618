"""A small model of every family, with all that its layers may have: two kinds of layers, biases, few heads."""

from typing import Any

from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import Model

VOCAB, WINDOW = 64, 6
_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # N * H is not D, so that a matrix the wrong way round has another shape
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_WITHOUT_HEAD_DIM = {key: value for key, value in _BASE.items() if key != "head_dim"}
_LAYER_NORM = {key: value for key, value in _BASE.items() if key != "rms_norm_eps"}
_SQUARE = {key: value for key, value in _LAYER_NORM.items() if key != "head_dim"}
_NEOX = {key: value for key, value in _LAYER_NORM.items() if key not in ("head_dim", "num_key_value_heads")}
_SAME_FF = {key: value for key, value in _NEOX.items() if key != "intermediate_size"}
_GPT = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": VOCAB,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": True,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_GROUPED = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_GEMMA2 = {"query_pre_attn_scalar": 10, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "global_head_dim": 20,
    "vocab_size_per_layer_input": VOCAB,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_LLAMA4 = {
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "attention_chunk_size": WINDOW,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "no_rope_layer_interval": 2,
    "floor_scale": 5,
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
_TEMPERED = _YARN | {"rope_theta": 1e6, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

_T5 = {
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCAB,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "n_positions": 24,
}

_BART = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 40,
    "forced_eos_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE | {"model_type": "llama"},
    "llama-biases": _BASE
    | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_scaling": _LLAMA3}
    | {"tie_word_embeddings": True, "hidden_act": "gelu"},
    "mistral": _BASE | {"model_type": "mistral", "sliding_window": WINDOW},
    "qwen2": _BASE
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    | {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    | {"max_position_embeddings": 24},
    "qwen3": _BASE | {"model_type": "qwen3", "attention_bias": True, "rope_scaling": _YARN},
    "gemma": _BASE | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "gemma2": _BASE
    | _SLIDING
    | _GEMMA2
    | {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3": _BASE
    | _SLIDING
    | _GEMMA2
    | {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3n": _BASE
    | {"model_type": "gemma3n_text", "num_hidden_layers": 6, "num_kv_shared_layers": 3, "sliding_window": WINDOW}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2, "laurel_rank": 6}
    | {"activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0, 0.0, 0.0], "hidden_activation": "gelu_pytorch_tanh"}
    | {"intermediate_size": [48, 64, 48, 64, 48, 64]}
    | {"altup_num_inputs": 3, "altup_active_idx": 1, "tie_word_embeddings": True}
    | {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 48, "final_logit_softcapping": 3.0}
    | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
    "gemma4": _BASE
    | _GEMMA4
    | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    | {"final_logit_softcapping": 3.0},
    "gemma4-shared": _BASE
    | _GEMMA4
    | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
    | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 24},
    "gemma4-ple": _BASE | _GEMMA4 | {"hidden_size_per_layer_input": 24, "final_logit_softcapping": 3.0},
    "gemma4-moe": _BASE
    | _GEMMA4
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
    | {"hidden_size_per_layer_input": 0},
    "gpt2": _GPT | {"model_type": "gpt2"},
    "phi3": _BASE | {"model_type": "phi3", "partial_rotary_factor": 0.5, "sliding_window": WINDOW},
    "phi3-longrope": _BASE
    | {"model_type": "phi3", "sliding_window": None, "original_max_position_embeddings": 16}
    | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 3.0, 8.0]}}
    | {"head_dim": 8},
    "phi3-tied-part": _WITHOUT_HEAD_DIM  # the form of phi-4-mini
    | {"model_type": "phi3", "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "sliding_window": 64}
    | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0, 2.0, 8.0]}}
    | {"original_max_position_embeddings": 16},
    "olmo2": _WITHOUT_HEAD_DIM | {"model_type": "olmo2", "attention_bias": True, "rope_scaling": _LLAMA3},
    "smollm3": _BASE
    | {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}
    | {"use_sliding_window": True, "sliding_window": WINDOW},
    "glm4": _BASE | {"model_type": "glm4", "attention_bias": True},
    "granite": _BASE
    | {"model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.11, "logits_scaling": 3.0}
    | {"residual_multiplier": 0.22, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mixtral": _BASE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": _BASE
    | _MOE
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "qkv_bias": True},
    "qwen3_moe": _BASE | _MOE | {"model_type": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": [0]},
    "gpt_oss": _BASE
    | _SLIDING
    | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}
    | {"rope_scaling": _YARN | {"truncate": False}},
    "deepseek_v2": _WITHOUT_HEAD_DIM
    | _LATENT
    | {"model_type": "deepseek_v2", "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"}
    | {"routed_scaling_factor": 3.0, "rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    "deepseek_v3": _WITHOUT_HEAD_DIM
    | _LATENT
    | {"model_type": "deepseek_v3", "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "attention_bias": True}
    | {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0}
    | {"rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    "deepseek_v3-full-query": _WITHOUT_HEAD_DIM
    | _LATENT
    | {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, "q_lora_rank": None, "norm_topk_prob": False}
    | {"num_nextn_predict_layers": 0},
    "t5": _T5 | {"model_type": "t5"},
    "t5-gated": _T5 | {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": _T5 | {"model_type": "mt5", "num_decoder_layers": 3},
    "umt5": _T5 | {"model_type": "umt5"},
    "glm4_moe": _BASE
    | _GROUPED
    | {"model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True, "num_nextn_predict_layers": 0},
    "solar_open": _BASE
    | _GROUPED
    | {"model_type": "solar_open", "first_k_dense_replace": 0, "attention_bias": True, "rope_parameters": _LLAMA3},
    "dots1": _BASE
    | _GROUPED
    | {"model_type": "dots1", "sliding_window": WINDOW, "max_window_layers": 1, "attention_bias": True},
    "exaone4": _BASE | _SLIDING | {"model_type": "exaone4", "rope_scaling": _LLAMA3},
    "exaone4-global": _BASE | {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 3},
    "exaone_moe": _BASE
    | _SLIDING
    | _MOE
    | {"model_type": "exaone_moe", "mlp_layer_types": ["sparse", "dense", "sparse"], "num_shared_experts": 2},
    "hy_v3": _BASE
    | _MOE
    | {"model_type": "hy_v3", "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True},
    "minimax_m2": _BASE
    | {"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "olmo3": _WITHOUT_HEAD_DIM | _SLIDING | {"model_type": "olmo3", "attention_bias": True, "rope_scaling": _YARN},
    "seed_oss": _BASE | {"model_type": "seed_oss", "mlp_bias": True},
    "ernie4_5": _BASE | {"model_type": "ernie4_5", "use_bias": True},
    "ernie4_5_moe": _BASE
    | {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}
    | {"moe_num_shared_experts": 1},
    "hunyuan_v1_dense": _BASE
    | {"model_type": "hunyuan_v1_dense", "attention_bias": True, "tie_word_embeddings": True}
    | {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    "hunyuan_v1_moe": _BASE | {"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [2, 2, 2]},
    "ministral3": _BASE | {"model_type": "ministral3", "sliding_window": 24, "rope_parameters": _TEMPERED},
    "mistral4": _WITHOUT_HEAD_DIM
    | _LATENT
    | {
        "model_type": "mistral4",
        "num_experts_per_tok": 3,
        "q_lora_rank": 16,
        "rope_parameters": {**_TEMPERED, "rope_theta": 1e4},
    },
    "llama4": _BASE | _LLAMA4 | {"rope_scaling": _LLAMA3, "attn_scale": 0.3},
    "llama4-interleaved": _BASE
    | _LLAMA4
    | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True, "num_experts_per_tok": 2}
    | {"layer_types": ["full_attention", "chunked_attention"] * 2},
    "arcee": _BASE | {"model_type": "arcee", "mlp_bias": True, "rope_scaling": _YARN},
    "starcoder2": _LAYER_NORM | {"model_type": "starcoder2", "sliding_window": WINDOW, "tie_word_embeddings": False},
    "gpt_neox": _NEOX | {"model_type": "gpt_neox", "rotary_pct": 0.25, "hidden_size": 40, "rotary_emb_base": 500},
    "gpt_neox-in-turn": _NEOX
    | {"model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
    "nemotron": _LAYER_NORM | {"model_type": "nemotron", "attention_bias": True, "mlp_bias": True, "norm_eps": 1e-5},
    "stablelm": _SQUARE
    | {"model_type": "stablelm", "use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}
    | {"partial_rotary_factor": 0.5},
    "stablelm-in-turn": _SQUARE | {"model_type": "stablelm", "hidden_size": 40, "partial_rotary_factor": 0.4},
    "phi": _LAYER_NORM | {"model_type": "phi", "partial_rotary_factor": 0.4, "layer_norm_eps": 1e-5},
    "cohere": _LAYER_NORM | {"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.3, "layer_norm_eps": 1e-4},
    "cohere2": _LAYER_NORM
    | {"model_type": "cohere2", "sliding_window": WINDOW, "sliding_window_pattern": 2, "attention_bias": True},
    "falcon": _SAME_FF | {"model_type": "falcon", "ffn_hidden_size": 48, "bias": True},
    "falcon-groups": _SAME_FF
    | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
    "falcon-one-norm": _SAME_FF
    | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "falcon-in-turn": _SAME_FF | {"model_type": "falcon", "parallel_attn": False, "multi_query": False},
    "opt": _SAME_FF | {"model_type": "opt", "ffn_dim": 48},
    "gpt_bigcode": _GPT | {"model_type": "gpt_bigcode", "n_inner": 48},
    "gpt_bigcode-many": _GPT | {"model_type": "gpt_bigcode", "multi_query": False},
    "gptj": _GPT | {"model_type": "gptj", "n_embd": 40, "rotary_dim": 6, "n_inner": 48, "tie_word_embeddings": False},
    "bart": _BART | {"model_type": "bart", "activation_function": "relu"},
    "mbart": _BART | {"model_type": "mbart", "scale_embedding": True},
    "whisper": _BART
    | {"model_type": "whisper", "num_mel_bins": 10, "max_source_positions": 24, "max_target_positions": 40}
    | {"encoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_start_token_id": 3},
    "marian": _BART
    | {"model_type": "marian", "scale_embedding": True, "activation_function": "swish", "decoder_start_token_id": 3},
}
"""Name of a case -> its config.json."""

FAMILIES: dict[str, Model] = {name: model_from_config(config, name) for name, config in CONFIGS.items()}
LLAMA = FAMILIES["llama"]
BY_ROWS = (
    *("glm4_moe", "solar_open", "dots1", "exaone4", "exaone4-global", "exaone_moe", "hy_v3", "minimax_m2", "olmo3"),
    *("seed_oss", "ernie4_5", "hunyuan_v1_moe", "arcee", "mistral4", "llama4-interleaved"),
    *(
        "starcoder2",
        "gpt_neox",
        "gpt_neox-in-turn",
        "stablelm",
        "stablelm-in-turn",
        "cohere2",
        "falcon",
        "falcon-groups",
    ),
    *("falcon-one-norm", "falcon-in-turn", "gpt_bigcode", "gpt_bigcode-many", "gptj"),
)
"""Cases that have no operation which others have not: their logits are compared in the slow tier."""
