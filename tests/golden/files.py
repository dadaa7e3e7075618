"""Golden files on disk: one file a kind, cases sorted by name, the largest compressed."""

import gzip
import json
from pathlib import Path
from typing import Any

from tests.golden.environment import FOLDER

Golden = dict[str, Any]
"""Case -> what was found: numbers, texts, None, and lists and dicts of them."""

LARGEST_PLAIN = 700_000
"""Bytes of the largest file that is not compressed."""


def read(kind: str, folder: Path = FOLDER / "golden") -> Golden:
    """The golden file of a kind."""
    packed = folder / f"{kind}.json.gz"
    if packed.exists():
        return dict(json.loads(gzip.decompress(packed.read_bytes())))
    return dict(json.loads((folder / f"{kind}.json").read_text(encoding="utf-8")))


def write(kind: str, found: Golden, folder: Path = FOLDER / "golden") -> Path:
    """Write the golden file of a kind; the same data give the same bytes."""
    text = (json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    plain, packed = folder / f"{kind}.json", folder / f"{kind}.json.gz"
    folder.mkdir(parents=True, exist_ok=True)
    for old in (plain, packed):
        old.unlink(missing_ok=True)
    if len(text) > LARGEST_PLAIN:
        packed.write_bytes(gzip.compress(text, 9, mtime=0))
        return packed
    plain.write_bytes(text)
    return plain


def as_read(found: Golden) -> Golden:
    """What comes back of data that are written and read: tuples as lists, keys as texts."""
    return dict(json.loads(json.dumps(found)))
