"""The documents of a run in pieces of bounded size: Python's own documentation, a file, or a folder of files.

Files are plain text, JSON lines or Parquet.
"""

import codecs
import gzip
import hashlib
import io
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.core.extras import require
from meshwright.core.files import BOM, DAMAGED_JSON
from meshwright.train.settings import PYDOC

TEXT_SUFFIXES = (".md", ".py", ".rst", ".txt")
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""Suffixes of files of many documents. Any other file given by name is one document."""
SUFFIXES = (*TEXT_SUFFIXES, *RECORD_SUFFIXES)
"""Suffixes of files that are read from a folder; a file given by name may have any suffix."""
PIECE_CHARS = 2**18
"""Characters of a piece of a longer document: long text files are never whole in memory."""
PARQUET_ROWS, PARQUET_BYTES = 64, 2**20
"""Rows and bytes read at once: a column of a row group may be larger than memory."""
FIELD = "text"
"""Field of a JSON record, or column of a Parquet file, with its text, if ``data`` names no other."""
CHAT_FIELDS = ("messages", "prompt", "completion", "tools", "chat_template_kwargs")
"""Fields of a chat, or of a prompt with its completion: a record without `FIELD`, if ``data`` names no field."""
PAIR_FIELDS = {"source", "target"}
"""Fields of an encoder's source and its decoder's target, texts or tokens, in a record without fields above."""
TOKEN_FIELDS = ("tokens", "prefix", "parents", "spans", "is_global")
"""Fields of a record of tokens (`records.TokenRecord`), which has no field of a text or a chat."""
RECORD_BYTES = 2**26
"""Maximum size of an unpacked JSON record, which is in memory as a whole, several times."""
HASHED_BYTES = 2**26
SKIP = "--skip-bad-records skips bad records and bytes"
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_WHAT = f"Give a text, .jsonl or .parquet file, a folder of them, or {PYDOC!r}."


class TextPiece(NamedTuple):
    """A piece of a document, whether it is the last, the bytes of the file read so far, and for a chat ``where`` it is.

    The text of a chat is its whole record as JSON, in one piece.
    """

    text: str
    ends_document: bool
    bytes_read: int
    where: str = ""


class FileCorpus(NamedTuple):
    """Files in a fixed order, read as a stream; ``field`` of a record has its text, "" for chats and for tokens.

    Records that cannot be read are skipped, and their places added to ``bad``; if ``bad`` is None, the first raises.
    """

    data: str
    folder: Path
    files: tuple[Path, ...]
    field: str
    bad: set[str] | None = None
    is_tokens: bool = False

    @property
    def is_chat(self) -> bool:
        """True if each record is a chat, or a prompt with its completion."""
        return not self.field and not self.is_tokens

    @property
    def total_bytes(self) -> int:
        """Size of all files on disk."""
        return sum(file.stat().st_size for file in self.files)

    def identity(self) -> str:
        """Returns a digest of names and contents; above `HASHED_BYTES` in total, of names, sizes and times of change.

        A large file that is rewritten with equal size and time is not noticed. Raises InputError for unreadable files.
        """
        digest = hashlib.sha256(self.field.encode() + (b"" if self.bad is None else b" without bad records"))
        is_hashed = self.total_bytes <= HASHED_BYTES
        for file in self.files:
            status = file.stat()
            digest.update(f" {file.relative_to(self.folder)} {status.st_size} ".encode())
            try:
                version = hashlib.sha256(file.read_bytes()).digest() if is_hashed else str(status.st_mtime_ns).encode()
            except OSError as error:
                raise InputError(f"{file} cannot be read: {error.strerror}. Mend or remove it.") from None
            digest.update(version)
        return digest.hexdigest()

    def pieces(self) -> Iterator[TextPiece]:
        """Yields all documents; ``bytes_read`` counts over all files. Raises InputError when none has text."""
        bytes_before, has_text = 0, False
        for file in self.files:
            for piece in read_pieces(file, self.field, self.bad):
                has_text = True
                yield piece._replace(bytes_read=bytes_before + piece.bytes_read)
            bytes_before += file.stat().st_size
        if not has_text:
            raise InputError(f"data {self.data!r} holds no text. {_WHAT}")

    def records(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yields the fields of each record, and its file and line as text."""
        for file in self.files:
            yield from ((record, where) for record, where, _ in _records(file, "", self.bad))

    def sample(self, max_chars: int) -> Iterator[str]:
        """Yields about ``max_chars`` characters from the starts of all files, in proportion to their sizes."""
        sampled_share = max_chars / max(self.total_bytes, 1)
        for file in self.files:
            chars_left = max_chars if sampled_share >= 1 else sampled_share * file.stat().st_size
            for piece in read_pieces(file, self.field, self.bad):
                yield piece.text[: math.ceil(chars_left)]
                chars_left -= len(piece.text)
                if chars_left <= 0:
                    break


class PydocCorpus(NamedTuple):
    """The reference texts of Python's ``help()``, one document per topic: 465 kB in CPython 3.11."""

    texts: tuple[str, ...]
    bad: None = None
    is_chat: bool = False

    @property
    def total_bytes(self) -> int:
        return sum(map(len, self.texts))

    def identity(self) -> str:
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()

    def pieces(self) -> Iterator[TextPiece]:
        chars_read = 0
        for topic_text in self.texts:
            chars_read += len(topic_text)
            for piece, is_last in in_pieces([topic_text]):
                yield TextPiece(piece, is_last, chars_read)

    def sample(self, max_chars: int) -> Iterator[str]:
        yield from self.texts


Corpus = FileCorpus | PydocCorpus


def open_corpus(data: str, *, skip_bad: bool = False) -> Corpus:
    """Opens the documents that ``TrainSettings.data`` names: "pydoc", a file, or a folder that is searched for files.

    ``path#name`` names the field of JSON records or the column of Parquet files that holds the text, by default "text".
    Without a name, files whose first record has no text but `CHAT_FIELDS` are chats; text files of their folder are not
    read. Raises InputError for a path that is missing or a folder without such files.
    """
    if data == PYDOC:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            raise InputError(f"this Python lacks pydoc_data. {_WHAT}") from None
        return PydocCorpus(tuple(topics[name] for name in sorted(topics)))
    path, field, first_fields = Path(data).expanduser(), "", set[str]()
    if not path.exists() and "#" in data:
        path_text, _, field = data.rpartition("#")
        path = Path(path_text).expanduser()
    if not path.exists():
        raise InputError(f"data {data!r} is not there. {_WHAT}")
    files = _files(path)
    if not field:
        record_files = [file for file in files if file.name.lower().endswith(RECORD_SUFFIXES)]
        first_fields = _first_fields(record_files, skip_bad)
        field = FIELD if FIELD in first_fields or not first_fields else ""
        files = files if field else record_files
    folder, bad_places = path if path.is_dir() else path.parent, set[str]() if skip_bad else None
    return FileCorpus(data, folder, tuple(files), field, bad_places, is_tokens=first_fields == {"tokens"})


def _first_fields(files: list[Path], skip_bad: bool) -> set[str]:
    """Returns which of `FIELD`, messages, prompt and tokens are in the first record; of a pair, tokens or source.
    With ``skip_bad`` records without any of these are passed over."""
    with suppress(InputError, CannotRunError, OSError, EOFError):  # raised again when the file is read
        for file in files:
            for record, _, _ in _records(file, "", set() if skip_bad else None):
                known_fields = {FIELD, "messages", "prompt", "tokens"} & record.keys()
                if not known_fields and record.keys() >= PAIR_FIELDS:
                    known_fields = {"tokens" if isinstance(record["source"], list) else "source"}
                if known_fields or not skip_bad:
                    return known_fields
    return set()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = [file for file in path.rglob("*") if file.name.lower().endswith(SUFFIXES) and file.is_file()]
    visible_files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not visible_files:
        raise InputError(f"folder {str(path)!r} has no {', '.join(SUFFIXES)} files. Name one that has.")
    return sorted(visible_files)


# -- documents of one file -------------------------------------------------------------------------------


def read_pieces(file: Path, field: str, bad: set[str] | None = None) -> Iterator[TextPiece]:
    """Yields the documents of a file in order, except blank ones.

    A text file is a document. In JSON lines and Parquet a record is: its ``field``, or if that is "" the whole
    record. Raises InputError for a record that is no JSON object, too long, or without text in the field, and for
    text that is not UTF-8. With a set ``bad``, leaves out the record, or the bytes, and adds its place to the set.
    """
    try:
        if not file.name.lower().endswith(RECORD_SUFFIXES):
            with file.open("rb") as raw_file:
                for text, is_last in in_pieces(_decoded(raw_file, file, bad)):
                    yield TextPiece(text, is_last, raw_file.tell())
            return
        for record, where, bytes_read in _records(file, field, bad):
            if field:
                yield from (TextPiece(text, is_last, bytes_read) for text, is_last in in_pieces([record[field] or ""]))
            else:
                yield TextPiece(msgspec.json.encode(record).decode(), True, bytes_read, where)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{file} cannot be read: {reason}. Mend or remove it.") from None


def _records(file: Path, field: str, bad: set[str] | None) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yields the fields of each record, its file and line as text, and the bytes of the file read so far.

    ``field``, if not "", is text or null. A record that cannot be read raises InputError, or is added to ``bad``.
    """
    is_table = file.name.lower().endswith(".parquet")
    for raw_record, where, bytes_read in _rows(file, field) if is_table else _lines(file):
        try:
            record = _record(raw_record, where, field)
        except InputError:
            if bad is None:
                raise
            bad.add(where)
        else:
            yield record, where, bytes_read


def _record(raw: Any, where: str, field: str) -> dict[str, Any]:
    """Returns the fields of a JSON line, or of an Arrow batch of one row; ``field``, if not "", is text or null."""
    if isinstance(raw, bytes) and len(raw) > RECORD_BYTES:
        raise InputError(f"{where} is a record of more than {RECORD_BYTES >> 20} MiB. Cut it; {SKIP}.")
    try:
        record: dict[str, Any] = _OBJECT.decode(raw) if isinstance(raw, bytes) else raw.to_pylist()[0]
    except DAMAGED_JSON as error:
        kind = "a JSON object" if isinstance(raw, bytes) else "text"
        raise InputError(f"{where} is not {kind}: {error}. Mend it; {SKIP}.") from None
    if field and field not in record:
        raise InputError(f"{where} has no field {field!r}.{nearest(field, record)} Name it: data=FILE#FIELD.")
    if field and not isinstance(text := record[field], str | None):
        raise InputError(f"{where}: field {field!r} is {type(text).__name__}, not text. Name another: data=FILE#FIELD.")
    return record


def in_pieces(chunks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Cuts a document after ends of lines into pieces of at most 2 x `PIECE_CHARS`; yields True with the last.

    A short blank text has no pieces.
    """
    text, is_first = "", True
    for chunk in chunks:
        text += chunk
        start_char = 0
        while len(text) - start_char > 2 * PIECE_CHARS:
            end_char = text.rfind("\n", start_char, start_char + PIECE_CHARS) + 1 or start_char + PIECE_CHARS
            yield text[start_char:end_char], False
            start_char, is_first = end_char, False
        text = text[start_char:]
    if not is_first or text.strip():
        yield text, True


def _decoded(raw_file: BinaryIO, file: Path, bad: set[str] | None) -> Iterator[str]:
    """Yields the text of a file with every end of line as "\\n"."""
    utf8_decoder = codecs.getincrementaldecoder("utf-8")()
    newline_decoder = io.IncrementalNewlineDecoder(utf8_decoder, translate=True)
    while True:
        start_byte = raw_file.tell() - len(utf8_decoder.getstate()[0])
        block = raw_file.read(PIECE_CHARS)
        try:
            text = newline_decoder.decode(block, final=not block)
            yield text if start_byte else text.removeprefix(BOM)
        except UnicodeDecodeError as error:
            if bad is None:
                raise InputError(
                    f"{file} is not UTF-8 text (byte {start_byte + error.start}). Convert it, or leave it out of the "
                    f"folder; {SKIP}."
                ) from None
            bad.add(str(file))
            utf8_decoder.errors = "ignore"
            yield newline_decoder.decode(block, final=not block)
        if not block:
            return


def _lines(file: Path) -> Iterator[tuple[bytes, str, int]]:
    """Yields each line of a file, its number as text, and the bytes read; of a line over `RECORD_BYTES` the start."""
    with file.open("rb") as raw_file, _unpacked(file, raw_file) as line_file:
        for line_number, line in enumerate(iter(partial(line_file.readline, RECORD_BYTES + 1), b""), start=1):
            line = line.removeprefix(BOM.encode()) if line_number == 1 else line
            if line.strip():
                yield line, f"{file} line {line_number}", raw_file.tell()
            while len(line) > RECORD_BYTES and not line.endswith(b"\n"):
                line = line_file.readline(RECORD_BYTES + 1) or b"\n"


def _unpacked(file: Path, raw_file: BinaryIO) -> Any:
    """Returns ``raw_file``, decompressed if the name of ``file`` ends in .gz or .zst."""
    name = file.name.lower()
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw_file)
    if name.endswith(".zst"):
        try:
            from compression import zstd  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise CannotRunError(f"{file} needs Python 3.14 or newer for .zst. Unpack it, or pack it as .gz.") from None
        return zstd.ZstdFile(raw_file)
    return raw_file


def _rows(file: Path, field: str) -> Iterator[tuple[Any, str, int]]:
    require("parquet", str(file))
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=PARQUET_BYTES) as table:
            names = table.schema_arrow.names
            columns = [field] if field else [name for name in (FIELD, *CHAT_FIELDS, *TOKEN_FIELDS) if name in names]
            if not set(columns) <= set(names):
                raise InputError(f"{file} has no column {field!r}.{nearest(field, names)} Name it: data=FILE#COLUMN.")
            num_bytes, num_read = file.stat().st_size, 0
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=columns):
                for i in range(len(batch)):
                    num_read += 1
                    yield batch.slice(i, 1), f"{file} row {num_read}", num_bytes * num_read // table.metadata.num_rows
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not a Parquet file: {' '.join(str(error).split())}. Mend it.") from None
