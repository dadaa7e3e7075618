"""Checks values that a user gives: types, and numbers that must be positive and finite."""

import builtins
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from meshwright.core.errors import InputError, as_sentence, nearest, path_errors
from meshwright.core.extras import extras_named

_T = TypeVar("_T", bound=msgspec.Struct)
_F = TypeVar("_F", bound=Callable[..., Any])

KeyPath = tuple[str | int, ...]

LARGEST = 1e60
"""Limit on numbers, far above any figure, so that products of a few stay finite."""


def leaves(value: object, key: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yields every value in tables, lists and structs with its key; a struct inside that has its own ``__post_init__``
    counts as one value."""
    child_items: Iterable[tuple[str | int, object]]
    if isinstance(value, Mapping):
        child_items = value.items()
    elif isinstance(value, msgspec.Struct) and (not key or not hasattr(value, "__post_init__")):
        child_items = msgspec.structs.asdict(value).items()
    elif isinstance(value, list | tuple):
        child_items = enumerate(value)
    else:
        yield key, value
        return
    for child_key, child_value in child_items:
        yield from leaves(child_value, (*key, child_key))


def figure_faults(table: object) -> Iterator[tuple[KeyPath, str]]:
    """Yields the key and the fault of every number in tables and lists that is not finite or is beyond `LARGEST`, and
    of every text that is not UTF-8."""
    for key, value in leaves(table):
        if isinstance(value, int | float) and not -LARGEST <= value <= LARGEST:
            yield key, f"{shown(value)}: give a finite number, at most {LARGEST:g}."
        elif isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            yield key, f"{value!r}, which is not UTF-8. Give text."


def shown(value: float) -> str:
    """Returns a number as text for messages; of more than 300 digits only how many it has."""
    num_digits = int(value.bit_length() * 0.30103) + 1 if isinstance(value, int) else 0
    return f"a number of {num_digits} digits" if num_digits > 300 else f"{value:g}"


def convert_fields(fields: Mapping[str, Any], kind: type[_T], *, section: str) -> _T:
    """Converts fields to a Struct. Raises one InputError with every wrong field, ``section.name``, and its type."""
    faults = [f"{dotted((section, *key))} is {fault}" for key, fault in figure_faults(fields)]
    if not faults:
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            message = str(error).replace("`$.", f"`{section}.")
            faults = [fault for _, fault in field_faults(fields, kind, (section,))] or [as_sentence(message)]
    raise InputError(" ".join(faults))


def field_faults(value: object, hint: object, key: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yields the key and the fault of every part of plain data that does not fit a type hint: values of another type,
    unknown fields of tables, and tables that lack fields."""
    item_by_key: dict[str | int, tuple[object, object]]
    hint_kind, member_hints = _parts(hint)
    for option_hint in member_hints if hint_kind in (Union, UnionType) else (hint,):
        kind, hint_args = _parts(option_hint)
        if isinstance(value, Mapping) and _is_struct(kind):
            field_of = {field.encode_name: field for field in msgspec.structs.fields(option_hint)}
            yield from unknown_fields(value, field_of, key) if kind.__struct_config__.forbid_unknown_fields else ()
            absent = [repr(dotted((*key, name))) for name in field_of if field_of[name].required and name not in value]
            if absent:
                yield key, f"needs the field{'s' * (len(absent) > 1)} {', '.join(absent)}."
            item_by_key = {name: (value[name], field_of[name].type) for name in field_of if name in value}
        elif isinstance(value, Mapping) and kind is dict and hint_args:
            item_by_key = {name: (item, hint_args[1]) for name, item in value.items()}
        elif isinstance(value, list | tuple) and (kind is list or hint_args[1:] == (...,)):
            item_by_key = {index: (item, hint_args[0]) for index, item in enumerate(value)}
        else:
            continue
        for name, (item, item_hint) in item_by_key.items():
            yield from field_faults(item, item_hint, (*key, name))
        return
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        yield key, f"{dotted(key)} is {_quoted(value)}. Give {_hint_words(hint, of_tables=True)}."


def unknown_fields(table: Iterable[str], names: Iterable[str], key: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yields the key and the fault of every field of a table that is not among the names."""
    for name in table:
        if name not in names:
            yield (*key, name), f"{dotted((*key, name))} is not a field.{nearest(name, names)}"


def dotted(key: KeyPath) -> str:
    """Returns the name of a field in messages: ``"levels.2.size"``."""
    return ".".join(map(str, key))


def check_figures(
    given: msgspec.Struct, what: str, *, may_be_zero: Collection[str] = (), shares: Collection[str] = ()
) -> None:
    """Raises InputError for a number in a struct, its tables or its lists that is not finite and above 0.

    ``what`` begins the message. Fields ``may_be_zero`` may be 0, ``shares`` are at most 1; both apply to
    everything in a table of that name. Skips a nested struct that has its own ``__post_init__``. Where msgspec makes
    the struct, it adds the path to the error.
    """
    for key, value in leaves(given):
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if set(key) & set(shares):
            is_fine, wanted_words = 0 < value <= 1, "a share in (0, 1]"
        elif set(key) & set(may_be_zero):
            is_fine, wanted_words = 0 <= value < math.inf, "a number of at least 0"
        else:
            is_fine, wanted_words = 0 < value < math.inf, "a positive number"
        if not is_fine:
            raise InputError(f"{what} {dotted(key)} is {shown(value)}, give {wanted_words}")


# -- values from Python -----------------------------------------------------------------------------------

_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    Path: "a path",
    Any: "anything",
}
_UNFIT = object()


def fitted(value: Any, hint: object, what: str) -> Any:
    """Returns a value converted to its type hint: 1e6 to a whole number, text to a path, a list to a tuple.

    Raises InputError, whose text begins with ``what``, for a value of another type or a number that is not finite.
    """
    fit_value = _fit(value, hint)
    if fit_value is _UNFIT:
        raise InputError(f"{what} is {_quoted(value)}. Give {_hint_words(hint)}.")
    return fit_value


def _quoted(value: object) -> str:
    value_text = repr(value)
    return value_text if len(value_text) < 80 else f"a {type(value).__name__}"


@cache
def _parts(hint: object) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint) or hint, get_args(hint)


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _fit(value: Any, hint: object) -> Any:
    if hint is Any or (type(value) is hint and (hint is str or hint is bool)):
        return value
    base_type, hint_args = _parts(hint)
    if base_type in (Union, UnionType):
        return next((converted for hint_arg in hint_args if (converted := _fit(value, hint_arg)) is not _UNFIT), _UNFIT)
    if base_type is Literal:
        return value if value in hint_args else _UNFIT
    if base_type in (int, float):
        is_number = issubclass(type(value), Real) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
        is_fit = is_number and (base_type is float or isinstance(value, Integral) or value == int(value))
        return (value if isinstance(value, base_type) else base_type(value)) if is_fit else _UNFIT
    if base_type is Path and isinstance(value, str):
        return Path(value)
    if isinstance(base_type, type) and issubclass(base_type, Mapping) and hint_args and isinstance(value, Mapping):
        fitted_pairs = [(_fit(key, hint_args[0]), _fit(item, hint_args[1])) for key, item in value.items()]
        return _UNFIT if any(item is _UNFIT for pair in fitted_pairs for item in pair) else dict(fitted_pairs)
    if base_type in (tuple, Sequence):
        new_items = tuple(_fit(item, hint_args[0]) for item in value) if isinstance(value, list | tuple) else (_UNFIT,)
        return _UNFIT if any(item is _UNFIT for item in new_items) else new_items
    return value if not isinstance(base_type, type) or isinstance(value, base_type) else _UNFIT


def _hint_words(hint: Any, *, of_tables: bool = False) -> str:
    """Returns the words for a type hint: ``"a table {text: a whole number} or text"``; for a Struct its name or, with
    ``of_tables``, ``"a table of"`` its fields."""
    base_type, hint_args = (
        get_origin(hint) or hint,
        get_args(hint),
    )  # not of the cache, whose unions have another order
    words_of = partial(_hint_words, of_tables=of_tables)
    if base_type in (Union, UnionType):
        return " or ".join(words_of(hint_arg) for hint_arg in hint_args if hint_arg is not NoneType)
    if base_type is Literal:
        *first_words, last_word = [str(hint_arg) for hint_arg in hint_args if hint_arg] or ["nothing"]
        return f"{', '.join(first_words)} or {last_word}" if first_words else last_word
    if of_tables and _is_struct(base_type):
        names = base_type.__struct_fields__
        return f"a table of {', '.join(names if len(names) <= 24 else (*names[:8], f'and {len(names) - 8} others'))}"
    if isinstance(base_type, type) and issubclass(base_type, Mapping):
        return f"a table {{{': '.join(map(words_of, hint_args))}}}"
    if base_type in (tuple, list, Sequence):
        return f"a list of {words_of(hint_args[0])}"
    return _WORDS.get(base_type) or ("a function" if base_type is Callable else f"a {base_type.__name__}")


class _Names(dict[str, Any]):
    """Names of a module, for resolving type hints; names that only type checkers import resolve to `Any`."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


@cache
def _hints(given: Any) -> dict[str, Any]:
    return get_type_hints(given, localns=_Names(vars(sys.modules[given.__module__])))


class Checked(msgspec.Struct, frozen=True):
    """A Struct that converts its fields to their types, also if Python code makes it. InputError for wrong types."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            converted = fitted(value, _hints(type(self))[name], f"{type(self).__name__}.{name}")
            if converted is not value:
                msgspec.structs.force_setattr(self, name, converted)


def checked(function: _F) -> _F:
    """Wraps a function: converts its arguments to its type hints. Wrong types, files and missing extras: InputError."""
    signature, function_name = inspect.signature(function), function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def border(*given: object, **named: object) -> object:
        bound_args, hint_by_name = signature.bind(*given, **named), _hints(function)
        for name, value in bound_args.arguments.items():
            if name in hint_by_name and signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                bound_args.arguments[name] = fitted(value, hint_by_name[name], f"{function_name}: {name}")
        with path_errors(), extras_named(function_name):
            return function(*bound_args.args, **bound_args.kwargs)

    return cast(_F, border)
