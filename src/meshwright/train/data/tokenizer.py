"""Tokenizers: a byte-level BPE trained on the run's own text, or one given as a file."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.core.errors import InputError
from meshwright.core.files import write_text_whole
from meshwright.nn.hf.gguf import as_folder
from meshwright.nn.hf.tokenizer import (
    END_NAMES,
    END_OF_TEXT,
    TOKENIZER,
    TOKENIZER_CONFIG,
    end_token,
    read_tokenizer,
    special_tokens,
)
from meshwright.train.data.text import TextPiece

END_ID = 0
"""Id of the end-of-text token of a trained tokenizer: the trainer numbers special tokens first."""
SMALLEST_VOCAB = 257
"""Number of tokens for all bytes and the end of a text."""


class TextTokenizer(NamedTuple):
    """A tokenizer, and the token that follows each document."""

    tokenizer: Tokenizer
    end_id: int

    @property
    def identity(self) -> str:
        """A digest; tokenizers with equal digests give texts the same tokens."""
        return f"{hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()} {self.end_id}"

    @property
    def dtype(self) -> str:
        """The dtype of tokens in a store. Numbers below 65536 fit two bytes, which halves the file."""
        return "uint16" if num_ids(self.tokenizer) <= 2**16 else "uint32"

    def encode(self, pieces: Sequence[TextPiece], *, skip_bad: bool = False) -> Sequence[list[int] | None]:
        """Returns the tokens of each piece, and the end token after the last piece of a document."""
        encodings = self.tokenizer.encode_batch_fast([piece.text for piece in pieces], add_special_tokens=False)
        ending_ids = ([self.end_id] if piece.ends_document else [] for piece in pieces)
        return [encoding.ids + ending for encoding, ending in zip(encodings, ending_ids, strict=True)]


def train_tokenizer(documents: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Trains a tokenizer of at most ``vocab_size`` tokens: it is lossless, and deterministic for the same texts.

    It has fewer tokens if no further pair occurs twice. Raises InputError for a ``vocab_size`` below `SMALLEST_VOCAB`.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise InputError(
            f"vocab_size={vocab_size} is too small for a byte-level tokenizer. Use at least {SMALLEST_VOCAB}: "
            f"256 bytes and {END_OF_TEXT}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    assert tokenizer.token_to_id(END_OF_TEXT) == END_ID
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Writes ``tokenizer.json`` as `tokenizers` and transformers read it."""
    write_text_whole(path, tokenizer.to_str(pretty=True))


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads the tokenizer of a run. Raises InputError when the file is missing or is not a tokenizer."""
    if not path.is_file():
        raise InputError(f"{path} is not there. Give the folder of a finished run.")
    return read_tokenizer(path)


def num_ids(tokenizer: Tokenizer) -> int:
    """Returns the largest token number plus one; smaller numbers may be unused."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def open_tokenizer(path: Path, *, vocab_size: int) -> TextTokenizer:
    """Reads a ``tokenizer.json``, given by its path, its folder or a GGUF file, with its end-of-text token.

    That token is the ``eos_token`` of the special tokens in its folder, else the first of `END_NAMES` that the
    tokenizer has. Raises InputError if it has none, or more tokens than ``vocab_size``.
    """
    source_path = as_folder(path.expanduser())
    file = source_path / TOKENIZER if source_path.is_dir() else source_path
    if not file.is_file():
        raise InputError(f"tokenizer {str(path)!r} is not there. Give a tokenizer.json or the folder of one.")
    tokenizer = load_tokenizer(file)
    if num_ids(tokenizer) > vocab_size:
        raise InputError(
            f"tokenizer {str(path)!r} has {num_ids(tokenizer)} tokens, but the model has vocab_size={vocab_size}. "
            f"Set model.vocab_size={num_ids(tokenizer)} or more, or leave the tokenizer out to train one."
        )
    end_name = special_tokens(file.parent).get("eos_token")
    end_id = end_token(tokenizer, end_name)
    if end_id is None:
        lacked_text = f"eos_token {end_name!r}" if end_name else f"any of {', '.join(END_NAMES)}"
        raise InputError(f"{file} has no end-of-text token: it lacks {lacked_text}. Name one in {TOKENIZER_CONFIG}.")
    return TextTokenizer(tokenizer, end_id)
