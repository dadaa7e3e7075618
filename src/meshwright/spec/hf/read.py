"""Reads a Hugging Face ``config.json`` as a `Model`, for every family in `meshwright.spec.model.FAMILIES`.

An absent key has the value that transformers gives it: ``data/families.toml`` has the defaults of its configuration
classes, so that a published file is read unchanged. Sizes that decide the parameter count have no default, except
where published files leave them out (gpt2, gemma3).
"""

import difflib
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from meshwright.core.errors import FileWarning, InputError, require_known
from meshwright.core.fields import convert_fields, figure_faults
from meshwright.core.files import read_json
from meshwright.spec.hf.families import (
    GROUP_KEYS,
    ROPE_KEYS,
    HfFields,
    aliases,
    config_fields,
    formats,
    number_words,
    tables,
)
from meshwright.spec.hf.gguf import gguf_config, gguf_files, gguf_name, is_gguf
from meshwright.spec.hf.published import CONFIG_KEYS, quantisation_of
from meshwright.spec.hf.wrappers import as_family, is_nested, text_half, wrapper_prefix
from meshwright.spec.model import FAMILIES, MAX_LAYERS, MAX_SIZE, Model, RopeScaling

MASK_KEYS = ("attention_mask", "attention_score")
"""Keys of this package, which transformers does not have: fields of `Model` for a mask and a score rule by name."""
OWN_FIELDS = "meshwright"
"""A key of this package: an object of the fields of `Model` that the family has no keys for."""

ROPE_KINDS = {"linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}
_NEEDS: dict[type, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    str: ((str,), "a name in quotes"),
    dict: ((dict,), "an object or null"),
    tuple: ((list, tuple), "a list"),
}


_PLAIN = {
    name: next(iter(get_args(hint))) if type(None) in get_args(hint) else hint
    for name, hint in (get_type_hints(Model) | get_type_hints(RopeScaling)).items()
}
_TYPES: dict[str, type] = {name: get_origin(hint) or hint for name, hint in _PLAIN.items()}
"""Field -> its plain type: int of ``int | None``, tuple of ``tuple[float, ...]``."""


class _Config:
    """The keys of one config, with transformers' defaults for keys that it lacks, and its rotary settings."""

    def __init__(self, given: HfFields, *, family: str, what: str) -> None:
        self.family, self.what, self.given, self.form = family, what, given, formats()[family]
        given = {key: _one_of(value) if key in self.form.alike else value for key, value in given.items()}
        self.keys = self.form.defaults | {aliases().get(key, key): value for key, value in given.items()}
        for key, followed_key in self.form.follows.items():
            if self.keys.get(key) is None:
                followed = self.keys.get(followed_key)
                self.keys[key] = self.form.defaults.get(followed_key) if followed is None else followed
        self.rope = self._rope()
        self.keys |= {key: value for key, value in self.rope.items() if value is not None}

    def _rope(self) -> HfFields:
        """Returns the table ``rope_scaling`` or ``rope_parameters``; if kinds of layers differ, full attention's."""
        tables = (self.read(key, dict) for key in ("rope_scaling", "rope_parameters") if self.has(key))
        table: HfFields = next(filter(None, tables), {})
        full_table, sliding_table = table.get("full_attention"), table.get("sliding_attention")
        if "rope_local_theta" not in self.form.keys or not isinstance(full_table, Mapping):
            return table or self.form.rope
        if isinstance(sliding_table, Mapping):
            for key in sliding_table.keys() - {"rope_theta"}:
                if sliding_table[key] not in (None, "default"):
                    raise InputError(f"{self.what}: {key} of sliding layers is {sliding_table[key]!r}. Leave it out.")
            self.keys["rope_local_base_freq"] = sliding_table.get("rope_theta", self.keys["rope_local_base_freq"])
        return dict(full_table)

    def require_understood(self) -> None:
        """Raises InputError for a key that may change what the model computes and is not read; warns of unknown keys.

        A key that transformers' code of the family does not read (`config_fields`) changes nothing.
        """
        known_keys, fields = {*self.form.known, *MASK_KEYS, OWN_FIELDS}, config_fields()
        unused_keys = {*fields["common"], *fields["families"][self.family]["not_read"]}
        rotary_values = {key: self.rope[key] for key in self.rope.keys() - {"type", "rope_theta", *ROPE_KEYS.values()}}
        for key, value in (*self.given.items(), *rotary_values.items()):
            allowed_form = self.form.only.get(key)
            value = _one_of(value) if key in self.form.alike else value
            if value is None or allowed_form == [] or key in CONFIG_KEYS:
                continue
            if allowed_form is not None:
                allowed_values = allowed_form if isinstance(allowed_form, list) else [allowed_form]
                if value not in allowed_values:
                    values_text = " or ".join(map(repr, allowed_values))
                    raise InputError(f"{self.what}: {key} is {value!r}. Only {values_text} is known here.")
            elif not value or key in known_keys or any(fnmatchcase(key, pattern) for pattern in self.form.harmless):
                continue
            elif key in rotary_values or (key not in unused_keys and _says_numbers(key)):
                raise InputError(
                    f"{self.what}: the key {key!r} of a {self.family} config is not known, so that its {value!r} may "
                    f"change what the model computes. Remove it if it has no effect.{similar(key, known_keys)}"
                )
            elif key not in unused_keys and key not in fields["read_by_none"]:
                warning = f"{self.what}: the key {key!r} is no key of a {self.family} config, and is not read."
                warnings.warn(warning, FileWarning, stacklevel=2)

    def read(self, key: str, kind: type, of: type | tuple[type, ...] = object) -> Any:
        """Returns the value of a key as ``kind``; a list has entries of the type ``of``. Raises InputError if the key
        is missing, has another type, or has a number that no model can have."""
        value: Any = self.keys.get(key)
        value_types, wanted_form = _NEEDS[kind]
        max_value = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        if key not in self.given:  # messages name the family's own spelling
            key = next((alias for alias, name in self.form.aliases.items() if name == key), key)
        if value is None:
            if key in self.given:
                raise InputError(f"{self.what}: {key} is null. Write {wanted_form} instead.")
            typos = difflib.get_close_matches(key, {*self.given, *self.rope} - self.form.known, n=1, cutoff=0.8)
            rename_hints = [f"The file has {name!r}: rename it to {key!r}." for name in typos]
            hint = rename_hints[0] if rename_hints else f"A {self.family} config needs it: add it to the file."
            raise InputError(f"{self.what}: the key {key!r} is missing. {hint}")
        if not isinstance(value, value_types) or (isinstance(value, bool) and kind is not bool):
            raise InputError(f"{self.what}: {key} is {value!r}. Write {wanted_form} instead.")
        for _, fault in figure_faults(value):
            raise InputError(f"{self.what}: {key} is {fault}")
        typed_value = kind(value)
        if kind is tuple and not all(isinstance(entry, of) and not isinstance(entry, bool) for entry in typed_value):
            raise InputError(f"{self.what}: {key} is {value!r}. Write a list of {'names' if of is str else 'numbers'}.")
        if kind is int and typed_value < 0:
            raise InputError(f"{self.what}: {key} is {value}. Write a number that is not negative.")
        if kind is int and typed_value > max_value:
            raise InputError(f"{self.what}: {key} is {value:,}. Write at most {max_value:,}.")
        return typed_value

    def fields(self, keys: Mapping[str, str]) -> HfFields:
        """Returns the value of each field; leaves out fields whose nullable key is null or absent."""
        key_by_field = {field: key for field, key in keys.items() if key not in self.form.nullable or self.has(key)}
        return {field: self.read(key, _TYPES[field]) for field, key in key_by_field.items()}

    def in_its_words(self, message: str) -> str:
        """Returns a message with names of fields of `Model` replaced by the keys that this config has for them."""
        key_of_field = self.form.keys | {f"encoder.{field}": key for field, key in self.form.encoder.items()}
        spelling_of = {aliases().get(key, key): key for key in self.given}
        keys = {field: spelling_of.get(key, key) for field, key in key_of_field.items()}
        keys |= {field: field for field in self.given.get(OWN_FIELDS, ())}
        return re.sub(r"[\w.]*\w", lambda word: keys.get(word[0], word[0]), message)

    def has(self, key: str) -> bool:
        return self.keys.get(key) is not None

    def layers(self) -> range:
        return range(self.read("num_hidden_layers", int))


def _says_numbers(key: str) -> bool:
    """True for a key that some model of transformers reads, or that contains one of `number_words`."""
    words = {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", key)}
    return key in config_fields()["read_by_some"] or not number_words().isdisjoint(words)


def _one_of(value: Any) -> Any:
    """Returns the entry of a list of equal entries; any other value as it is."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def similar(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" if ``name`` is a known name in other spelling or without one letter; else ""."""

    def plain(text: str) -> str:
        return re.sub(r"[\W_]", "", text.lower())

    def spellings(text: str) -> set[str]:
        return {text, *(text[:index] + text[index + 1 :] for index in range(len(text)) if not text[index].isdigit())}

    return next((f" Did you mean {word!r}?" for word in known if plain(name) in spellings(plain(word))), "")


def model_from_config(config: str | Path | Mapping[str, Any], name: str | None = None) -> Model:
    """Returns the Model of a Hugging Face config: a path to a config.json, its folder, or the parsed object; or of a
    GGUF file or its folder.

    Raises InputError, in one line, for a missing or broken file, an unknown ``model_type``, a missing or
    mistyped key, or sizes that do not divide.
    """
    if isinstance(config, Mapping):
        return _from_keys(dict(config), name or "model", name or "config")
    path = Path(config)
    if is_gguf(path):
        return _from_keys(gguf_config(path), name or gguf_name(gguf_files(path)[0]), str(path))
    file = path / "config.json" if path.is_dir() else path
    folder_name = file.resolve().parent.name
    keys = read_json(file, "Give the path of a config.json or of its folder.")
    if wrapper_prefix(keys):
        warning = f"{file}: of this {keys['model_type']} the decoder of text is read; its other parts are left out."
        warnings.warn(warning, FileWarning, stacklevel=2)
    return _from_keys(keys, name or (folder_name if file.name == "config.json" else file.stem), str(file))


def _from_keys(keys: HfFields, name: str, what: str) -> Model:
    family = keys.get("model_type")
    if not isinstance(family, str):
        raise InputError(f"{what}: the key 'model_type' is missing. Add one of: {', '.join(FAMILIES)}.")
    prefix, wrapper, has_half = wrapper_prefix(keys), family, is_nested(keys)
    keys = text_half(keys) if prefix else keys
    if not isinstance(keys["model_type"], str):
        raise InputError(f"{what}: model_type is {keys['model_type']!r}. Write {_NEEDS[str][1]} instead.")
    keys = as_family(keys)
    family = str(keys["model_type"])
    if family not in FAMILIES:
        if prefix and not has_half:
            raise InputError(f"{what}: a {wrapper} needs the key 'text_config', with its decoder. Add it.")
        for operation, model_types in tables()["missing_operations"].items():
            if family in model_types:
                raise InputError(f"{what}: model_type {family!r} needs {operation}, which this version does not have.")
        hint = similar(family, FAMILIES) or f" Known: {', '.join(FAMILIES)}."
        raise InputError(f"{what}: model_type {family!r} is not known.{hint}")
    quantisation_of(keys, family=family, what=what)
    config = _Config(keys, family=family, what=what)
    fields = _fields(config)
    fields = {"name": name, "family": family, "weights_prefix": prefix or formats()[family].prefix, **fields}
    try:
        return convert_fields(fields, Model, section=what)
    except InputError as error:
        message = str(error)
        if message.startswith(f"{name}:"):
            message = what + config.in_its_words(message.removeprefix(name))
        raise InputError(message) from None


def _fields(config: _Config) -> HfFields:
    """Returns the fields of a model: read from one key each, fixed by the family, or computed from several keys."""
    family, form = config.family, config.form
    widths = _widths(config) if family == "gemma3n" else {}
    is_grouped = family == "deepseek_v2" and config.read("topk_method", str) == "group_limited_greedy"
    key_of_field = form.keys | (GROUP_KEYS if is_grouped else {})
    fields: dict[str, Any] = (
        {"rope_scaling": _rope_scaling(config)} | config.fields(key_of_field) | _window(config) | form.fixed | widths
    )
    fields |= {key: config.read(key, str) for key in MASK_KEYS if config.has(key)}
    fields.setdefault("d_ff", 4 * fields["d_model"])
    fields.setdefault("num_kv_heads", fields["num_heads"])
    if beta := config.rope.get("llama_4_scaling_beta"):
        fields |= {"query_temper": beta, "temper_length": config.read(ROPE_KEYS["original_max_positions"], int)}
    if family == "gemma" and fields["activation"] == "gelu":  # so did its first releases say, and mean the other
        fields["activation"] = "gelu_pytorch_tanh"
    if "kv_lora_rank" in form.keys:
        head_dim = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
        fields |= {"num_kv_heads": fields["num_heads"], "head_dim": head_dim}
    elif "head_dim" not in fields:
        d_model, num_heads = fields["d_model"], fields["num_heads"]
        if num_heads < 1 or d_model % num_heads:
            fault = config.in_its_words(f"num_heads={num_heads} does not divide d_model={d_model}")
            raise InputError(
                f"{config.what}: {fault}, and head_dim is not given. Set head_dim, or a number of heads that divides "
                f"{d_model}."
            )
        fields["head_dim"] = d_model // num_heads
    if family.startswith("hunyuan") and config.rope.get("alpha"):
        fields |= {"rope_scaling": None, "rope_theta": _theta_by_alpha(config, fields)}
    if family == "gemma4":
        fields |= _gemma4_parts(config, fields)
    if family == "gemma3n":
        fields |= _gemma3n_parts(config, fields)
    if fields.get("num_experts"):
        fields["dense_layers"] = _layers_without_experts(config)
        fields.setdefault("d_ff_shared", fields.get("num_shared_experts", 0) * fields["d_ff_expert"])
    if family in ("smollm3", "llama4"):
        fields["unrotated_layers"] = _unrotated(config)
    if family == "llama4" and not config.keys["attn_temperature_tuning"]:  # a number in early files
        fields["query_temper"] = 0.0
    if form.global_unrotated and config.has("sliding_window"):
        sliding_layers = fields.get("sliding_layers", ())
        fields["unrotated_layers"] = tuple(layer for layer in config.layers() if layer not in sliding_layers)
    if "rotary_dim" in form.computed and config.has("rotary_dim"):
        fields.setdefault("rope_fraction", _fraction(config.read("rotary_dim", int), fields["head_dim"]))
    if family in ("falcon", "gpt_bigcode", "stablelm", "opt"):
        fields |= _of_older_decoder(config, fields)
    if family == "qwen2_moe" and fields["d_ff_shared"]:
        fields |= {"num_shared_experts": 1, "shared_expert_gate": True}
    fields |= _encoder(config) | (_t5_fields(config) if config.has("feed_forward_proj") else {})
    config.require_understood()
    return fields | (config.read(OWN_FIELDS, dict) if config.has(OWN_FIELDS) else {})


def _theta_by_alpha(config: _Config, fields: HfFields) -> float:
    """Returns the rotary theta of a Hunyuan: ``rope_theta`` scaled by its ``alpha``, for longer contexts."""
    alpha, width = config.read("alpha", float), fields["head_dim"]
    if alpha <= 0 or width < 3:
        raise InputError(
            f"{config.what}: alpha is {alpha:g}, for heads {width} wide. Give a positive one, and heads 4 wide or more."
        )
    return float(fields["rope_theta"] * alpha ** (width / (width - 2)))


def _encoder(config: _Config) -> HfFields:
    """Returns the fields of the encoder; {} for a family without one."""
    sizes = {field: config.read(key, int) for field, key in config.form.encoder.items()}
    for key in ("num_mel_bins", "relative_attention_num_buckets"):
        if sizes and config.has(key) and config.read(key, int) < 1:
            raise InputError(f"{config.what}: {key} is {config.read(key, int)}. Give a positive number.")
    num_target_tokens, num_tokens = (config.keys.get(key) for key in ("decoder_vocab_size", "vocab_size"))
    if num_target_tokens not in (None, num_tokens):
        raise InputError(
            f"{config.what}: decoder_vocab_size={num_target_tokens} is not vocab_size={num_tokens}. Only one table of "
            f"tokens for both stacks is known here."
        )
    return {"encoder": {**sizes, "sinusoids": "features" in sizes}} if sizes else {}


def _t5_fields(config: _Config) -> HfFields:
    """Returns the fields of the feed-forward block and of the head of a T5.

    If ``tie_word_embeddings``, the head is tied and, except in mT5, the stream is divided by sqrt(D) before it. Files
    that transformers 5 wrote always say tied; in these ``scale_decoder_outputs`` false means that the head is not tied.
    """
    kind = config.read("feed_forward_proj", str)
    *gate, activation = kind.split("-")
    if gate not in ([], ["gated"]):
        raise InputError(f"{config.what}: feed_forward_proj is {kind!r}. Write an activation, or gated-ACTIVATION.")
    is_tied = config.read("tie_word_embeddings", bool) and config.keys.get("scale_decoder_outputs") is not False
    is_divided = is_tied and config.family != "mt5"
    return {
        "gated": bool(gate),
        "activation": "gelu_new" if kind == "gated-gelu" else activation,
        "tied_embeddings": is_tied,
        "logit_divisor": config.read("d_model", int) ** 0.5 if is_divided else 1.0,
    }


def _of_older_decoder(config: _Config, fields: HfFields) -> HfFields:
    """Returns the fields that Falcon, GPT BigCode, StableLM and OPT determine by several keys."""
    family, num_heads = config.family, fields["num_heads"]
    if family == "stablelm":
        return {"shared_norm": fields["parallel_block"]}
    if family == "gpt_bigcode":
        return {"num_kv_heads": 1 if config.read("multi_query", bool) else num_heads}
    if family == "opt":
        width = config.read("word_embed_proj_dim", int) if config.has("word_embed_proj_dim") else fields["d_model"]
        if width != fields["d_model"]:
            raise InputError(
                f"{config.what}: word_embed_proj_dim is {width} and hidden_size {fields['d_model']}. A projection of "
                f"embeddings (opt-350m) is not known here; give a model without one."
            )
        return {}
    is_new = config.read("new_decoder_architecture", bool)
    num_kv_heads = 1 if config.read("multi_query", bool) else num_heads
    if is_new:
        num_kv_heads = config.read("num_kv_heads", int) if config.has("num_kv_heads") else num_heads
    num_norms = config.read("num_ln_in_parallel_attn", int) if config.has("num_ln_in_parallel_attn") else 2
    parallel_block = is_new or config.read("parallel_attn", bool)
    shared_norm = parallel_block and not (is_new and num_norms == 2)
    return {"num_kv_heads": num_kv_heads, "parallel_block": parallel_block, "shared_norm": shared_norm}


def _fraction(part: int, whole: int) -> float:
    """Returns part / whole, rounded so that int(whole * fraction) is ``part`` again."""
    fraction = part / whole
    return fraction if int(whole * fraction) == part else math.nextafter(fraction, 1.0)


def _layers_without_experts(config: _Config) -> tuple[int, ...]:
    """Returns the layers without experts of a model with experts, by the family's key: as ``mlp_layer_types`` lists
    them, the first ``first_k_dense_replace``, outside a range or list of routed layers, or by Qwen's sparse step."""
    layers, keys = config.layers(), config.form.computed
    if "mlp_layer_types" in keys and config.has("mlp_layer_types"):
        kinds = _of_every_layer(config, "mlp_layer_types", ("dense", "sparse"))
        return tuple(layer for layer in layers if kinds[layer] == "dense")
    if "first_k_dense_replace" in keys or "mlp_layer_types" in keys:
        return tuple(layers[: config.read("first_k_dense_replace", int)])
    if "moe_layer_interval" in keys:
        first, interval = (config.read(f"moe_layer_{key}", int) for key in ("start_index", "interval"))
        last = config.keys["moe_layer_end_index"]
        routed = range(first, len(layers) if last in (None, -1) else last + 1)
        return tuple(layer for layer in layers if layer not in routed or (layer + 1) % max(interval, 1))
    if "moe_layers" in keys:
        step = max(config.read("interleave_moe_layer_step", int), 1)
        routed_layers = config.read("moe_layers", tuple, int) if config.has("moe_layers") else layers[step - 1 :: step]
        return tuple(layer for layer in layers if layer not in routed_layers)
    if "decoder_sparse_step" not in keys:
        return ()
    sparse_step = max(config.read("decoder_sparse_step", int), 1)
    mlp_only_layers = config.read("mlp_only_layers", tuple, int) if config.has("mlp_only_layers") else ()
    return tuple(layer for layer in layers if layer in mlp_only_layers or (layer + 1) % sparse_step)


def _gemma4_parts(config: _Config, fields: HfFields) -> HfFields:
    """Returns the fields of Gemma 4 that depend on several keys: heads of layers without a window, layer embeddings,
    shared keys and experts. Its dense block next to the routed experts counts as a shared expert."""
    parts = _global_heads(config, fields)
    table_len = config.keys["vocab_size_per_layer_input"]
    if fields["layer_embed_dim"] and table_len not in (None, fields["vocab_size"]):
        raise InputError(
            f"{config.what}: vocab_size_per_layer_input={table_len} is not vocab_size={fields['vocab_size']}. Only "
            f"embeddings of layers for all tokens are known here."
        )
    parts["wide_shared_mlp"] = fields["wide_shared_mlp"] and fields["num_shared_kv_layers"] > 0
    if not config.read("enable_moe_block", bool):
        return parts | dict.fromkeys(("num_experts", "experts_per_token", "d_ff_expert"), 0)
    experts = {key: config.read(key, int) for key in ("num_experts", "top_k_experts", "moe_intermediate_size")}
    parts |= dict(zip(("num_experts", "experts_per_token", "d_ff_expert"), experts.values(), strict=True))
    beside = {"num_shared_experts": 1, "d_ff_shared": fields["d_ff"]}
    return parts | beside | dict.fromkeys(("gates_sum_to_one", "branch_norms", "expert_scale"), True)


def _gemma3n_parts(config: _Config, fields: HfFields) -> HfFields:
    """Returns the rows of Gemma 3n's layer embeddings, and the layers whose gates are sparse with their one share of
    zeros, by default 95% in the first ten of more than ten layers."""
    layers, table_len = config.layers(), config.read("vocab_size_per_layer_input", int)
    shares = [0.95 if len(layers) > 10 and layer < 10 else 0.0 for layer in layers]
    if config.has("activation_sparsity_pattern"):
        shares = [float(share) for share in _of_every_layer(config, "activation_sparsity_pattern", of=(int, float))]
    if len(kinds := {share for share in shares if share}) > 1:
        raise InputError(
            f"{config.what}: activation_sparsity_pattern has {' and '.join(f'{share:g}' for share in sorted(kinds))}. "
            f"Only one share besides 0 is known here."
        )
    if table_len > fields["vocab_size"]:
        raise InputError(
            f"{config.what}: vocab_size_per_layer_input={table_len} exceeds vocab_size={fields['vocab_size']}. Only "
            f"rows of tokens are known here."
        )
    return {
        "layer_vocab_size": table_len if table_len < fields["vocab_size"] else 0,
        "gate_sparsity": max(kinds, default=0.0),
        "sparse_layers": tuple(layer for layer in layers if shares[layer]),
    }


def _widths(config: _Config) -> HfFields:
    """Returns the larger of the two feed-forward widths that Gemma 3n may list, and its layers; {} without a list. Sets
    the key ``intermediate_size`` to the smaller width."""
    if not isinstance(config.keys.get("intermediate_size"), list):
        return {}
    widths = _of_every_layer(config, "intermediate_size")
    config.keys["intermediate_size"], wide = min(widths), max(widths)
    if not {*widths} <= {min(widths), wide}:
        raise InputError(f"{config.what}: intermediate_size has {len({*widths})} widths. Only two are known here.")
    layers = tuple(layer for layer in config.layers() if widths[layer] == wide != min(widths))
    return {"d_ff_wide": wide if layers else 0, "wide_layers": layers}


def _global_heads(config: _Config, fields: HfFields) -> HfFields:
    """Returns the heads of Gemma 4's layers without a window, from its ``global_`` keys or from ``per_layer_config``,
    which transformers writes. Their number differs from other layers' only if values are keys."""
    table = config.read("per_layer_config", dict) if config.has("per_layer_config") else {}
    width_key, heads_key = "head_dim", "num_key_value_heads"
    own_keys = {width_key: "global_head_dim", heads_key: "num_global_key_value_heads"}
    heads = {key: config.read(own_keys[key], int) for key in own_keys if config.has(own_keys[key])}
    heads = heads if fields["values_from_keys"] else {**heads, heads_key: fields["num_kv_heads"]}
    full_layers = [str(layer) for layer in config.layers() if layer not in fields.get("sliding_layers", ())]
    keys_of_layer = {str(layer).lstrip("0") or "0": keys for layer, keys in table.items()}  # written as "05"
    layer_tables = [keys_of_layer.get(layer, {}) for layer in full_layers]
    if table and (len(table) > len(full_layers) or any(keys != layer_tables[0] for keys in layer_tables)):
        raise InputError(
            f"{config.what}: per_layer_config must be alike in all layers without a window, and only there."
        )
    heads |= layer_tables[0] if table else {}
    return {
        "global_head_dim": heads[width_key],
        "num_global_kv_heads": heads.get(heads_key, fields["num_kv_heads"]),
    }


def _unrotated(config: _Config) -> tuple[int, ...]:
    """Returns the layers without rope of SmolLM3 and Llama 4: with 0 in ``no_rope_layers`` or, without that list, every
    ``no_rope_layer_interval``-th."""
    if not config.keys.get("no_rope_layers"):
        layer_interval = max(config.read("no_rope_layer_interval", int), 1)
        return tuple(layer for layer in config.layers() if (layer + 1) % layer_interval == 0)
    is_rotated = _of_every_layer(config, "no_rope_layers")
    return tuple(layer for layer in config.layers() if not is_rotated[layer])


def _of_every_layer(
    config: _Config, key: str, kinds: Sequence[str] = (), *, of: type | tuple[type, ...] = int
) -> tuple[Any, ...]:
    """Returns the list of a key, a value for each layer: one of ``kinds`` or, without kinds, a value of type ``of``."""
    values: tuple[Any, ...] = config.read(key, tuple, str if kinds else of)
    if len(values) != len(config.layers()):
        raise InputError(
            f"{config.what}: {key} has {len(values)} entries for num_hidden_layers={len(config.layers())}. "
            f"Give one entry per layer."
        )
    if strange := [value for value in values if kinds and value not in kinds]:
        raise InputError(
            f"{config.what}: {key} has {strange[0]!r}. Only {' or '.join(map(repr, kinds))} is known here."
        )
    return values


def _rope_scaling(config: _Config) -> RopeScaling | None:
    kind = config.rope.get("rope_type", config.rope.get("type", "default"))
    if not isinstance(kind, str):
        raise InputError(f"{config.what}: rope_type is {kind!r}. Write {_NEEDS[str][1]} instead.")
    kind = "longrope" if kind == "su" or (kind == "yarn" and config.family == "phi3") else kind
    if kind in ("default", "mrope"):  # the second is the first where no token is of an image
        return None
    require_known(f"{config.what}: rope_type", kind, ROPE_KINDS)
    original_key = ROPE_KEYS["original_max_positions"]
    if kind == "proportional":
        keys = {"factor": "factor", "fraction": "partial_rotary_factor"}
        return RopeScaling(kind=kind, **config.fields({field: key for field, key in keys.items() if config.has(key)}))
    for key in ("factor", "low_freq_factor", "high_freq_factor", original_key) if kind == "llama3" else ():
        config.read(key, float)
    key_of_field = {field: key for field, key in ROPE_KEYS.items() if field != "kind" and config.has(key)}
    fields = config.fields(key_of_field)
    for key in ("short_factor", "long_factor"):
        if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in fields.get(key, ())):
            raise InputError(f"{config.what}: {key} is not a list of numbers. Write numbers only.")
    if "factor" not in fields and kind in ("yarn", "longrope") and "original_max_positions" in fields:
        # the factor by which the longest sequence has grown
        fields["factor"] = config.read("max_position_embeddings", int) / fields["original_max_positions"]
    return RopeScaling(kind=kind, **fields)


def _window(config: _Config) -> HfFields:
    """Returns the fields of the sliding window: its length and its layers; {} if no layer has a window."""
    is_switched_off = "use_sliding_window" in config.form.defaults and not config.read("use_sliding_window", bool)
    key = "attention_chunk_size" if config.family == "llama4" else "sliding_window"
    if is_switched_off or not config.has(key):
        return {}
    layers = tuple(_sliding_layers(config, config.layers()))
    return {"sliding_window": config.read(key, int), "sliding_layers": layers} if layers else {}


def _sliding_layers(config: _Config, layers: range) -> Iterable[int]:
    """Returns the layers with a window: as listed in ``layer_types``, else by the family's pattern."""
    if config.has("layer_types"):
        near_kind = "chunked_attention" if config.family == "llama4" else "sliding_attention"
        layer_kinds = _of_every_layer(config, "layer_types", (near_kind, "full_attention"))
        layers = layers[:-1] if config.family == "gemma4" else layers  # whose last layer has none, whatever is listed
        return [layer for layer in layers if layer_kinds[layer] == near_kind]
    if config.family == "smollm3":
        return _unrotated(config)
    if config.family == "llama4":
        return sorted({*layers} - {*_unrotated(config)})
    if config.family == "qwen2_moe":
        return layers[: config.read("max_window_layers", int) : 2]
    if "max_window_layers" in config.form.computed:
        return layers[config.read("max_window_layers", int) :]
    if config.family in ("gemma2", "gpt_oss"):
        return layers[::2]
    if config.family == "gemma3n":
        return [layer for layer in layers if (layer + 1) % 5]
    if config.family == "gemma4":
        return [layer for layer in layers[:-1] if (layer + 1) % 6]
    if config.has("sliding_window_pattern"):
        return _local_layers(config)
    return layers


def _local_layers(config: _Config) -> Iterable[int]:
    """Returns the layers with a window: all but every n-th for a number n; for text such as "LLLG", which repeats, the
    layers with an L, except the last layer."""
    pattern = config.keys["sliding_window_pattern"]
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return [layer for layer in config.layers()[:-1] if pattern[layer % len(pattern)] == "L"]
    period = max(config.read("sliding_window_pattern", int), 1)
    return [layer for layer in config.layers() if (layer + 1) % period]
