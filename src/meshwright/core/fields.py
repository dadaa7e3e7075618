"""Plain values that persons give, made a Struct: of its types, with numbers positive and finite, or refused at once."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from meshwright.core.errors import InputError, as_sentence

Thing = TypeVar("Thing", bound=msgspec.Struct)


def convert_fields(fields: Mapping[str, Any], kind: type[Thing], *, section: str) -> Thing:
    """The fields as a Struct; an InputError names a wrong one ``section.name``, and the words that it takes."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        where = str(error).replace("`$.", f"`{section}.")
        name = where.rpartition(f"`{section}.")[2].partition("`")[0].partition("[")[0]
        raise InputError(f"{as_sentence(where)}{_words_of(kind, name)}") from None


def _words_of(kind: type, name: str) -> str:
    """The words that a field takes, where it is one of words: " Use compiled, eager or ...."."""
    declared = get_type_hints(kind).get(name)
    words = [word for part in (declared, *get_args(declared)) for word in get_args(part) if isinstance(word, str)]
    known = list(dict.fromkeys(word for word in words if word))
    return f" Use {', '.join(known[:-1])} or {known[-1]}." if len(known) > 1 else ""


def check_figures(
    given: msgspec.Struct, what: str, *, may_be_zero: Collection[str] = (), shares: Collection[str] = ()
) -> None:
    """Raise InputError for a number of a struct, or of tables and lists in it, that is not finite and above 0.

    ``what`` begins the message. Fields ``may_be_zero`` are latencies and the like, ``shares`` at most 1; both hold for
    everything in a table of that name. A struct that checks itself is left out. msgspec makes of the error one that
    says where it stands.
    """
    for key, value in _numbers(given, ()):
        if set(key) & set(shares):
            fine, wanted = 0 < value <= 1, "a share in (0, 1]"
        elif set(key) & set(may_be_zero):
            fine, wanted = 0 <= value < math.inf, "a number of at least 0"
        else:
            fine, wanted = 0 < value < math.inf, "a positive number"
        if not fine:
            raise InputError(f"{what} {'.'.join(key)} is {value:g}, give {wanted}")


def _numbers(value: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number with the names that lead to it."""
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
