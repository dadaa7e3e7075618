"""Reads corpora that other tools have tokenised, without copying them.

Megatron's pair of .idx and .bin says where documents start. A .npy file, llm.c's .bin with a header and a plain .bin of
uint16 (nanoGPT) each count as one document, so attention crosses the texts inside.
"""

from pathlib import Path

import numpy as np

from meshwright.core.errors import InputError, first_line
from meshwright.train.data.token_store import TokenFiles, TokenStore

INDEX_MAGIC = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little")
INDEX_DTYPES = {1: "<u1", 4: "<i4", 5: "<i8", 8: "<u2"}
INDEX_HEADER_BYTES = 34
LLMC_HEADER_BYTES = 1024
LLMC_HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""The first two numbers of llm.c's header -> the dtype of the tokens after it."""


def open_tokens(path: Path, *, vocab_size: int) -> TokenStore | None:
    """Opens a corpus of tokens; None for a path that is not one.

    A corpus is a .npy or .bin file, a folder with such files, or Megatron's pair by either name or their stem. Raises
    InputError for a damaged file and for first tokens from ``vocab_size`` on; later tokens are checked when read.
    """
    path = path.expanduser()
    index_path = Path(f"{path.with_suffix('') if path.suffix in ('.bin', '.idx') else path}.idx")
    try:
        if index_path.is_file():
            return _megatron(index_path, vocab_size)
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
        files = [file for file in files if file.suffix in (".npy", ".bin")]
        array_by_file = {file: _tokens(file) for file in files}
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a corpus of tokens: {error}. Mend or remove that file.") from None
    if not array_by_file:
        return None
    token_files = TokenFiles(array_by_file, vocab_size=vocab_size)
    return TokenStore(token_files, np.unique(token_files.edges).astype(np.uint64))


def _tokens(file: Path) -> np.ndarray:
    if file.suffix == ".npy":
        try:
            array = np.lib.format.open_memmap(file, mode="r")
        except Exception as error:  # NumPy evaluates the header, which may fail in any way
            raise ValueError(f"{file.name} is damaged: {first_line(error)}") from None
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{file.name} has {array.dtype}{list(array.shape)}, not a 1-D array of integers")
        return array
    file_bytes = file.stat().st_size
    header = np.fromfile(file, "<i4", count=3)
    dtype = LLMC_HEADERS.get(tuple(header[:2].tolist()))
    if dtype is None:
        return np.memmap(file, "<u2", mode="r")
    if file_bytes != LLMC_HEADER_BYTES + int(header[2]) * np.dtype(dtype).itemsize:
        raise ValueError(f"{file.name} does not have the {header[2]} tokens that its header says")
    return np.memmap(file, dtype, mode="r", offset=LLMC_HEADER_BYTES)


def _megatron(index_path: Path, vocab_size: int) -> TokenStore:
    raw, tokens_path = index_path.read_bytes(), index_path.with_suffix(".bin")
    if not raw.startswith(INDEX_MAGIC) or len(raw) < INDEX_HEADER_BYTES or raw[17] not in INDEX_DTYPES:
        raise ValueError(f"{index_path.name} is not a Megatron index of version 1 with integer tokens")
    num_sequences, num_documents = (int(count) for count in np.frombuffer(raw, "<u8", count=2, offset=18))
    if len(raw) < INDEX_HEADER_BYTES + 12 * num_sequences + 8 * num_documents:
        raise ValueError(f"{index_path.name} is cut short")
    seq_lens = np.frombuffer(raw, "<i4", count=num_sequences, offset=INDEX_HEADER_BYTES)
    byte_offsets = np.frombuffer(raw, "<i8", count=num_sequences, offset=INDEX_HEADER_BYTES + 4 * num_sequences)
    first_seqs = np.frombuffer(raw, "<i8", count=num_documents, offset=INDEX_HEADER_BYTES + 12 * num_sequences)
    tokens = np.memmap(tokens_path, INDEX_DTYPES[raw[17]], mode="r")
    token_ends = np.concatenate([[0], np.cumsum(seq_lens, dtype=np.int64)])
    is_whole = token_ends[-1] == len(tokens) and not ((first_seqs < 0) | (first_seqs > num_sequences)).any()
    if not is_whole or (seq_lens < 0).any() or not np.array_equal(byte_offsets, token_ends[:-1] * tokens.itemsize):
        raise ValueError(f"{tokens_path.name} does not hold the sequences that {index_path.name} lists, in order")
    document_starts = np.unique(np.concatenate([token_ends[first_seqs], token_ends[[0, -1]]])).astype(np.uint64)
    return TokenStore(TokenFiles({tokens_path: tokens}, vocab_size=vocab_size), document_starts)
