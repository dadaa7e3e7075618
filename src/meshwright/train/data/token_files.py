"""Corpora that others have tokenised, read where they are.

Megatron's pair of .idx and .bin says where documents start. Of .npy files, llm.c's .bin with a header and plain .bin of
uint16 (nanoGPT) each file is one document: attention crosses the documents in it.
"""

from pathlib import Path
from tokenize import TokenError

import numpy as np

from meshwright.core.errors import InputError
from meshwright.train.data.token_store import TokenFiles, TokenStore

INDEX_MAGIC = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little")
INDEX_DTYPES = {1: "<u1", 4: "<i4", 5: "<i8", 8: "<u2"}
INDEX_HEAD = 34
HEADER_BYTES = 1024
HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""The first two numbers of llm.c's header -> the dtype of the tokens after it."""


def open_tokens(path: Path, *, vocab_size: int) -> TokenStore | None:
    """Opens a corpus of tokens; None for a path that is not one.

    That is a .npy or .bin file, a folder of some and no text, or Megatron's pair by either name or both names' stem.
    Raises InputError for a file that is damaged or has tokens that ``vocab_size`` does not embed.
    """
    path = path.expanduser()
    index = Path(f"{path.with_suffix('') if path.suffix in ('.bin', '.idx') else path}.idx")
    try:
        if index.is_file():
            return _megatron(index, vocab_size)
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
        files = [file for file in files if file.suffix in (".npy", ".bin")]
        arrays = {file: _tokens(file) for file in files}
    except (OSError, ValueError, SyntaxError, TokenError) as error:  # the last two: of a damaged .npy
        raise InputError(f"{path} is not a corpus of tokens: {error}. Write it again.") from None
    if not arrays:
        return None
    found = TokenFiles(arrays, vocab_size=vocab_size)
    return TokenStore(found, np.unique(found.edges).astype(np.uint64))


def _tokens(file: Path) -> np.ndarray:
    if file.suffix == ".npy":
        array = np.lib.format.open_memmap(file, mode="r")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{file.name} has {array.dtype}{list(array.shape)}, not a row of whole numbers")
        return array
    size = file.stat().st_size
    head = np.fromfile(file, "<i4", count=3)
    dtype = HEADERS.get(tuple(head[:2].tolist()))
    if dtype is None:
        return np.memmap(file, "<u2", mode="r")
    if size != HEADER_BYTES + int(head[2]) * np.dtype(dtype).itemsize:
        raise ValueError(f"{file.name} has other than the {head[2]} tokens of its header")
    return np.memmap(file, dtype, mode="r", offset=HEADER_BYTES)


def _megatron(index: Path, vocab_size: int) -> TokenStore:
    raw, file = index.read_bytes(), index.with_suffix(".bin")
    if not raw.startswith(INDEX_MAGIC) or len(raw) < INDEX_HEAD or raw[17] not in INDEX_DTYPES:
        raise ValueError(f"{index.name} is not an index of Megatron's, version 1, with tokens as integers")
    sequences, documents = (int(one) for one in np.frombuffer(raw, "<u8", count=2, offset=18))
    if len(raw) < INDEX_HEAD + 12 * sequences + 8 * documents:
        raise ValueError(f"{index.name} is cut short")
    lengths = np.frombuffer(raw, "<i4", count=sequences, offset=INDEX_HEAD)
    places = np.frombuffer(raw, "<i8", count=sequences, offset=INDEX_HEAD + 4 * sequences)
    firsts = np.frombuffer(raw, "<i8", count=documents, offset=INDEX_HEAD + 12 * sequences)
    tokens = np.memmap(file, INDEX_DTYPES[raw[17]], mode="r")
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    known = ends[-1] == len(tokens) and not ((firsts < 0) | (firsts > sequences)).any()
    if not known or (lengths < 0).any() or not np.array_equal(places, ends[:-1] * tokens.itemsize):
        raise ValueError(f"{file.name} is not what {index.name} describes, sequence after sequence")
    starts = np.unique(np.concatenate([ends[firsts], ends[[0, -1]]])).astype(np.uint64)
    return TokenStore(TokenFiles({file: tokens}, vocab_size=vocab_size), starts)
