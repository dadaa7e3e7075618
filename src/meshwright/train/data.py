"""Tokens on disk, and the batches of a run: a pure function of the seed and the step."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from jax.sharding import Sharding
from tokenizers import Tokenizer

from meshwright.core.errors import InputError
from meshwright.core.files import write_whole
from meshwright.train.tokenizer import END_ID, load_tokenizer, save_tokenizer, train_tokenizer

HELD_OUT_FRACTION = 0.05


class TokenStore:
    """A run of tokens that is read from disk piece by piece; `held_out` and `train` are views of parts."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` as int32, which is what touches the disk."""
        return np.asarray(self.tokens[start:stop], dtype=np.int32)

    @property
    def _held_out_start(self) -> int:
        return len(self) - int(len(self) * HELD_OUT_FRACTION)

    def train(self) -> "TokenStore":
        """All but the last 5%."""
        return TokenStore(self.tokens[: self._held_out_start])

    def held_out(self) -> "TokenStore":
        """The last 5%, which no step trains on."""
        return TokenStore(self.tokens[self._held_out_start :])


def open_tokens(documents: Sequence[str], *, vocab_size: int, folder: Path) -> tuple[TokenStore, Tokenizer]:
    """The documents as tokens with an end after each, and their tokenizer, made once and kept in ``folder``.

    The files are named by a hash of the texts, the vocabulary's size and the tokenizer's version.
    """
    key = _key(documents, vocab_size)
    tokenizer_path, tokens_path = folder / f"{key}.tokenizer.json", folder / f"{key}.bin"
    # Up to 65536 tokens fit two bytes, which halves the file.
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    if not (tokenizer_path.is_file() and tokens_path.is_file()):
        tokenizer = train_tokenizer(documents, vocab_size=vocab_size)
        encoded = _encode(tokenizer, documents).astype(dtype)
        save_tokenizer(tokenizer, tokenizer_path)
        write_whole(tokens_path, lambda part: encoded.tofile(part))
    return TokenStore(np.memmap(tokens_path, dtype=dtype, mode="r")), load_tokenizer(tokenizer_path)


def _key(documents: Sequence[str], vocab_size: int) -> str:
    digest = hashlib.sha256(f"{tokenizers.__version__} {vocab_size}".encode())
    for text in documents:
        encoded = text.encode()
        digest.update(f" {len(encoded)} ".encode() + encoded)
    return digest.hexdigest()[:24]


def _encode(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    encodings = tokenizer.encode_batch(list(documents))
    return np.concatenate([np.array([*e.ids, END_ID], dtype=np.uint32) for e in encodings])


class Batches:
    """The global batches of a run. Its only state is the number of the step.

    The tokens are cut into windows of ``seq_len``, one after the other, each read with the token that follows
    it as the last label. Every epoch has its own shuffled order of the windows; step i takes the next
    ``batch_seqs`` of them, across the end of an epoch where they do not divide. Neither mesh nor device
    enters, so one seed gives the same batches on every mesh.
    """

    def __init__(self, store: TokenStore, *, batch_seqs: int, seq_len: int, seed: int) -> None:
        self.store, self.batch_seqs, self.seq_len, self.seed = store, batch_seqs, seq_len, seed
        self.num_windows = max(0, len(store) - 1) // seq_len
        if self.num_windows == 0:
            raise InputError(
                f"the text has {len(store)} tokens, not one sequence of {seq_len} and its labels. "
                f"Give more text, or sequences of at most {max(1, len(store) - 1)} tokens."
            )
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_windows)

    def window(self, step: int, row: int) -> int:
        """Number of the window in one row of a step's global batch."""
        epoch, place = divmod(step * self.batch_seqs + row, self.num_windows)
        return int(self._order(epoch)[place])

    def rows(self, step: int, row_slice: slice, position_slice: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels [rows, positions] int32 of a part of a step's batch; only that part is read."""
        chosen = range(*row_slice.indices(self.batch_seqs))
        first, last, _ = position_slice.indices(self.seq_len)
        starts = [self.window(step, row) * self.seq_len for row in chosen]
        both = np.stack([self.store.read(start + first, start + last + 1) for start in starts])
        return both[:, :-1], both[:, 1:]

    def global_batch(self, step: int, shardings: dict[str, Any]) -> dict[str, jax.Array]:
        """``tokens`` and ``labels`` of a step, each device given its own rows and positions."""
        read = lru_cache(maxsize=None)(lambda a, b, c, d: self.rows(step, slice(a, b), slice(c, d)))
        shape = (self.batch_seqs, self.seq_len)

        def part(index: Any, which: int) -> np.ndarray:
            (a, b, _), (c, d, _) = (s.indices(n) for s, n in zip(index, shape, strict=True))
            return read(a, b, c, d)[which]

        def whole(sharding: Sharding, which: int) -> jax.Array:
            return jax.make_array_from_callback(shape, sharding, lambda index: part(index, which))

        return {"tokens": whole(shardings["tokens"], 0), "labels": whole(shardings["labels"], 1)}
