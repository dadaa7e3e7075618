"""Digests of files in a folder, in the format that ``sha256sum -c SHA256SUMS`` reads, and checksums of lines."""

import hashlib
import re
import time
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from meshwright.core.errors import CannotRunError
from meshwright.core.files import DAMAGED_JSON, write_text_whole

SUMS = "SHA256SUMS"
_THREADS = 4
_spent_s, _since_s = 0.0, 0.0
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def write_sums(folder: Path, files: Iterable[Path]) -> None:
    """Writes the digests of ``files``, which are in ``folder`` or below it, to its ``SHA256SUMS``. Keeps the lines of
    other files, except files that no longer exist."""
    global _spent_s, _since_s
    _since_s = time.perf_counter()
    new_names = sorted(str(file.relative_to(folder)) for file in files)
    with ThreadPoolExecutor(_THREADS) as threads:
        new_digests = dict(zip(new_names, threads.map(_digest, (folder / name for name in new_names)), strict=True))
    old_digests = read_sums(folder) if (folder / SUMS).is_file() else {}
    kept_digests = {name: digest for name, digest in (old_digests | new_digests).items() if (folder / name).is_file()}
    write_text_whole(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(kept_digests.items())))
    _spent_s, _since_s = digest_seconds(), 0.0


def digest_seconds() -> float:
    """Returns the seconds that this process has spent in `write_sums` until now, a call under way included."""
    return _spent_s + (time.perf_counter() - _since_s if _since_s else 0.0)


def read_sums(folder: Path) -> dict[str, str]:
    """Returns file -> digest of a folder's ``SHA256SUMS``. Raises CannotRunError if that file is damaged."""
    path, digest_of = folder / SUMS, {}
    for line in path.read_bytes().decode(errors="replace").removesuffix("\n").split("\n"):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in digest_of or Path(match[2]).is_absolute() or ".." in Path(match[2]).parts:
            raise CannotRunError(f"{path} is damaged: {line[:80]!r} is not a digest and a file's name.")
        digest_of[match[2]] = match[1]
    return digest_of


def require_intact(folder: Path, names: Sequence[str] | None = None, *, share: tuple[int, int] = (0, 1)) -> bool:
    """Returns True if files have their digests in ``SHA256SUMS``; raises CannotRunError for the first that does not.

    Returns False, and checks nothing, in a folder without ``SHA256SUMS`` (of other software or an earlier version).
    ``names`` are the files to check, by default all; ``share`` = (i, n) checks every n-th of them from the i-th on, for
    n processes.
    """
    if not (folder / SUMS).is_file():
        return False
    digest_by_name = read_sums(folder)
    file_names = sorted(digest_by_name if names is None else digest_by_name.keys() & set(names))[share[0] :: share[1]]
    with ThreadPoolExecutor(_THREADS) as threads:
        for name, digest in zip(file_names, threads.map(_digest, (folder / name for name in file_names)), strict=True):
            if digest != digest_by_name[name]:
                fault = "is not as it was written" if digest else "is missing or cannot be read"
                raise CannotRunError(f"{folder / name} {fault} (see {SUMS} beside it).")
    return True


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file; "" for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):  # a name with a zero byte
        return ""


def summed_line(record: object) -> bytes:
    """Returns a Struct or a dict as a line of JSON; its last key ``crc32`` is the CRC-32 of the line without it."""
    json_bytes = msgspec.json.encode(record)
    return json_bytes[:-1] + b',"crc32":"%08x"}\n' % zlib.crc32(json_bytes)


def read_line(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line of `summed_line`, None if the line is damaged; accepts lines without checksum."""
    record_bytes, crc_key, crc_bytes = line.rpartition(b',"crc32":"')
    if crc_key:
        line = record_bytes + b"}"
        if crc_bytes != b'%08x"}' % zlib.crc32(line):
            return None
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except DAMAGED_JSON:
        return None
