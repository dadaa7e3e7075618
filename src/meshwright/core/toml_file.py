"""TOML files that a person writes: read with the line of every key, every error at once; and written back."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import tomli_w
from msgspec import inspect

from meshwright.core.errors import InputError, as_sentence, nearest

T = TypeVar("T")
Key = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]#]+?)\s*\]\]?\s*(?:#.*)?$")
_ASSIGN = re.compile(r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'')


class TomlFile(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed file: its table, and the line on which each key stands."""

    path: str
    data: dict[str, Any]
    lines: dict[Key, int]

    def error(self, key: Key, message: str) -> InputError:
        """An InputError that starts with ``path:line:`` of the key, or of the table that holds it."""
        return InputError(f"{self.where(key)}: {message}")

    def where(self, key: Key) -> str:
        """``path:line`` of the key or of the nearest table above it."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.lines:
                return f"{self.path}:{self.lines[key[:length]]}"
        return self.path

    def check_keys(self, names: Iterable[str], *, required: Iterable[str] = (), at: Key = ()) -> None:
        """Raise one InputError for all keys of the table ``at`` that are unknown or missing."""
        table: Any = self.data
        for part in at:
            table = table[part]
        problems = _key_problems(self, table, tuple(names), tuple(required), at)
        if problems:
            raise InputError("; ".join(problems))


def read_toml(path: Path) -> TomlFile:
    """The file's table with the line of each key. A missing or broken file is an InputError in one line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as text: {error}.") from None
    return parse_toml(text, path=str(path))


def parse_toml(text: str, *, path: str = "<text>") -> TomlFile:
    """The same for text that is not in a file."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\s*\(at line (\d+), column (\d+)\)$", str(error))
        line = place.group(1) if place else str(text.count("\n") + 1)
        reason = str(error)[: place.start()] if place else str(error).removesuffix(" (at end of document)")
        raise InputError(f"{path}:{line}: not valid TOML: {reason[:1].lower()}{reason[1:]}.") from None
    return TomlFile(path=path, data=data, lines=_key_lines(text))


def decode_toml(file: TomlFile, kind: type[T], *, at: Key = ()) -> T:
    """The table ``at`` of the file as a Struct.

    Every unknown key (with the nearest known one), missing key and wrong value is collected into ONE
    InputError, each with ``path:line``.
    """
    value: Any = file.data
    for part in at:
        value = value[part]
    problems = _problems(file, value, inspect.type_info(kind), at)
    if problems:
        raise InputError("; ".join(problems))
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise file.error(at, _reason(error)) from None


def load_toml(path: Path, kind: type[T]) -> T:
    """``decode_toml`` of a whole file."""
    return decode_toml(read_toml(path), kind)


def _problems(file: TomlFile, value: Any, kind: inspect.Type, at: Key) -> list[str]:
    """Each fault of the value, descending into tables so that one fault does not hide the next."""
    if isinstance(kind, inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field for field in kind.fields}
        required = tuple(name for name, field in fields.items() if field.required)
        found = _key_problems(file, value, tuple(fields), required, at)
        for name, field in fields.items():
            if name in value:
                found += _problems(file, value[name], field.type, (*at, name))
        return found
    if isinstance(kind, inspect.DictType) and isinstance(value, dict):
        return [p for key, item in value.items() for p in _problems(file, item, kind.value_type, (*at, key))]
    if isinstance(kind, inspect.VarTupleType | inspect.ListType) and isinstance(value, list):
        return [p for i, item in enumerate(value) for p in _problems(file, item, kind.item_type, (*at, i))]
    return _value_problems(file, value, kind, at)


def _value_problems(file: TomlFile, value: Any, kind: inspect.Type, at: Key) -> list[str]:
    options = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    tables = [option for option in options if isinstance(option, inspect.StructType | inspect.DictType)]
    if tables and isinstance(value, dict):
        return _problems(file, value, tables[0], at)
    try:
        msgspec.convert(value, _annotation(options))
    except msgspec.ValidationError as error:
        name = ".".join(str(part) for part in at)
        return [f"{file.where(at)}: {name} = {_shown(value)}: {_reason(error)}"]
    return []


def _annotation(options: tuple[inspect.Type, ...]) -> Any:
    """The plain type of a leaf, rebuilt from its description."""
    plain: Any = None
    for option in options:
        one = _PLAIN[type(option)](option) if type(option) in _PLAIN else Any
        plain = one if plain is None else plain | one if one is not Any and plain is not Any else Any
    return plain


_PLAIN: dict[type, Any] = {
    inspect.IntType: lambda kind: int,
    inspect.FloatType: lambda kind: float,
    inspect.StrType: lambda kind: str,
    inspect.BoolType: lambda kind: bool,
    inspect.NoneType: lambda kind: type(None),
    inspect.LiteralType: lambda kind: _literal(kind.values),
    inspect.StructType: lambda kind: kind.cls,
    inspect.DictType: lambda kind: dict,
    inspect.VarTupleType: lambda kind: list,
    inspect.ListType: lambda kind: list,
}


def _literal(values: Iterable[Any]) -> Any:
    return Literal[tuple(values)]


def _reason(error: Exception) -> str:
    return as_sentence(str(error).split(" - at `")[0])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _key_problems(
    file: TomlFile, table: Mapping[str, Any], names: tuple[str, ...], required: tuple[str, ...], at: Key
) -> list[str]:
    found = [
        f"{file.where((*at, key))}: unknown key {key!r}.{nearest(key, names)}" for key in table if key not in names
    ]
    where = f"[{'.'.join(map(str, at))}] " if at else ""
    return found + [f"{file.where(at)}: {where}needs the key {key!r}." for key in required if key not in table]


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _key_lines(text: str) -> dict[Key, int]:
    """Line of each table header and key. Values that run over several lines are skipped by bracket depth."""
    lines: dict[Key, int] = {}
    table: Key = ()
    counts: dict[Key, int] = {}
    depth, quote = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if quote:
            quote = "" if line.count(quote) % 2 else quote
            continue
        if depth == 0:
            header = _HEADER.match(line)
            if header and "=" not in _STRING.sub("", line):
                table = _enter(_parts(header.group(2)), header.group(1) == "[[", counts)
                lines.setdefault(table, number)
                continue
            assign = _ASSIGN.match(line)
            if assign:
                key = (*table, *_parts(assign.group(1)))
                for length in range(len(table) + 1, len(key) + 1):
                    lines.setdefault(key[:length], number)
                line = line[assign.end() :]
        for mark in ('"""', "'''"):
            quote = mark if line.count(mark) % 2 else quote
        bare = _STRING.sub("", line).split("#")[0]
        depth = max(0, depth + sum(bare.count(c) for c in "[{") - sum(bare.count(c) for c in "]}"))
    return lines


def _enter(parts: tuple[str, ...], is_array: bool, counts: dict[Key, int]) -> Key:
    """The path of a header, with the position inside each array of tables it passes through."""
    path: Key = ()
    for part in parts[:-1]:
        path = (*path, part)
        if path in counts:
            path = (*path, counts[path])
    path = (*path, parts[-1])
    if not is_array:
        return (*path, counts[path]) if path in counts else path
    counts[path] = counts.get(path, -1) + 1
    return (*path, counts[path])


def dump_toml(value: Any) -> str:
    """TOML text of a Struct or dict; ``None`` is left out, which reads back as the default."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(value)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list | tuple) else value
