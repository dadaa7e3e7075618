"""The formats of every family's published files, from ``data/families.toml``; reading and writing use the same rows."""

import functools
import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from meshwright.core.errors import InputError
from meshwright.spec.model import FAMILIES, RopeScaling

FILE = Path(__file__).parents[1] / "data" / "families.toml"
FIELDS_FILE = FILE.with_name("config_fields.json")

HfFields = dict[str, Any]
"""An object of a config.json or of a file like it: values of any kind by key."""

ROPE_KEYS = {name: name for name in RopeScaling.__struct_fields__} | {
    "kind": "rope_type",
    "original_max_positions": "original_max_position_embeddings",
}
"""Field of a RopeScaling -> key in ``rope_scaling`` or ``rope_parameters``."""

GROUP_KEYS = {"expert_groups": "n_group", "groups_per_token": "topk_group"}
"""Field of `Model` -> key of a config.json, for routers that choose among groups of experts."""


class Format(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The config.json and the weight names of one family; the data file explains each table."""

    keys: dict[str, str]
    defaults: HfFields
    nullable: tuple[str, ...]
    harmless: tuple[str, ...]
    without: tuple[str, ...] = ()
    fixed: HfFields = {}
    only: HfFields = {}
    computed: tuple[str, ...] = ()
    aliases: dict[str, str] = {}
    rope: HfFields = {}
    prefix: str = "model."
    layers: str = "{prefix}layers.{layer}."
    weights: dict[str, str] = {}
    encoder: dict[str, str] = {}
    encoder_layers: str = "encoder.{prefix}layers.{layer}."
    follows: dict[str, str] = {}
    in_memory: dict[str, str] = {}
    alike: tuple[str, ...] = ()
    global_unrotated: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        for field in (*self.fixed, *self.without):
            self.keys.pop(field, None)

    @property
    def known(self) -> set[str]:
        """The keys of a config.json of the family that are read."""
        rotary_keys = ("rope_scaling", "rope_parameters") if "rope_theta" in self.keys.values() else ()
        encoder_keys = (*self.encoder.values(), *self.follows)
        return {"model_type", *rotary_keys, *self.keys.values(), *self.aliases, *self.computed, *encoder_keys}


@functools.cache
def tables() -> HfFields:
    """Returns the parsed data file: a table for each family, and further tables that its first lines explain."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


@functools.cache
def formats() -> dict[str, Format]:
    """Returns the format of every family. Raises InputError for a family without a table in the data file."""
    entries = tables()

    def laid_over_bases(name: str) -> HfFields:
        entry, fields = dict(entries[name]), dict[str, Any]()
        shared = ["_every"] if name in FAMILIES else []
        for table in (*map(laid_over_bases, [*shared, *entry.pop("base", ())]), entry):
            for part, value in table.items():
                fields[part] = fields.get(part, {}) | value if isinstance(value, dict) else value
        return fields

    for name in FAMILIES:
        if name not in entries:
            raise InputError(f"spec/data/families.toml has no table [{name}]. Add one with its keys.")
    return {name: msgspec.convert(laid_over_bases(name), Format) for name in FAMILIES}


@functools.cache
def config_fields() -> HfFields:
    """Returns the fields of all configuration classes of one version of ``transformers``: ``common`` to all classes,
    which no model reads; under ``families`` by family, "read" and "not_read" by its code; of all models,
    ``read_by_some`` and ``read_by_none``."""
    fields: HfFields = json.loads(FIELDS_FILE.read_text(encoding="utf-8"))
    return fields


@functools.cache
def number_words() -> frozenset[str]:
    """Returns the words that suggest, as part of a key, that the key changes what a model computes."""
    return frozenset(tables()["number_words"])


@functools.cache
def aliases() -> dict[str, str]:
    """Maps other spellings of keys, of all families, to the keys."""
    return {alias: key for form in formats().values() for alias, key in form.aliases.items()}
