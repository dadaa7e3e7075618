"""A folder to generate from: a finished run, or a model as Hugging Face publishes it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

from meshwright.core.errors import InputError
from meshwright.nn.hf.files import DTYPES, Tensors, open_checkpoint
from meshwright.nn.hf.format import stored_parts
from meshwright.nn.hf.weights import CONFIG
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import Model

TOKENIZER, GENERATION, TOKENIZER_CONFIG = "tokenizer.json", "generation_config.json", "tokenizer_config.json"
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "<|return|>")
"""What known tokenizers call the end of a text, where no file beside them says which token it is."""


class Text(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


class TokenizedText(NamedTuple):
    """By the model's own tokenizer."""

    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class NumberedText(NamedTuple):
    """Token numbers as they are, where a folder has no tokenizer: ``"17 4 230"``."""

    def encode(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            raise InputError(
                f"the folder has no {TOKENIZER}, so that a prompt is token numbers, such as '17 4 230', not {text!r}. "
                f"Give numbers, or put the model's {TOKENIZER} beside its weights."
            ) from None

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


class ModelFolder(NamedTuple):
    """What a folder says of its model, its weights unread. ``dtype`` is that of the weights: fp32, or bf16 for
    anything narrower."""

    folder: Path
    model: Model
    text: Text
    end_tokens: frozenset[int]
    dtype: str


def open_model(folder: Path) -> ModelFolder:
    """The model of a folder, its tokenizer and end tokens. Raises InputError for what is missing or cannot be read."""
    folder = folder.expanduser()
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"{folder} has no {CONFIG}. Give the folder of a finished run, of a model with {CONFIG} and its "
            f"safetensors files, or what convert made of a run that is not finished."
        )
    model = model_from_config(folder / CONFIG, folder.resolve().name)
    text = _text(folder / TOKENIZER)
    with open_checkpoint(folder) as tensors:
        dtype = _dtype(model, tensors)
    return ModelFolder(folder, model, text, _end_tokens(folder, text), dtype)


def _dtype(model: Model, tensors: Tensors) -> str:
    """That of the table of tokens; a checkpoint without it is refused where its weights are read."""
    first = next(stored_parts(model, tensors))
    if first.tensor not in tensors:
        return "fp32"
    return "fp32" if tensors[first.tensor].dtype.itemsize == DTYPES["fp32"].itemsize else "bf16"


def _text(path: Path) -> Text:
    if not path.is_file():
        return NumberedText()
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for a file it cannot read
        raise InputError(f"{path} is not a tokenizer file: {' '.join(str(error).split())}.") from None
    # A file may ask for both, which would cut prompts or add tokens to them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TokenizedText(tokenizer)


def _end_tokens(folder: Path, text: Text) -> frozenset[int]:
    """``eos_token_id`` of the generation config or the config, else the end that the tokenizer names, if any."""
    for name in (GENERATION, CONFIG):
        found = _table(folder / name).get("eos_token_id")
        if found is not None:
            return frozenset(int(token) for token in (found if isinstance(found, list) else [found]))
    if not isinstance(text, TokenizedText):
        return frozenset()
    named = _table(folder / TOKENIZER_CONFIG).get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    numbers = (text.tokenizer.token_to_id(known) for known in ((str(named),) if named else END_NAMES))
    return frozenset([number for number in numbers if number is not None][:1])


def _table(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f"{path} is not a JSON object. Mend it, or fetch it again.")
    return found


class TextStream:
    """Tokens of one sequence turned into text as they come, characters of several tokens held back until they are
    whole."""

    def __init__(self, text: Text, prompt: Sequence[int]) -> None:
        self.text = text
        self.tokens = list(prompt)
        # some tokenizers decode a token by what stands before it, so a few that are shown already go along
        self.start, self.shown = max(0, len(prompt) - 8), len(prompt)

    def push(self, token: int) -> str:
        """The text that a token adds."""
        self.tokens.append(token)
        return self._new()

    def finish(self) -> str:
        """What was held back."""
        return self._new(last=True)

    def _new(self, *, last: bool = False) -> str:
        whole = self.text.decode(self.tokens[self.start :])
        before = self.text.decode(self.tokens[self.start : self.shown])
        if len(whole) <= len(before) or (whole.endswith("\ufffd") and not last):
            return ""
        self.start, self.shown = self.shown, len(self.tokens)
        return whole[len(before) :]
