"""Reads files that a user names, writes files atomically, and finds the cache folder."""

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.core.errors import OF_PATHS, InputError, as_sentence

DAMAGED_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding the bytes of a damaged JSON file may raise."""

BOM = "\ufeff"
"""The byte order mark, which some editors put before the text of a file."""
MOST_BYTES = 2**26
"""Largest file of settings or figures that is read; compiled programs may be larger."""


def cache_folder() -> Path:
    """Returns ``MESHWRIGHT_CACHE`` if it is set, else ``~/.cache/meshwright``, and makes it.

    If that folder cannot be written (no home, for example), returns a folder of this user in the system's temporary
    folder, and says so on standard error.
    """
    return _writable(os.environ.get("MESHWRIGHT_CACHE") or "~/.cache/meshwright")


@cache
def _writable(folder_text: str) -> Path:
    try:
        folder = Path(folder_text).expanduser()
        _require_writable(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home, and no entry of this user
        folder = Path(tempfile.gettempdir()) / f"meshwright-{os.getuid()}"
        _require_writable(folder)
        reason = getattr(error, "strerror", None) or "this user has no home"
        cache_words = f"the cache is {folder}; set MESHWRIGHT_CACHE"
        print(f"{folder_text} cannot be written ({reason}): {cache_words}", file=sys.stderr)
    return folder


def _require_writable(folder: Path) -> None:
    """Makes a folder of this user and writes in it. Raises OSError where that is not possible."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryFile(dir=folder):
        pass


def read_bytes(path: Path, advice: str, *, most: int = MOST_BYTES) -> bytes:
    """Returns the contents of a file. Raises InputError, ending with the advice, if it is unreadable or too large."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:
        # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read ({reason}). {advice}") from None
    if len(content) > most:
        raise InputError(f"{path} is larger than the {most >> 20:,} MiB that are read. {advice}")
    return content


def read_text(path: Path, advice: str, *, most: int = MOST_BYTES) -> str:
    """Returns the text of a file without a byte order mark, see `read_bytes`."""
    return _text(path, read_bytes(path, advice, most=most), advice)


def _text(path: Path, content: bytes, advice: str) -> str:
    try:
        return content.decode().replace("\r\n", "\n").removeprefix(BOM)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8 (byte {error.start}). {advice}") from None


def read_json(path: Path, advice: str, remedy: str = "Mend the file, or fetch it again.") -> dict[str, Any]:
    """Returns the JSON object in a file, which may begin with a byte order mark.

    Raises InputError, ending with ``advice``, if the file cannot be read; ending with ``remedy``, with line and column
    for wrong syntax, if its text is not a JSON object or has a key twice in one object.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        object_table = dict(pairs)
        if len(object_table) < len(pairs):
            repeated_key = Counter(repeated_key for repeated_key, _ in pairs).most_common(1)[0][0]
            raise InputError(f"{path} has the key {repeated_key!r} twice in one object. {remedy}")
        return object_table

    try:
        json_text = _text(path, read_bytes(path, advice), remedy)
        json_value = json.loads(json_text, object_pairs_hook=once)
        json.dumps(json_value, ensure_ascii=False).encode()  # half of a surrogate pair is not text
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}:{error.colno}: broken JSON ({error.msg}). {remedy}") from None
    except RecursionError:
        raise InputError(f"{path} is nested too deeply. {remedy}") from None
    except InputError:
        raise
    except ValueError:
        raise InputError(f"{path} has a number of thousands of digits, or half of a surrogate pair. {remedy}") from None
    if not isinstance(json_value, dict):
        raise InputError(f"{path} holds no JSON object. {remedy}")
    return json_value


def json_rows(path: Path, text: str, remedy: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the object of every line of a file's text that is not blank. Raises InputError, with
    ``path:line`` and the remedy, for a line that is not a JSON object."""
    for line_number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = msgspec.json.decode(line, type=dict[str, Any])
            except DAMAGED_JSON as error:
                raise InputError(f"{path}:{line_number}: {as_sentence(str(error))} {remedy}") from None
            yield line_number, row


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file through a temporary one beside it, so that ``path`` is never half written, also if power is lost.

    Replaces the target of a link. Writes directly into a path that is not a file, such as /dev/null or a pipe. Raises
    InputError if the folder cannot be written in.
    """
    try:
        is_stream = path.exists() and not path.is_file() and not path.is_dir()
        target_path = Path(os.path.realpath(path))
        if not is_stream:
            target_path.parent.mkdir(parents=True, exist_ok=True)
        temp_fd, temp_name = tempfile.mkstemp(
            dir=None if is_stream else target_path.parent, prefix=f".{target_path.name[:200]}.", suffix=path.suffix[:20]
        )
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in OF_PATHS:
            raise
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be written ({reason}). Name another file.") from None
    os.close(temp_fd)
    try:
        write(Path(temp_name))
        if is_stream:
            with open(temp_name, "rb") as temp_file, path.open("wb") as out_stream:
                shutil.copyfileobj(temp_file, out_stream)
            return
        # mkstemp makes files that only their owner may read, and some writers make them so again.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temp_name, 0o666 & ~umask)
        sync(Path(temp_name))
        os.replace(temp_name, target_path)
        with suppress(OSError):  # some network file systems cannot sync a folder
            sync(target_path.parent)
    finally:
        Path(temp_name).unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text_whole(path: Path, text: str) -> None:
    """Writes text to a file, see `write_whole`."""
    write_whole(path, lambda temp_path: temp_path.write_text(text, encoding="utf-8"))


def write_json_whole(path: Path, value: object) -> None:
    """Writes plain data or a Struct as indented JSON, see `write_whole`."""
    write_text_whole(path, msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")
