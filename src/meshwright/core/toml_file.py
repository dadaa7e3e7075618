"""Reads TOML files that a person writes, reporting every error at once with its line, and writes TOML."""

import re
import tomllib
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tomli_w

from meshwright.core.errors import FileWarning, InputError, as_sentence
from meshwright.core.fields import KeyPath, dotted, field_faults, figure_faults
from meshwright.core.files import read_text

_SEAL = "# Written by meshwright; CRC-32 of what follows: "

T = TypeVar("T")


class TomlFile(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A parsed file with the line number of each key."""

    path: str
    data: dict[str, Any]
    text: str

    @property
    def is_changed(self) -> bool:
        """True if meshwright wrote the file with a checksum that does not match any more: it was edited or damaged."""
        seal_line, _, sealed_text = self.text.partition("\n")
        return _SEAL in self.text and seal_line != _seal(sealed_text)

    @cached_property
    def lines(self) -> dict[KeyPath, int]:
        """Line number of each table header and key."""
        return _key_lines(self.text)

    def error(self, key: KeyPath, message: str) -> InputError:
        """Returns an InputError that starts with ``path:line:`` of the key, or of its table."""
        return InputError(f"{self.where(key)}: {message}")

    @contextmanager
    def at(self, key: KeyPath) -> Iterator[None]:
        """Turns a ValidationError or InputError raised inside the block into an InputError with the key's path:line."""
        try:
            yield
        except (msgspec.ValidationError, InputError) as error:
            raise self.error(key, f"{str(error).rstrip('.')}{'' if str(error).endswith('?') else '.'}") from None

    def where(self, key: KeyPath) -> str:
        """Returns ``path:line`` of the key or of the nearest table above it."""
        for prefix_len in range(len(key), 0, -1):
            if key[:prefix_len] in self.lines:
                return f"{self.path}:{self.lines[key[:prefix_len]]}"
        return self.path

    def refuse(self, faults: Iterable[tuple[KeyPath, str]]) -> None:
        """Raises one InputError for all (key, fault), each with ``path:line`` of its key; does nothing without any."""
        if messages := [f"{self.where(key)}: {fault}" for key, fault in faults]:
            raise InputError("; ".join(messages))


def read_toml(path: Path) -> TomlFile:
    """Reads and parses a TOML file. Raises a one-line InputError if it is missing or not valid."""
    return parse_toml(read_text(path, "Give a TOML file."), path=str(path))


def parse_toml(text: str, *, path: str = "<text>") -> TomlFile:
    """Parses TOML text; ``path`` is its name in messages. Raises InputError, with the line, if it is not valid."""
    try:
        parsed_data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place_match = re.search(r"\s*\(at line (\d+), column (\d+)\)$", str(error))
        line_number = place_match.group(1) if place_match else str(text.count("\n") + 1)
        reason = str(error)[: place_match.start()] if place_match else str(error).removesuffix(" (at end of document)")
        raise InputError(f"{path}:{line_number}: not valid TOML: {reason[:1].lower()}{reason[1:]}.") from None
    except RecursionError:
        raise InputError(f"{path} is nested too deeply. Give a table of a few levels.") from None
    except ValueError:
        raise InputError(f"{path} has an impossible date, or a number of thousands of digits. Correct it.") from None
    file = TomlFile(path=path, data=parsed_data, text=text)
    file.refuse((key, f"{dotted(key)} is {fault}") for key, fault in figure_faults(parsed_data))
    return file


def decode_toml(file: TomlFile, kind: type[T]) -> T:
    """Converts the file to a Struct.

    Every unknown key (with the nearest known one), wrong value and missing key, each with ``path:line``, are collected
    into ONE InputError.
    """
    file.refuse(field_faults(file.data, kind))
    try:
        return msgspec.convert(file.data, kind)
    except msgspec.ValidationError as error:
        # for example: Expected `float` - at `$.levels[2].hop_s`
        message, _, key_text = str(error).partition(" - at `")
        path_steps = re.findall(r"\.(\w+)|\[(\d+)\]", key_text)
        raise file.error(tuple(key or int(index) for key, index in path_steps), as_sentence(message)) from None


def load_toml(path: Path, kind: type[T]) -> T:
    """Reads a file and converts it to a Struct, see `decode_toml`; warns of a file that was changed."""
    file = read_toml(path)
    warn_of_changes(file)
    return decode_toml(file, kind)


def warn_of_changes(file: TomlFile) -> None:
    """Gives a FileWarning if a file was changed after meshwright wrote it."""
    if file.is_changed:
        warnings.warn(
            f"{file.path} is not as meshwright wrote it. If you edited it, remove its first line.",
            FileWarning,
            stacklevel=3,
        )


def _key_lines(text: str) -> dict[KeyPath, int]:
    """Maps each table header and key to the line on which its statement begins."""
    line_by_key: dict[KeyPath, int] = {}
    table_path: KeyPath = ()
    key_paths: list[KeyPath]
    index_of_path: dict[KeyPath, int] = {}
    statement, start_line = "", 1
    for line_number, line in enumerate(text.split("\n"), start=1):
        statement += f"{line}\n"
        if line_number > start_line and not line.rstrip().endswith(("]", "}", '"""', "'''")):
            continue  # only such a line can end a value of several lines
        try:
            parsed_table = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:  # the value continues on the next line
            continue
        if statement.lstrip().startswith("["):
            table_path, key_paths = _enter(parsed_table, index_of_path), [()]
        else:
            key_paths = list(_paths(parsed_table))
        for key_path in key_paths:
            line_by_key.setdefault((*table_path, *key_path), start_line)
        statement, start_line = "", line_number + 1
    return line_by_key


def _paths(table: Mapping[str, object]) -> Iterator[KeyPath]:
    for key, item in table.items():
        yield (key,)
        yield from ((key, *sub_path) for sub_path in _paths(item)) if isinstance(item, Mapping) else ()


def _enter(header: Any, last_index_of_path: dict[KeyPath, int]) -> KeyPath:
    """Returns the path of a header, with the index into each array of tables on the path."""
    path: KeyPath = ()
    while header:
        [(key, header)] = header.items()
        path = (*path, key)
        if isinstance(header, list):
            last_index_of_path[path] = last_index_of_path.get(path, -1) + 1
            header = {}
        if path in last_index_of_path:
            path = (*path, last_index_of_path[path])
    return path


def dump_toml(value: object) -> str:
    """Writes a Struct or dict as TOML text. Leaves out ``None``, which reads back as the default."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(value)))


def sealed_toml(value: object) -> str:
    """Returns TOML text as `dump_toml` does, below a comment with its checksum."""
    text = dump_toml(value)
    return f"{_seal(text)}\n{text}"


def _seal(text: str) -> str:
    return f"{_SEAL}{zlib.crc32(text.encode()):08x}"


def _without_none(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value
