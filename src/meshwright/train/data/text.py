"""The documents a run learns from: Python's own documentation, a file, or a folder of files."""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from meshwright.core.errors import InputError
from meshwright.train.data.files import RECORD_SUFFIXES, TEXT_SUFFIXES, Piece, in_pieces, read_pieces
from meshwright.train.settings import PYDOC

SUFFIXES = (*TEXT_SUFFIXES, *RECORD_SUFFIXES)
"""Files that are read from a folder; a file given by name may have any suffix."""
FIELD = "text"
"""Field of a JSON record or column of a Parquet file, where ``data`` names no other."""
HASHED_BYTES = 2**26
_WHAT = f"Give a text, .jsonl or .parquet file, a folder of them, or {PYDOC!r}."


class Corpus(Protocol):
    """Documents in a fixed order, read as a stream."""

    @property
    def total_bytes(self) -> int:
        """Size of all files, as they are on disk."""

    def identity(self) -> str:
        """A digest that is another where the documents are others."""

    def pieces(self) -> Iterator[Piece]:
        """All documents; ``bytes_read`` counts from the first file on."""

    def sample(self, max_chars: int) -> Iterator[str]:
        """About ``max_chars`` characters from the starts of all files, each in proportion to its size."""


class FileCorpus(NamedTuple):
    """Files, with the name of the field that holds the text of a record."""

    data: str
    folder: Path
    files: tuple[Path, ...]
    field: str

    @property
    def total_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def identity(self) -> str:
        """Of the names and contents of the files; above `HASHED_BYTES` in all, of names, sizes and times of change.

        So a large file that is rewritten with the same size and time is taken for the same.
        """
        digest = hashlib.sha256(self.field.encode())
        whole = self.total_bytes <= HASHED_BYTES
        for file in self.files:
            found = file.stat()
            digest.update(f" {file.relative_to(self.folder)} {found.st_size} ".encode())
            digest.update(_content(file) if whole else str(found.st_mtime_ns).encode())
        return digest.hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """Raises InputError when no document holds any text."""
        before, found = 0, False
        for file in self.files:
            for piece in read_pieces(file, self.field):
                found = True
                yield piece._replace(bytes_read=before + piece.bytes_read)
            before += file.stat().st_size
        if not found:
            raise InputError(f"data {self.data!r} holds no text. {_WHAT}")

    def sample(self, max_chars: int) -> Iterator[str]:
        share = max_chars / max(self.total_bytes, 1)
        for file in self.files:
            left = max_chars if share >= 1 else share * file.stat().st_size
            for piece in read_pieces(file, self.field):
                yield piece.text[: math.ceil(left)]
                left -= len(piece.text)
                if left <= 0:
                    break


class PydocCorpus(NamedTuple):
    """The reference texts of Python's ``help()``, one document per topic: 465 kB in CPython 3.11."""

    texts: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return sum(map(len, self.texts))

    def identity(self) -> str:
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()

    def pieces(self) -> Iterator[Piece]:
        before = 0
        for text in self.texts:
            before += len(text)
            for part, last in in_pieces([text]):
                yield Piece(part, last, before)

    def sample(self, max_chars: int) -> Iterator[str]:
        yield from self.texts


def open_corpus(data: str) -> Corpus:
    """The documents that ``TrainSettings.data`` names: "pydoc", a file, or a folder that is searched for files.

    ``path#name`` names the field of JSON records or the column of Parquet files that holds the text ("text" where
    left out). Raises InputError for a path that is missing or a folder without such files.
    """
    if data == PYDOC:
        return _pydoc()
    path, field = Path(data).expanduser(), FIELD
    if not path.exists() and "#" in data:
        name, _, field = data.rpartition("#")
        path = Path(name).expanduser()
    if not path.exists():
        raise InputError(f"data {data!r} is not there. {_WHAT}")
    return FileCorpus(data, path if path.is_dir() else path.parent, tuple(_files(path)), field)


def read_documents(data: str) -> tuple[str, ...]:
    """All texts that ``data`` names, whole and in memory: for small ones."""
    documents = [""]
    for piece in open_corpus(data).pieces():
        documents[-1] += piece.text
        if piece.ends_document:
            documents.append("")
    return tuple(documents[:-1])


def _pydoc() -> PydocCorpus:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError(f"this Python comes without pydoc_data. {_WHAT}") from None
    return PydocCorpus(tuple(topics[name] for name in sorted(topics)))


def _content(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").digest()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from None


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [f for f in path.rglob("*") if f.name.lower().endswith(SUFFIXES) and f.is_file()]
    visible = [f for f in files if not any(part.startswith(".") for part in f.relative_to(path).parts)]
    if not visible:
        raise InputError(f"folder {str(path)!r} has no {', '.join(SUFFIXES)} files. Name one that has.")
    return sorted(visible)
