"""Plain values as a Struct, with faults in the words of the one who gave them."""

from collections.abc import Mapping
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
