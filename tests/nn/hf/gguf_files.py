"""Writes small models as GGUF files, as llama.cpp's conversion does, with names from the package ``gguf``."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from meshwright.spec.model import Model

ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
VOCAB = 64
_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # N * H is not D, so that a matrix the wrong way round has another shape
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_GEMMA = {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}
_LONG = {"type": "longrope", "short_factor": [1.0, 1.0, 1.5], "long_factor": [1.0, 2.0, 8.0]}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE | {"model_type": "llama", "rope_theta": 5e5},
    "llama-biases": _BASE
    | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    | {"rope_theta": 5e5, "rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 8192}},
    "mixtral": _BASE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen2": _BASE
    | {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "qwen3": _BASE | {"model_type": "qwen3", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "qwen2_moe": _BASE | _MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 96},
    "qwen3_moe": _BASE | _MOE | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "gemma": _BASE | {"model_type": "gemma", "tie_word_embeddings": True},
    "gemma2": _BASE | _GEMMA | {"model_type": "gemma2", "sliding_window": 6, "attn_logit_softcapping": 2.0},
    "gemma3": _BASE | _GEMMA | {"model_type": "gemma3_text", "sliding_window": 6, "num_hidden_layers": 6},
    "phi3": _BASE | {"model_type": "phi3", "sliding_window": 6},
    "phi3-longrope": _BASE
    | {"model_type": "phi3", "sliding_window": None, "original_max_position_embeddings": 16}
    | {"partial_rotary_factor": 0.375, "rope_scaling": _LONG},
    "gpt2": {
        **{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB},
    },
}
"""Name of a case -> its config.json, with nothing that GGUF leaves out."""


def write_gguf(path: Path, model: Model, tensors: dict[str, np.ndarray], kind: Kind = Kind.F32, **more: Any) -> None:
    """Writes the published tensors of a model; matrices whose rows are whole blocks as ``kind``, others in float32.

    ``more`` are functions of the writer with their argument.
    """
    arch = ARCHITECTURES.get(model.family, model.family)
    writer = gguf.GGUFWriter(path, arch)
    for name, value in {**_sizes(model), **more}.items():
        getattr(writer, f"add_{name}")(value)
    known = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), model.num_layers)
    for name, value in _converted(model, tensors).items():
        stem, _, end = name.rpartition(".")
        size = gguf.GGML_QUANT_SIZES[kind][0]
        own = kind if value.ndim > 1 and value.shape[-1] % size == 0 else Kind.F32
        found = known.get_name(stem)
        assert found or stem.startswith("rope_"), name
        writer.add_tensor(f"{found or stem}.{end}", gguf.quants.quantize(value, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _sizes(model: Model) -> dict[str, Any]:
    """Functions of the writer -> their argument."""
    sizes: dict[str, Any] = {
        "context_length": model.max_positions,
        "embedding_length": model.d_model,
        "block_count": model.num_layers,
        "feed_forward_length": model.d_ff_expert if model.family == "mixtral" else model.d_ff,
        "head_count": model.num_heads,
        "vocab_size": model.vocab_size,
        "file_type": 1,
    }
    if model.family == "gpt2":
        return sizes | {"layer_norm_eps": model.norm_eps}
    sizes |= {
        "head_count_kv": model.num_kv_heads,
        "layer_norm_rms_eps": model.norm_eps,
        "rope_freq_base": model.rope_theta,
    }
    sizes |= {"key_length": model.head_dim, "value_length": model.head_dim}
    sizes |= {"rope_dimension_count": round(model.rope_fraction * model.head_dim)}
    if model.sliding_window or model.family == "phi3":
        sizes["sliding_window"] = model.sliding_window or 0
    if model.num_experts:
        sizes |= {"expert_count": model.num_experts, "expert_used_count": model.experts_per_token}
        if model.family != "mixtral":
            sizes["expert_feed_forward_length"] = model.d_ff_expert
    if model.d_ff_shared:
        sizes["expert_shared_feed_forward_length"] = model.d_ff_shared
    if model.attention_softcap:
        sizes |= {"attn_logit_softcapping": model.attention_softcap, "final_logit_softcapping": model.logit_softcap}
    scaling = model.rope_scaling
    if scaling and scaling.kind in ("linear", "yarn"):
        sizes |= {"rope_scaling_type": gguf.RopeScalingType(scaling.kind), "rope_scaling_factor": scaling.factor}
    if scaling and scaling.kind in ("longrope", "yarn"):
        sizes["rope_scaling_orig_ctx_len"] = scaling.original_max_positions
    return sizes


def _converted(model: Model, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as llama.cpp's convert_hf_to_gguf.py changes them, by published names."""
    found: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if model.family in ("llama", "mixtral") and ".self_attn.q_proj" in name:
            value = _by_pairs(value, model.num_heads)
        if model.family in ("llama", "mixtral") and ".self_attn.k_proj" in name:
            value = _by_pairs(value, model.num_kv_heads)
        if model.family.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        if model.family == "gpt2" and value.ndim > 1 and ".h." in name:
            value = value.T
        if name.endswith("shared_expert_gate.weight"):
            value = value.reshape(-1)
        head, mark, rest = name.partition(".experts.")
        if mark:
            expert, _, leaf = rest.partition(".")
            stacked = found.setdefault(f"{head}{mark}{leaf}", np.zeros((model.num_experts, *value.shape), value.dtype))
            stacked[int(expert)] = value
        else:
            found[name] = np.ascontiguousarray(value)
    if (scaling := model.rope_scaling) and scaling.kind == "longrope":
        found["rope_factors_short.weight"] = np.asarray(scaling.short_factor, np.float32)
        found["rope_factors_long.weight"] = np.asarray(scaling.long_factor, np.float32)
    if scaling and scaling.kind == "llama3":
        found["rope_freqs.weight"] = llama3_factors(model)
    return found


def _by_pairs(value: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of llama.cpp's conversion."""
    return value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def llama3_factors(model: Model) -> np.ndarray:
    """LlamaModel.generate_extra_tensors of llama.cpp's conversion."""
    scaling, factors = model.rope_scaling, []
    assert scaling
    assert scaling.low_freq_factor
    assert scaling.high_freq_factor
    assert scaling.original_max_positions
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    for at in range(0, model.head_dim, 2):
        wavelen = 2 * np.pi * model.rope_theta ** (at / model.head_dim)
        if wavelen < scaling.original_max_positions / high:
            factors.append(1.0)
        elif wavelen > scaling.original_max_positions / low:
            factors.append(scaling.factor)
        else:
            smooth = (scaling.original_max_positions / wavelen - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.asarray(factors, np.float32)
