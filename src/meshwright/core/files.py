"""Writes files atomically, and finds the cache folder."""

import errno
import os
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.core.errors import InputError

NOT_WRITABLE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Error numbers of a folder that is missing or not writable."""


def cache_folder() -> Path:
    """Returns ``MESHWRIGHT_CACHE`` if it is set, else ``~/.cache/meshwright``, and makes it.

    Where that cannot be written, as without a home, it is a folder of this user in the system's temporary one, and a
    line on standard error says so.
    """
    return _writable(os.environ.get("MESHWRIGHT_CACHE") or "~/.cache/meshwright")


@cache
def _writable(wanted: str) -> Path:
    try:
        folder = Path(wanted).expanduser()
        _require_writable(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home, and no entry of this user
        folder = Path(tempfile.gettempdir()) / f"meshwright-{os.getuid()}"
        _require_writable(folder)
        why = getattr(error, "strerror", None) or "this user has no home"
        instead = f"what is kept goes to {folder}; set MESHWRIGHT_CACHE"
        print(f"{wanted} cannot be written ({why}): {instead}", file=sys.stderr)
    return folder


def _require_writable(folder: Path) -> None:
    """Makes a folder of this user and writes in it. Raises OSError where that is not possible."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryFile(dir=folder):
        pass


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
