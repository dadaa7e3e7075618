"""Hugging Face ``config.json`` to `Model`, for every family in `meshwright.spec.model.FAMILIES`.

A key that is absent means what transformers means by it: the defaults in `hf_defaults` are those of its
configuration classes, so that a published file is read unchanged. Sizes that decide the parameter count have
no default, except where published files leave them out (gpt2, gemma3).
"""

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.core.errors import InputError, nearest
from meshwright.spec.hf.defaults import ALIASES, COMMON, DEFAULTS, GPT_OSS_ROPE, KNOWN_KEYS, ROPE_FIELDS, ROPE_KINDS
from meshwright.spec.model import FAMILIES, Model, RopeScaling


class _Config:
    """The keys of one config with transformers' defaults behind them, read with a check of their type."""

    def __init__(self, given: Mapping[str, Any], *, family: str, what: str) -> None:
        renamed = {ALIASES.get(key, key): value for key, value in given.items()}
        self.keys = COMMON | DEFAULTS[family] | renamed
        self.given = given
        self.family = family
        self.what = what

    def _read(self, key: str, kinds: tuple[type, ...], need: str) -> Any:
        value = self.keys.get(key)
        if value is None:
            raise InputError(f"{self.what}: the key {key!r} is missing. {self._missing_hint(key)}")
        wrong_bool = isinstance(value, bool) and bool not in kinds
        if wrong_bool or not isinstance(value, kinds):
            raise InputError(f"{self.what}: {key} is {value!r}. Write {need} instead.")
        return value

    def _missing_hint(self, key: str) -> str:
        misspelt = difflib.get_close_matches(key, set(self.given) - KNOWN_KEYS, n=1, cutoff=0.8)
        if misspelt:
            return f"The file has {misspelt[0]!r}: rename it to {key!r}."
        return f"A {self.family} config needs it: add it to the file."

    def whole(self, key: str) -> int:
        value = self._read(key, (int,), "a whole number")
        if value < 0:
            raise InputError(f"{self.what}: {key} is {value}. Write a number that is not negative.")
        return int(value)

    def number(self, key: str) -> float:
        return float(self._read(key, (int, float), "a number"))

    def flag(self, key: str) -> bool:
        return bool(self._read(key, (bool,), "true or false"))

    def text(self, key: str) -> str:
        return str(self._read(key, (str,), "a name in quotes"))

    def table(self, key: str) -> dict[str, Any]:
        """The object under ``key``; {} when absent or null."""
        return {} if self.keys.get(key) is None else dict(self._read(key, (dict,), "an object or null"))

    def items(self, key: str) -> list[Any]:
        return list(self._read(key, (list, tuple), "a list"))

    def numbers(self, key: str) -> tuple[float, ...]:
        """The list of numbers under ``key``; () when absent or null."""
        values = self.items(key) if self.has(key) else []
        if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
            raise InputError(f"{self.what}: {key} is not a list of numbers. Write numbers only.")
        return tuple(float(value) for value in values)

    def has(self, key: str) -> bool:
        return self.keys.get(key) is not None


def model_from_config(config: str | Path | Mapping[str, Any], name: str | None = None) -> Model:
    """The Model that a Hugging Face config describes: a path to a config.json, its folder, or the parsed object.

    Raises InputError, in one line, for a missing or broken file, an unknown ``model_type``, a missing or
    mistyped key, or sizes that do not divide.
    """
    if isinstance(config, Mapping):
        return _from_keys(config, name or "model", name or "config")
    path = Path(config)
    file = path / "config.json" if path.is_dir() else path
    folder = file.resolve().parent.name
    return _from_keys(_load(file), name or (folder if file.name == "config.json" else file.stem), str(file))


def _load(file: Path) -> Mapping[str, Any]:
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror}). Give the path of a config.json or of its folder."
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is not text. Give the path of a config.json or of its folder.") from None
    except RecursionError:
        raise InputError(f"{file} is nested too deeply to be a config.json. Name another file.") from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{file}:{error.lineno}:{error.colno}: broken JSON ({error.msg}). Repair this place in the file."
        ) from None
    if not isinstance(keys, Mapping):
        raise InputError(f"{file} holds no JSON object. A config.json begins with {{ and names a model_type.")
    return keys


def _from_keys(keys: Mapping[str, Any], name: str, what: str) -> Model:
    model_type = keys.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(f"{what}: the key 'model_type' is missing. Add one of: {', '.join(FAMILIES)}.")
    prefix = "transformer." if model_type == "gpt2" else "model."
    family = model_type
    if model_type in ("gemma3", "gemma3_text"):
        # The multimodal file nests the decoder; its published checkpoints name it after the nesting.
        family = "gemma3"
        if isinstance(keys.get("text_config"), Mapping):
            keys, prefix = keys["text_config"], "language_model.model."
    if family not in DEFAULTS:
        raise InputError(f"{what}: model_type {model_type!r} is not known.{nearest(model_type, FAMILIES)}")
    config = _Config(keys, family=family, what=what)
    fields = _sizes(config) | _rope(config) | _window(config) | _FAMILY_FIELDS[family](config)
    return Model(name=name, family=family, weights_prefix=prefix, **fields)  # type: ignore[arg-type]


def _sizes(config: _Config) -> dict[str, Any]:
    """What every family has: widths, counts, norms and biases."""
    num_heads = config.whole("num_attention_heads")
    return {
        "num_layers": config.whole("num_hidden_layers"),
        "d_model": config.whole("hidden_size"),
        "d_ff": config.whole("intermediate_size") if config.family != "gpt2" else _gpt2_width(config),
        "num_heads": num_heads,
        "num_kv_heads": config.whole("num_key_value_heads") if config.has("num_key_value_heads") else num_heads,
        "head_dim": _head_dim(config),
        "vocab_size": config.whole("vocab_size"),
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "max_positions": config.whole("max_position_embeddings"),
        "norm_eps": config.number("rms_norm_eps"),
        "activation": config.text("hidden_act"),
        "qkv_bias": config.flag("attention_bias"),
        "out_bias": config.flag("attention_bias"),
        "mlp_bias": config.flag("mlp_bias"),
    }


def _head_dim(config: _Config) -> int:
    if config.family.startswith("deepseek"):
        return config.whole("qk_nope_head_dim") + config.whole("qk_rope_head_dim")
    if config.has("head_dim"):
        return config.whole("head_dim")
    d_model, num_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    if num_heads < 1 or d_model % num_heads:
        raise InputError(
            f"{config.what}: num_attention_heads={num_heads} does not divide hidden_size={d_model}, "
            f"and head_dim is not given. Set head_dim, or a number of heads that divides {d_model}."
        )
    return d_model // num_heads


def _rope(config: _Config) -> dict[str, Any]:
    """Rotary settings from ``rope_scaling`` with ``rope_theta``, or from the newer ``rope_parameters``."""
    parameters = config.table("rope_scaling") or config.table("rope_parameters")
    local = parameters.get("sliding_attention")
    if isinstance(parameters.get("full_attention"), Mapping):
        parameters = dict(parameters["full_attention"])
    if not parameters and config.family == "gpt_oss":
        parameters = GPT_OSS_ROPE
    merged = _Config(
        {**config.keys, **{key: value for key, value in parameters.items() if value is not None}},
        family=config.family,
        what=config.what,
    )
    fields: dict[str, Any] = {
        "rope_theta": merged.number("rope_theta"),
        "rope_scaling": _rope_scaling(merged, parameters),
    }
    if merged.has("partial_rotary_factor"):
        fields["rope_fraction"] = merged.number("partial_rotary_factor")
    if config.family == "gemma3":
        theta = local.get("rope_theta") if isinstance(local, Mapping) else None
        fields["rope_local_theta"] = float(theta or config.number("rope_local_base_freq"))
    return fields


def _rope_scaling(merged: _Config, parameters: Mapping[str, Any]) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = "longrope" if kind == "su" or (kind == "yarn" and merged.family == "phi3") else kind
    if kind == "default":
        return None
    if kind not in ROPE_KINDS:
        hint = nearest(str(kind), ROPE_KINDS)
        raise InputError(f"{merged.what}: rope_type {kind!r} is not known.{hint}")
    original = "original_max_position_embeddings"
    needed = ("factor", "low_freq_factor", "high_freq_factor", original) if kind == "llama3" else ()
    for key in needed:
        merged.number(key)
    return RopeScaling(
        kind=kind,
        factor=_stretch(merged, kind),
        original_max_positions=merged.whole(original) if merged.has(original) else None,
        truncate=merged.flag("truncate") if merged.has("truncate") else True,
        short_factor=merged.numbers("short_factor"),
        long_factor=merged.numbers("long_factor"),
        **{key: merged.number(key) for key in ROPE_FIELDS if merged.has(key)},
    )


def _stretch(merged: _Config, kind: str) -> float:
    """The factor as given, else by how much the longest sequence has grown."""
    if merged.has("factor"):
        return merged.number("factor")
    if kind in ("yarn", "longrope") and merged.has("original_max_position_embeddings"):
        return merged.whole("max_position_embeddings") / merged.whole("original_max_position_embeddings")
    return 1.0


def _window(config: _Config) -> dict[str, Any]:
    """The sliding window and the layers that have it; nothing when no layer has it."""
    switched_off = config.family.startswith("qwen") and not config.flag("use_sliding_window")
    if switched_off or not config.has("sliding_window"):
        return {}
    layers = tuple(_sliding_layers(config, range(config.whole("num_hidden_layers"))))
    return {"sliding_window": config.whole("sliding_window"), "sliding_layers": layers} if layers else {}


def _sliding_layers(config: _Config, layers: range) -> Iterable[int]:
    """Layers with a window: as listed in ``layer_types``, else by the family's pattern."""
    if config.has("layer_types"):
        kinds = config.items("layer_types")
        if len(kinds) != len(layers):
            raise InputError(
                f"{config.what}: layer_types has {len(kinds)} entries for num_hidden_layers={len(layers)}. "
                f"Give one entry per layer."
            )
        return [layer for layer in layers if kinds[layer] == "sliding_attention"]
    if config.family in ("qwen2", "qwen3"):
        return layers[config.whole("max_window_layers") :]
    if config.family == "qwen2_moe":
        return layers[: config.whole("max_window_layers") : 2]
    if config.family in ("gemma2", "gpt_oss"):
        return layers[::2]
    if config.family == "gemma3":
        pattern = max(config.whole("sliding_window_pattern"), 1)
        return [layer for layer in layers if (layer + 1) % pattern]
    return layers


def _llama(config: _Config) -> dict[str, Any]:
    return {}


def _no_bias(config: _Config) -> dict[str, Any]:
    return {"qkv_bias": False, "out_bias": False, "mlp_bias": False}


def _qwen2(config: _Config) -> dict[str, Any]:
    return {"qkv_bias": True, "out_bias": False, "mlp_bias": False}


def _qwen3(config: _Config) -> dict[str, Any]:
    return {"qk_norm": True, "mlp_bias": False}


def _gemma(config: _Config) -> dict[str, Any]:
    """Gemma's norms multiply by 1 + w, embeddings by sqrt(D); its "gelu" means the tanh form."""
    key = "hidden_act" if config.family == "gemma" else "hidden_activation"
    activation = config.text(key)
    return {
        "activation": "gelu_pytorch_tanh" if activation == "gelu" else activation,
        "norm_unit_offset": True,
        "embed_scale": True,
        "mlp_bias": False,
    }


def _gemma2(config: _Config) -> dict[str, Any]:
    caps = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    return _gemma(config) | {
        "post_norms": True,
        "qk_norm": config.family == "gemma3",
        "query_pre_attn_scalar": config.number("query_pre_attn_scalar"),
        **{field: config.number(key) for field, key in caps.items() if config.has(key)},
    }


def _gpt2_width(config: _Config) -> int:
    return config.whole("n_inner") if config.has("n_inner") else 4 * config.whole("hidden_size")


def _require_fixed(config: _Config, values: Mapping[str, float | bool]) -> None:
    """Refuse a config that changes what no published model of the family changes."""
    for key, value in values.items():
        if config.keys.get(key, value) != value:
            raise InputError(f"{config.what}: {key} is {config.keys[key]!r}. Only {value!r} is known here.")


def _gpt2(config: _Config) -> dict[str, Any]:
    _require_fixed(config, {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False})
    return {
        "norm": "layer_norm",
        "norm_eps": config.number("layer_norm_epsilon"),
        "activation": config.text("activation_function"),
        "gated": False,
        "learned_positions": True,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    }


def _mixtral(config: _Config) -> dict[str, Any]:
    """Also gpt-oss: the softmax over the chosen experts is that over all of them, made to sum to one again."""
    return _no_bias(config) | {
        "gates_sum_to_one": True,
        "num_experts": config.whole("num_experts"),
        "experts_per_token": config.whole("num_experts_per_tok"),
        "d_ff_expert": config.whole("intermediate_size"),
    }


def _gpt_oss(config: _Config) -> dict[str, Any]:
    _require_fixed(config, {"swiglu_alpha": 1.702, "swiglu_limit": 7.0})
    return _mixtral(config) | {
        "qkv_bias": config.flag("attention_bias"),
        "out_bias": config.flag("attention_bias"),
        "mlp_bias": True,
        "router_bias": True,
        "attention_sinks": True,
    }


def _qwen_moe(config: _Config) -> dict[str, Any]:
    """Layers have experts at every ``decoder_sparse_step``-th place, unless listed in ``mlp_only_layers``."""
    step = max(config.whole("decoder_sparse_step"), 1)
    only = set(config.items("mlp_only_layers")) if config.has("mlp_only_layers") else set()
    layers = range(config.whole("num_hidden_layers"))
    fields = {
        "num_experts": config.whole("num_experts"),
        "experts_per_token": config.whole("num_experts_per_tok"),
        "d_ff_expert": config.whole("moe_intermediate_size"),
        "dense_layers": tuple(layer for layer in layers if layer in only or (layer + 1) % step),
        "mlp_bias": False,
        "gates_sum_to_one": config.flag("norm_topk_prob"),
    }
    if config.family == "qwen3_moe":
        return fields | {"qk_norm": True}
    d_ff_shared = config.whole("shared_expert_intermediate_size")
    shared = {"num_shared_experts": 1, "d_ff_shared": d_ff_shared, "shared_expert_gate": True}
    return fields | (shared if d_ff_shared else {}) | {"qkv_bias": config.flag("qkv_bias"), "out_bias": False}


def _deepseek(config: _Config) -> dict[str, Any]:
    """Latent attention, a few dense layers first, then routed and shared experts."""
    num_shared = config.whole("n_shared_experts") if config.has("n_shared_experts") else 0
    first, every = config.whole("first_k_dense_replace"), max(config.whole("moe_layer_freq"), 1)
    layers = range(config.whole("num_hidden_layers"))
    return {
        "num_kv_heads": config.whole("num_attention_heads"),
        "mlp_bias": False,
        "num_experts": config.whole("num_experts"),
        "experts_per_token": config.whole("num_experts_per_tok"),
        "d_ff_expert": config.whole("moe_intermediate_size"),
        "num_shared_experts": num_shared,
        "d_ff_shared": num_shared * config.whole("moe_intermediate_size"),
        "dense_layers": tuple(layer for layer in layers if layer < first or layer % every),
        "q_lora_rank": config.whole("q_lora_rank") if config.has("q_lora_rank") else 0,
        "kv_lora_rank": config.whole("kv_lora_rank"),
        "qk_nope_head_dim": config.whole("qk_nope_head_dim"),
        "qk_rope_head_dim": config.whole("qk_rope_head_dim"),
        "v_head_dim": config.whole("v_head_dim"),
        **_deepseek_router(config),
    }


def _deepseek_router(config: _Config) -> dict[str, Any]:
    """V3 scores with a sigmoid; V2 looks at groups of experts only where its ``topk_method`` says so."""
    is_v3 = config.family == "deepseek_v3"
    in_groups = is_v3 or config.text("topk_method") == "group_limited_greedy"
    keys = {"expert_groups": "n_group", "groups_per_token": "topk_group"} if in_groups else {}
    return {field: config.whole(key) for field, key in keys.items()} | {
        "router_scores": "sigmoid" if is_v3 else "softmax",
        "gates_sum_to_one": is_v3 and config.flag("norm_topk_prob"),
        "routed_scale": config.number("routed_scaling_factor"),
    }


_FAMILY_FIELDS: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _no_bias,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma2,
    "gpt2": _gpt2,
    "phi3": _no_bias,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}
