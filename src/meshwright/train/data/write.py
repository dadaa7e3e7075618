"""Tokenising a stream of documents into the files of a store, with progress, from where it was stopped."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.core.files import write_whole
from meshwright.core.units import format_count
from meshwright.train.data.files import Piece
from meshwright.train.data.text import Corpus
from meshwright.train.data.token_store import START_BYTES, STARTS, TOKENS
from meshwright.train.data.tokenizer import TextTokenizer

JOURNAL = "journal.json"
BATCH_CHARS = 2**22
"""Text given to the tokenizer's threads at once; what an interruption loses at most."""


class Written(msgspec.Struct, kw_only=True):
    """What is in the files: tokens and documents, and the pieces of text that they come from."""

    tokens: int = 0
    documents: int = 0
    pieces: int = 0
    in_document: bool = False

    def files(self, folder: Path, dtype: str) -> tuple[tuple[Path, int], tuple[Path, int]]:
        """The two files, and how many bytes these tokens and starts take."""
        tokens = self.tokens * np.dtype(dtype).itemsize
        return (folder / TOKENS, tokens), (folder / STARTS, self.documents * START_BYTES)


def tokenise(corpus: Corpus, encoder: TextTokenizer, *, dtype: str, folder: Path) -> Written:
    """Write all documents, each with an end-of-text token, and say what was written.

    Goes on from where an earlier call for the same folder was stopped, however it was.
    """
    with ExitStack() as stack:
        writer = _Writer(folder, encoder.end_id, dtype, stack)
        show = stack.enter_context(_progress(corpus.total_bytes))
        for pieces in _batches(islice(corpus.pieces(), writer.written.pieces, None)):
            texts = [piece.text for piece in pieces]
            encodings = encoder.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for piece, encoding in zip(pieces, encodings, strict=True):
                writer.add(encoding.ids, ends_document=piece.ends_document)
            writer.commit()
            show(pieces[-1].bytes_read, writer.written.tokens)
        writer.finish()
    (folder / JOURNAL).unlink(missing_ok=True)
    return writer.written


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _journal(folder: Path, dtype: str) -> Written:
    """What an earlier try has done; nothing where its files do not reach that far, as after a loss of power."""
    try:
        found = msgspec.json.decode((folder / JOURNAL).read_bytes(), type=Written)
    except (OSError, msgspec.DecodeError):
        return Written()
    reached = all(path.is_file() and path.stat().st_size >= size for path, size in found.files(folder, dtype))
    return found if reached else Written()


class _Writer:
    """Appends documents to the files of a store."""

    def __init__(self, folder: Path, end_id: int, dtype: str, stack: ExitStack) -> None:
        self.folder, self.end_id, self.dtype = folder, end_id, dtype
        self.written = _journal(folder, dtype)
        self.tokens, self.starts = (stack.enter_context(_opened(*file)) for file in self.written.files(folder, dtype))

    def add(self, ids: list[int], *, ends_document: bool) -> None:
        """One piece; the first after a document's end begins the next."""
        written = self.written
        if not written.in_document:
            self.starts.write(np.uint64(written.tokens).tobytes())
            written.documents += 1
        values = np.array([*ids, self.end_id] if ends_document else ids, self.dtype)
        self.tokens.write(values.tobytes())
        written.tokens += len(values)
        written.pieces += 1
        written.in_document = not ends_document

    def commit(self) -> None:
        """Have the files reach as far as the journal says, then write the journal."""
        self.tokens.flush()
        self.starts.flush()
        encoded = msgspec.json.encode(self.written)
        write_whole(self.folder / JOURNAL, lambda part: part.write_bytes(encoded))

    def finish(self) -> None:
        """Close the index with the number of tokens."""
        self.starts.write(np.uint64(self.written.tokens).tobytes())
        for file in (self.tokens, self.starts):
            file.flush()
            # The folder gets its name by a rename, which must not reach the disk before what it names.
            os.fsync(file.fileno())


def _opened(path: Path, size: int) -> BinaryIO:
    """A file to append to after its first ``size`` bytes: a killed process may have written more."""
    file = path.open("r+b" if path.is_file() else "w+b")
    file.truncate(size)
    file.seek(size)
    return file


class _Show(Protocol):
    def __call__(self, bytes_read: int, tokens: int) -> None: ...


@contextmanager
def _progress(total_bytes: int) -> Iterator[_Show]:
    """A bar on stderr where that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda bytes_read, tokens: None
        return
    columns = (TextColumn("tokenising"), BarColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=max(total_bytes, 1), tokens="0")

        def show(bytes_read: int, tokens: int) -> None:
            bar.update(task, completed=bytes_read, tokens=format_count(tokens))

        yield show
