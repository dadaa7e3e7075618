"""Checks values that a user gives: types, and numbers that must be positive and finite."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from meshwright.core.errors import InputError, as_sentence

_T = TypeVar("_T", bound=msgspec.Struct)


LARGEST = 1e60
"""Far above any figure, so that products of a few stay finite."""


def figure_faults(value: Any, key: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yields key and fault of every number in tables and lists that is not finite, or larger than any figure, and of
    every text that is not UTF-8."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from figure_faults(one, (*key, str(name)))
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from figure_faults(one, (*key, number))
    elif isinstance(value, int | float) and not -LARGEST <= value <= LARGEST:
        yield key, f"{shown(value)}: give a finite number, at most {LARGEST:g}."
    elif isinstance(value, str) and any("\ud800" <= one <= "\udfff" for one in value):
        yield key, f"{value!r}, which is not UTF-8. Give text."


def shown(value: float) -> str:
    """Returns a number as messages have it, whatever its size."""
    digits = int(value.bit_length() * 0.30103) + 1 if isinstance(value, int) else 0
    return f"a number of {digits} digits" if digits > 300 else f"{value:g}"


def convert_fields(fields: Mapping[str, Any], kind: type[_T], *, section: str) -> _T:
    """Converts fields to a Struct. Raises InputError that names a wrong field ``section.name`` and its valid words."""
    for key, fault in figure_faults(fields):
        raise InputError(f"{section}.{'.'.join(map(str, key))} is {fault}")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        where = str(error).replace("`$.", f"`{section}.")
        name = where.rpartition(f"`{section}.")[2].partition("`")[0].partition("[")[0]
        raise InputError(f"{as_sentence(where)}{_words_of(kind, name)}") from None


def _words_of(kind: type, name: str) -> str:
    """Returns " Use compiled, eager or ...." for a field of a few words, else the empty text."""
    declared = get_type_hints(kind).get(name)
    words = [word for part in (declared, *get_args(declared)) for word in get_args(part) if isinstance(word, str)]
    known = list(dict.fromkeys(word for word in words if word))
    return f" Use {', '.join(known[:-1])} or {known[-1]}." if len(known) > 1 else ""


def check_figures(
    given: msgspec.Struct, what: str, *, may_be_zero: Collection[str] = (), shares: Collection[str] = ()
) -> None:
    """Raises InputError for a number in a struct, its tables or its lists that is not finite and above 0.

    ``what`` begins the message. Fields ``may_be_zero`` may be 0, ``shares`` are at most 1; both apply to
    everything in a table of that name. Skips a nested struct that has its own ``__post_init__``. msgspec turns the
    error into one that names the path.
    """
    for key, value in _numbers(given, ()):
        if set(key) & set(shares):
            fine, wanted = 0 < value <= 1, "a share in (0, 1]"
        elif set(key) & set(may_be_zero):
            fine, wanted = 0 <= value < math.inf, "a number of at least 0"
        else:
            fine, wanted = 0 < value < math.inf, "a positive number"
        if not fine:
            raise InputError(f"{what} {'.'.join(key)} is {shown(value)}, give {wanted}")


def _numbers(value: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yields every number with its path."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value
    elif isinstance(value, msgspec.Struct) and (not key or not hasattr(value, "__post_init__")):
        for name in value.__struct_fields__:
            yield from _numbers(getattr(value, name), (*key, name))
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _numbers(one, (*key, name))
    elif isinstance(value, tuple):
        for number, one in enumerate(value):
            yield from _numbers(one, (*key, str(number)))
