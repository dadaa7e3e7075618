"""``--set section.key=value``: fields of a model, job, strategy or training run given on the command line."""

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from meshwright.algebra.notation import parse_mesh
from meshwright.core.errors import InputError, nearest

SECTIONS: tuple[str, ...] = ("model", "job", "strategy", "train")

Thing = TypeVar("Thing", bound=msgspec.Struct)


def parse_fields(pairs: Sequence[str], *, sections: Sequence[str] = SECTIONS) -> dict[str, dict[str, Any]]:
    """Section -> key -> value of texts such as ``strategy.remat=block``; values are TOML or else plain text.

    Raises InputError for a text without section, key or value, naming the nearest section.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for pair in pairs:
        key, sep, text = pair.partition("=")
        section, dot, name = key.strip().partition(".")
        if not sep or not dot or not name:
            raise InputError(f"--set {pair!r} is not section.key=value. Write for example strategy.remat=block.")
        if section not in found:
            raise InputError(f"--set {key}: there is no section {section!r} here.{nearest(section, sections)}")
        found[section][name] = _value(text.strip())
    return found


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def with_fields(thing: Thing, section: str, changes: Mapping[str, Any]) -> Thing:
    """The same frozen data with some fields changed; an InputError names an unknown field or a wrong value."""
    fields = thing.__struct_fields__
    for name in changes:
        if name not in fields:
            raise InputError(f"{section}.{name} is not a field.{nearest(name, fields)}")
    try:
        return msgspec.convert({**msgspec.to_builtins(thing), **changes}, type(thing))
    except msgspec.ValidationError as error:
        where = str(error).replace("`$.", f"`{section}.")
        raise InputError(f"{where[:1].lower()}{where[1:].rstrip('.')}.") from None


def parse_axes(text: str | None) -> dict[str, int]:
    """Sizes of mesh axes from ``"fsdp=1024,tensor=4"``; {} for None."""
    return parse_mesh(text) if text else {}
