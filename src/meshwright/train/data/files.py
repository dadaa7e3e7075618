"""Documents of one file, as pieces of bounded size: plain text, JSON lines and Parquet."""

import codecs
import gzip
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from meshwright.core.errors import CannotRunError, InputError, nearest

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""Files of many documents. Any other file given by name is read as one text."""
PIECE_CHARS = 2**18
"""A longer document is tokenised in pieces of about this size, so that no file is ever whole in memory."""
PARQUET_ROWS, PARQUET_BYTES = 64, 2**20
"""Rows and bytes read at once: a column of a row group may be larger than memory."""


class Piece(NamedTuple):
    """Some text of a document, whether the document ends with it, and how much of the file has been read."""

    text: str
    ends_document: bool
    bytes_read: int


def read_pieces(file: Path, field: str) -> Iterator[Piece]:
    """The documents of a file in order, without those that hold only white space.

    A text file is one document. Of JSON lines and Parquet each record is one, in ``field``. Raises InputError
    for what is not UTF-8, not JSON, or without the field.
    """
    name = file.name.lower()
    try:
        if name.endswith(".parquet"):
            yield from _parquet(file, field)
        elif name.endswith(RECORD_SUFFIXES):
            yield from _json_lines(file, field)
        else:
            yield from _text(file)
    except (OSError, EOFError) as error:
        raise InputError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def in_pieces(chunks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """One document's text cut after ends of lines into pieces of at most about 2 x `PIECE_CHARS`.

    True goes with the last. Nothing comes of a short text that is blank.
    """
    held, first = "", True
    for chunk in chunks:
        held += chunk
        start = 0
        while len(held) - start > 2 * PIECE_CHARS:
            end = held.rfind("\n", start, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
            yield held[start:end], False
            start, first = end, False
        held = held[start:]
    if not first or held.strip():
        yield held, True


def _text(file: Path) -> Iterator[Piece]:
    with file.open("rb") as raw:
        for text, last in in_pieces(_decoded(raw, file)):
            yield Piece(text, last, raw.tell())


def _decoded(raw: BinaryIO, file: Path) -> Iterator[str]:
    """Text of a file with every end of line as one "\\n"."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    lines = io.IncrementalNewlineDecoder(utf8, translate=True)
    while True:
        start = raw.tell() - len(utf8.getstate()[0])
        block = raw.read(PIECE_CHARS)
        try:
            yield lines.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise InputError(
                f"{file} is not UTF-8 text (byte {start + error.start}). Convert it, or leave it out of the folder."
            ) from None
        if not block:
            return


def _json_lines(file: Path, field: str) -> Iterator[Piece]:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    with ExitStack() as stack:
        raw = stack.enter_context(file.open("rb"))
        for number, line in enumerate(stack.enter_context(_unpacked(file)(raw)), start=1):
            if not line.strip():
                continue
            try:
                record = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InputError(f"{file} line {number} is not a JSON object: {error}.") from None
            text = _field(record, field, f"{file} line {number}")
            for piece, last in in_pieces([text]):
                yield Piece(piece, last, raw.tell())


def _field(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise InputError(f"{where} has no field {field!r}.{nearest(field, record)} Name it: data=FILE#FIELD.")
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise InputError(f"{where}: field {field!r} is {type(text).__name__}, not text. Name another: data=FILE#FIELD.")
    return text or ""


def _unpacked(file: Path) -> Callable[[BinaryIO], Any]:
    """What opens the raw file for reading lines."""
    name = file.name.lower()
    if name.endswith(".gz"):
        return lambda raw: gzip.GzipFile(fileobj=raw)
    if name.endswith(".zst"):
        try:
            from compression import zstd  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise CannotRunError(f"{file} needs Python 3.14 or newer for .zst. Unpack it, or pack it as .gz.") from None
        return lambda raw: zstd.ZstdFile(raw)
    return lambda raw: io.BufferedReader(raw)  # type: ignore[arg-type, unused-ignore]


def _parquet(file: Path, field: str) -> Iterator[Piece]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CannotRunError(f"{file} needs pyarrow. Install it: pip install 'meshwright[parquet]'.") from None
    try:
        with pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=PARQUET_BYTES) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise InputError(f"{file} has no column {field!r}.{nearest(field, names)} Name it: data=FILE#COLUMN.")
            size, done = file.stat().st_size, 0
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[field]):
                done += len(batch)
                for value in batch.column(0).to_pylist():
                    for piece, last in in_pieces([_field({field: value}, field, str(file))]):
                        yield Piece(piece, last, size * done // table.metadata.num_rows)
    except pyarrow.ArrowException as error:
        raise InputError(f"{file} is not a Parquet file: {' '.join(str(error).split())}.") from None
