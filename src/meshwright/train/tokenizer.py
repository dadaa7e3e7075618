"""A byte-level BPE tokenizer trained on the run's own text."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.core.errors import InputError
from meshwright.core.files import write_whole

END_OF_TEXT = "<|endoftext|>"
END_ID = 0
"""The trainer numbers special tokens first."""
SMALLEST_VOCAB = 257
"""Every byte, and the end of a text."""


def train_tokenizer(documents: Sequence[str], *, vocab_size: int) -> Tokenizer:
    """A tokenizer of at most ``vocab_size`` tokens: any text comes back unchanged, the same for the same texts.

    Fewer tokens when the texts have no more pairs that occur twice. Raises InputError when ``vocab_size`` has no
    room for every byte.
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
    """``tokenizer.json`` as `tokenizers` and transformers read it."""
    write_whole(path, lambda part: tokenizer.save(str(part)))


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a run. Raises InputError when the file is missing or is not a tokenizer."""
    if not path.is_file():
        raise InputError(f"{path} is not there. Give the folder of a finished run.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for a file it cannot read
        raise InputError(f"{path} is not a tokenizer file: {' '.join(str(error).split())}.") from None
