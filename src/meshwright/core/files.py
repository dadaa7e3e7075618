"""Writes files atomically, and finds the cache folder."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from meshwright.core.errors import InputError

NOT_WRITABLE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Error numbers of a folder that is missing or not writable."""


def cache_folder() -> Path:
    """Returns ``MESHWRIGHT_CACHE`` if it is set, else ``~/.cache/meshwright``. It may not exist yet."""
    given = os.environ.get("MESHWRIGHT_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "meshwright"


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file through a temporary one beside it, so that ``path`` is never half written.

    Raises InputError for a folder that cannot be written in.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        raise InputError(f"{path} cannot be written ({error.strerror}). Name another file.") from None
    os.close(handle)
    try:
        write(Path(name))
        # mkstemp makes files that only their owner may read, and some writers make them so again.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def write_text_whole(path: Path, text: str) -> None:
    """Writes text to a file, see `write_whole`."""
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_json_whole(path: Path, value: Any) -> None:
    """Writes plain data or a Struct as indented JSON, see `write_whole`."""
    write_text_whole(path, msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")
