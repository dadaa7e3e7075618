"""The tokenizer of a Hugging Face folder, and the token that ends a text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.core.errors import InputError

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "<|return|>")
"""What known tokenizers call the end of a text, where no file beside them says which it is."""


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file. Raises InputError when it is not one."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for a file it cannot read
        raise InputError(f"{path} is not a tokenizer file: {' '.join(str(error).split())}.") from None
    # A file may ask for both, which would cut texts or add tokens to them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_table(path: Path, *, remedy: str) -> dict[str, Any]:
    """A JSON object; nothing where there is no file. Raises InputError, with the ``remedy``, for anything else."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a JSON object. Mend it, or {remedy}.")
    return found


def end_name(config: Mapping[str, Any]) -> str | None:
    """The end of a text by a `TOKENIZER_CONFIG`, which may not name any."""
    named = config.get("eos_token")
    name = named.get("content") if isinstance(named, dict) else named
    return str(name) if name else None


def end_token(tokenizer: Tokenizer, name: str | None) -> int | None:
    """The number of the end of a text: of this name, or of the first of `END_NAMES` that the tokenizer has."""
    numbers = (tokenizer.token_to_id(known) for known in ((name,) if name else END_NAMES))
    return next((number for number in numbers if number is not None), None)
