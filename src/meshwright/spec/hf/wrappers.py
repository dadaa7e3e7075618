"""Finds the text decoder in the config of a multimodal model; the other parts of the model are left out."""

from collections.abc import Mapping
from typing import Any

from meshwright.spec.hf.families import HfFields, tables
from meshwright.spec.hf.published import CONFIG_KEYS
from meshwright.spec.model import FAMILIES

_NESTED = ("thinker_config", "text_config")
_OUTER = ("tie_word_embeddings", *CONFIG_KEYS)
"""Keys outside the decoder's table that apply to the decoder too."""

LLAVA = ("llava", "llava_next")
"""Multimodal models whose files leave out sizes of the decoder."""


def is_nested(keys: Mapping[str, Any]) -> bool:
    """True if a config has the decoder's keys in a nested table."""
    return any(isinstance(keys.get(key), Mapping) for key in _NESTED)


def wrapper_prefix(keys: Mapping[str, Any]) -> str:
    """Returns the prefix of the decoder's weights in published files of a multimodal model; "" for any other model."""
    model_type = keys.get("model_type")
    has_own_part = is_nested(keys) or model_type not in FAMILIES
    prefix_by_type: dict[str, str] = tables()["wrappers"]
    return prefix_by_type.get(model_type, "") if isinstance(model_type, str) and has_own_part else ""


def text_half(keys: Mapping[str, Any]) -> HfFields:
    """Returns the decoder's keys in a multimodal config: nested or, as in Qwen 2 VL, next to the other parts' keys."""
    parts = [keys]
    while inner := next((part for key in _NESTED if isinstance(part := parts[-1].get(key), Mapping)), None):
        parts.append(inner)
    outer_keys = {key: part[key] for part in parts[:-1] for key in _OUTER if key in part}
    text_keys = dict(parts[-1])
    if len(parts) == 1:
        text_keys = {key: value for key, value in keys.items() if not key.endswith(("vision_config", "audio_config"))}
        text_keys["model_type"] = f"{keys['model_type']}_text"
    wrapper = keys["model_type"]
    defaults = tables()["text_defaults"].get(wrapper, {})
    sizes = tables()["text_sizes"].get(str(text_keys.get("model_type")), {}) if wrapper in LLAVA else {}
    return {"model_type": f"{wrapper}_text", **defaults, **sizes, **text_keys, **outer_keys}


def as_family(keys: HfFields) -> HfFields:
    """Returns a text decoder's keys with its family as ``model_type``, over the defaults of this kind of decoder."""
    half: HfFields = tables()["text_halves"].get(keys["model_type"], {"model_type": keys["model_type"]})
    defaults = {key: value for key, value in half.items() if key != "unread"}
    return {**defaults, **keys, **dict.fromkeys(half.get("unread", ())), "model_type": half["model_type"]}
