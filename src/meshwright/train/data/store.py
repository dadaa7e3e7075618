"""Tokenises text once, also for many processes at a time, into a folder that is whole or absent.

Documents are tokenised as a stream, with a progress bar; an interrupted build is continued.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

import msgspec
import numpy as np
import tokenizers
from tokenizers import Tokenizer

from meshwright.core.digests import SUMS, require_intact, write_sums
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.files import DAMAGED_JSON, sync, write_json_whole, write_text_whole
from meshwright.core.progress import working
from meshwright.nn.hf.tokenizer import TOKENIZER
from meshwright.train.data.chat import ChatTokenizer
from meshwright.train.data.text import Corpus, TextPiece
from meshwright.train.data.token_store import CHECKSUMS, START_BYTES, STARTS, TOKENS, TokenStore, checksums
from meshwright.train.data.tokenizer import (
    END_ID,
    SMALLEST_VOCAB,
    TextTokenizer,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

FORMAT = 1
"""Part of the key that names a store, so that stores of other formats are not read."""
META = "store.json"
TRAINED_CHARS = 2**26
"""Maximum characters that a tokenizer is trained on: more change its tokens little and cost memory."""
JOURNAL = "journal.json"
BATCH_CHARS = 2**22
"""Characters per call of the tokenizer, and so the work that an interruption loses."""


AnyTokenizer = TextTokenizer | ChatTokenizer
"""Encodes pieces of text, or chats."""


class Tokenised(NamedTuple):
    """A text as tokens, its tokenizer, the token that ends a document, and the number of bad records left out."""

    store: TokenStore
    tokenizer: Tokenizer
    end_id: int
    skipped_records: int = 0


class Written(msgspec.Struct, kw_only=True):
    """Counts of written tokens and documents, pieces read and chats refused; and whether a document is unfinished."""

    tokens: int = 0
    documents: int = 0
    pieces: int = 0
    refused: int = 0
    in_document: bool = False

    def files(self, folder: Path, dtype: str) -> tuple[tuple[Path, int], tuple[Path, int]]:
        """Returns the files of tokens and of starts, each with its number of bytes."""
        token_bytes = self.tokens * np.dtype(dtype).itemsize
        return (folder / TOKENS, token_bytes), (folder / STARTS, self.documents * START_BYTES)


class Meta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``store.json``: the dtype of the tokens, the end token, and the expected counts."""

    dtype: str
    end_id: int
    written: Written
    skipped_records: int = 0


def open_store(corpus: Corpus, given: AnyTokenizer | None, *, vocab_size: int, folder: Path) -> Tokenised:
    """Tokenises documents, each with an end token, by ``given`` or by a BPE trained on them.

    The store is made once, in a folder named by a hash of the texts (`FileCorpus.identity`) and the tokenizer. One
    process makes it while all others wait; if it stops, another one continues its work. Only a finished store has
    that name.
    """
    # Raises the error of the trainer before any file is read.
    if given is None and vocab_size < SMALLEST_VOCAB:
        train_tokenizer((), vocab_size=vocab_size)
    encoder_text = given.identity if given else f"bpe {tokenizers.__version__} {vocab_size} {TRAINED_CHARS}"
    store_path = folder / hashlib.sha256(f"{FORMAT} {encoder_text} {corpus.identity()}".encode()).hexdigest()[:24]
    if not store_path.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(store_path) as part_folder:
            # Another process may have made it while this one waited.
            if not store_path.is_dir():
                try:
                    _build(corpus, given, vocab_size, part_folder)
                except (InputError, CannotRunError):
                    # No later try can use it: the store of a corrected text has another name.
                    shutil.rmtree(part_folder, ignore_errors=True)
                    raise
                try:
                    os.rename(part_folder, store_path)
                    sync(folder)
                except OSError:
                    # Another process was faster: its store stays.
                    if not store_path.is_dir():
                        raise
                    shutil.rmtree(part_folder, ignore_errors=True)
    return _open(store_path)


def _build(corpus: Corpus, given_tokenizer: AnyTokenizer | None, vocab_size: int, part_folder: Path) -> None:
    """Builds a whole store in the folder ``part_folder``, and continues an earlier try there."""
    part_folder.mkdir(exist_ok=True)
    tokenizer_file = part_folder / TOKENIZER
    if given_tokenizer is None and not tokenizer_file.is_file():
        save_tokenizer(train_tokenizer(corpus.sample(TRAINED_CHARS), vocab_size=vocab_size), tokenizer_file)
    elif given_tokenizer is not None:
        save_tokenizer(given_tokenizer.tokenizer, tokenizer_file)
    encoder = given_tokenizer or TextTokenizer(load_tokenizer(tokenizer_file), END_ID)
    counts = tokenise(corpus, encoder, folder=part_folder)
    if not counts.documents:
        raise InputError("every record is bad and left out. Run without --skip-bad-records to see why.")
    num_skipped = len(corpus.bad or ()) + counts.refused
    meta = Meta(dtype=encoder.dtype, end_id=encoder.end_id, written=counts, skipped_records=num_skipped)
    write_json_whole(part_folder / META, meta)
    checksums(part_folder / TOKENS).tofile(part_folder / CHECKSUMS)
    write_sums(part_folder, [part_folder / name for name in (TOKENS, STARTS, CHECKSUMS, META, TOKENIZER)])


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """Waits until no other process makes this store; yields the folder to make it in.

    Without locks in the file system each process makes the store in its own folder.
    """
    lock_path = path.with_name(f".{path.name}.lock")
    try:
        lock_file = _locked(lock_path, path)
    except OSError:
        lock_path.unlink(missing_ok=True)
        yield Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        return
    with lock_file:
        try:
            yield path.with_name(f".{path.name}.part")
        finally:
            lock_path.unlink(missing_ok=True)


def _locked(lock_path: Path, path: Path) -> IO[str]:
    """Waits for the lock and returns its file."""
    while True:
        with ExitStack() as stack:
            lock_file = stack.enter_context(lock_path.open("w"))
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if sys.stderr.isatty():
                    print(f"waiting for another process that tokenises the same text into {path}", file=sys.stderr)
                fcntl.flock(lock_file, fcntl.LOCK_EX)
            # The previous owner has removed the file: only a lock on the file that others will open counts.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock_file.fileno()), lock_path.stat()):
                    stack.pop_all()
                    return lock_file


def _open(path: Path) -> Tokenised:
    """Opens a store; checks all files now, except tokens, which are checked when they are read."""
    try:
        if not require_intact(path, [STARTS, CHECKSUMS, META, TOKENIZER]):
            raise CannotRunError(f"{path} has no {SUMS}.")
    except CannotRunError as error:
        raise CannotRunError(f"{error} Remove the folder {path}, and it is made again.") from None
    try:
        meta = msgspec.json.decode((path / META).read_bytes(), type=Meta)
    except (OSError, *DAMAGED_JSON):
        raise InputError(f"{path} is not a store of tokens. Remove it, and it is made again.") from None
    (tokens_file, tokens_bytes), (starts_file, index_bytes) = meta.written.files(path, meta.dtype)
    # The last entry of the index is the number of tokens.
    bytes_by_file = {tokens_file: tokens_bytes, starts_file: index_bytes + START_BYTES}
    if not all(file.is_file() and file.stat().st_size == num_bytes for file, num_bytes in bytes_by_file.items()):
        raise InputError(f"{path} is damaged: its files do not fit {meta.written.tokens} tokens. Remove it.")
    store, tokenizer = TokenStore.open(path, dtype=meta.dtype), load_tokenizer(path / TOKENIZER)
    return Tokenised(store, tokenizer, meta.end_id, meta.skipped_records)


# -- the files of a store --------------------------------------------------------------------------------


def tokenise(corpus: Corpus, encoder: AnyTokenizer, *, folder: Path) -> Written:
    """Writes the tokens of all documents, encoded by ``encoder``, and returns the counts.

    Continues an earlier call for the same folder that was stopped at any point.
    """
    dtype, counts = encoder.dtype, Written()
    with suppress(OSError, *DAMAGED_JSON):
        journal = msgspec.json.decode((folder / JOURNAL).read_bytes(), type=Written)
        # else begins anew: after a loss of power the files may be shorter than the journal says
        if all(path.is_file() and path.stat().st_size >= num_bytes for path, num_bytes in journal.files(folder, dtype)):
            counts = journal
    with ExitStack() as stack:
        tokens_file, starts_file = (stack.enter_context(_opened(*entry)) for entry in counts.files(folder, dtype))
        work = stack.enter_context(working("tokenising, bytes", corpus.total_bytes))
        for pieces in _batches(islice(corpus.pieces(), counts.pieces, None)):
            for piece, token_ids in zip(pieces, encoder.encode(pieces, skip_bad=corpus.bad is not None), strict=True):
                counts.pieces += 1
                if token_ids is None:
                    counts.refused += 1
                    continue
                if not counts.in_document:
                    starts_file.write(np.uint64(counts.tokens).tobytes())
                    counts.documents += 1
                tokens_file.write(np.array(token_ids, dtype).tobytes())
                counts.tokens += len(token_ids)
                counts.in_document = not piece.ends_document
            # The journal must not claim more than the files have on the disk.
            for file in (tokens_file, starts_file):
                file.flush()
                os.fsync(file.fileno())
            write_text_whole(folder / JOURNAL, msgspec.json.encode(counts).decode())
            work.done = pieces[-1].bytes_read
        # The index ends with the number of tokens.
        starts_file.write(np.uint64(counts.tokens).tobytes())
        for file in (tokens_file, starts_file):
            file.flush()
            # The rename of the folder must not reach the disk before its files.
            os.fsync(file.fileno())
    (folder / JOURNAL).unlink(missing_ok=True)
    return counts


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text)
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _opened(path: Path, num_bytes: int) -> BinaryIO:
    """Opens a file to append after its first ``num_bytes``: a killed process may have written more."""
    file = path.open("r+b" if path.is_file() else "w+b")
    file.truncate(num_bytes)
    file.seek(num_bytes)
    return file
