"""Reads the tokenizer of a Hugging Face folder, and finds its end-of-text token."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.core.errors import InputError
from meshwright.core.files import read_json

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "<|return|>")
"""End-of-text tokens of known tokenizers, for folders without a file that names it."""


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer. Raises InputError when the file is not one."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # `tokenizers` raises Exception, or panics with another BaseException
        raise InputError(f"{path} is not a tokenizer file: {' '.join(str(error).split())}. Fetch it again.") from None
    # A file may ask for both, which would truncate texts or add tokens to them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_table(path: Path, *, remedy: str) -> dict[str, Any]:
    """Returns a file's JSON object, {} without a file. Raises InputError, with the ``remedy``, for anything else."""
    if not path.is_file():
        return {}
    advice = f"Mend it, or {remedy}."
    return read_json(path, advice, advice)


def end_name(config: Mapping[str, Any]) -> str | None:
    """Returns the end-of-text token that a `TOKENIZER_CONFIG` names; None if it names none."""
    named = config.get("eos_token")
    name = named.get("content") if isinstance(named, dict) else named
    return str(name) if name else None


def end_token(tokenizer: Tokenizer, name: str | None) -> int | None:
    """Returns the number of the end-of-text token: ``name``, else the first of `END_NAMES` that exists; else None."""
    numbers = (tokenizer.token_to_id(known) for known in ((name,) if name else END_NAMES))
    return next((number for number in numbers if number is not None), None)
