"""Reads the tokenizer of a Hugging Face folder, its special tokens, and its start and end tokens."""

from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meshwright.core.errors import InputError
from meshwright.core.files import read_json

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
"""File of older folders: special tokens by name, which replace those of `TOKENIZER_CONFIG`."""
CONFIG, GENERATION = "config.json", "generation_config.json"
END_OF_TEXT = "<|endoftext|>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "<|return|>")
"""End-of-text tokens of known tokenizers, for folders without a file that names it."""


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer, without truncation or padding. Raises InputError when the file is not one."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # `tokenizers` raises Exception, or panics with another BaseException
        raise InputError(f"{path} is not a tokenizer file: {' '.join(str(error).split())}. Fetch it again.") from None
    # A file may enable both, which would truncate texts or add tokens to them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_table(path: Path, *, remedy: str) -> dict[str, Any]:
    """Returns a file's JSON object, {} without a file. Raises InputError, with the ``remedy``, for other content."""
    if not path.is_file():
        return {}
    advice = f"Mend it, or {remedy}."
    return read_json(path, advice, advice)


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens of a folder by name, such as bos_token, as transformers passes them to templates.

    They are the keys of `TOKENIZER_CONFIG` that end in _token and its named ``extra_special_tokens``; if it lacks
    ``added_tokens_decoder``, also those of `SPECIAL_TOKENS`.
    """
    config = read_table(folder / TOKENIZER_CONFIG, remedy="remove it")
    if "added_tokens_decoder" not in config:
        config |= read_table(folder / SPECIAL_TOKENS, remedy="remove it")
    token_by_name = {name: token for name, token in config.items() if name.endswith("_token")}
    for name in ("extra_special_tokens", "model_specific_special_tokens"):
        token_by_name |= extra if isinstance(extra := config.get(name), dict) else {}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in token_by_name.items()}
    return {name: token_text for name, token_text in texts.items() if isinstance(token_text, str) and token_text}


def end_token(tokenizer: Tokenizer, name: str | None) -> int | None:
    """Returns the id of the end-of-text token: ``name``, by default the first of `END_NAMES` that exists; or None."""
    token_ids = (tokenizer.token_to_id(end_name) for end_name in ((name,) if name else END_NAMES))
    return next((token_id for token_id in token_ids if token_id is not None), None)


def start_tokens(folder: Path, usual: int) -> tuple[int, ...]:
    """Returns the tokens with which the decoder of an encoder-decoder begins: ``decoder_start_token_id`` of a folder's
    generation config or config, else ``usual``, then its ``forced_bos_token_id`` or else the leading tokens of
    ``forced_decoder_ids`` before the first null, as Whisper's for English has them."""
    configs = [read_table(folder / file, remedy="fetch it again") for file in (GENERATION, CONFIG)]
    names = "decoder_start_token_id", "forced_bos_token_id"
    starts, forced = ([config[name] for config in configs if config.get(name) is not None] for name in names)
    places = next((places for config in configs if (places := config.get("forced_decoder_ids"))), list[Any]())
    leading = takewhile(lambda token: token is not None, (token for _, token in sorted(places)))
    return (*(starts or [usual])[:1], *(forced[:1] or leading))


def end_tokens(folder: Path, tokenizer: Tokenizer | None) -> list[int]:
    """Returns a folder's ``eos_token_id`` as a list, else the tokenizer's end token. Raises InputError for bad ids."""
    for file in (folder / GENERATION, folder / CONFIG):
        config = read_table(file, remedy="fetch it again")
        text_config = config.get("text_config")
        eos_ids = config.get("eos_token_id", text_config.get("eos_token_id") if isinstance(text_config, dict) else None)
        if eos_ids is not None:
            token_ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
            if not all(isinstance(token, int) for token in token_ids):
                raise InputError(f"{file}: eos_token_id is {eos_ids!r}. Write the number of a token, or a list.")
            return token_ids
    end_id = end_token(tokenizer, special_tokens(folder).get("eos_token")) if tokenizer else None
    return [] if end_id is None else [end_id]
