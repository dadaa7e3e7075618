"""Opens a folder to generate from: a finished run, or a Hugging Face model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace
from tokenizers import Tokenizer

from meshwright.core.digests import require_intact
from meshwright.core.errors import InputError
from meshwright.nn.hf.adapter import ADAPTER_CONFIG, adapted_model, base_folder, is_adapter, model_with_adapters
from meshwright.nn.hf.beside import files_beside
from meshwright.nn.hf.features import read_features
from meshwright.nn.hf.gguf import as_folder, open_files
from meshwright.nn.hf.tokenizer import CONFIG, GENERATION, TOKENIZER, end_tokens, read_tokenizer, start_tokens
from meshwright.serve.request import Prompt, SourceFeatures
from meshwright.spec.hf.published import folder_weights
from meshwright.spec.hf.read import model_from_config
from meshwright.spec.model import Model


class Text(NamedTuple):
    """Encodes and decodes text with the model's tokenizer, decoded without special tokens or with all of them; without
    a tokenizer it reads and writes token numbers, ``"17 4 230"``."""

    tokenizer: Tokenizer | None = None
    skips_special: bool = True

    def encode(self, text: str) -> list[int]:
        """Returns tokens. Raises InputError for what is no number if there is no tokenizer."""
        if self.tokenizer is not None:
            return list(self.tokenizer.encode(text).ids)
        try:
            return [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            raise InputError(
                f"the folder has no {TOKENIZER}, so a prompt must be token numbers, such as '17 4 230', not {text!r}. "
                f"Give numbers, or put the model's {TOKENIZER} beside its weights."
            ) from None

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        if self.tokenizer is None:
            return " ".join(map(str, tokens))
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=self.skips_special))


class ModelFolder(NamedTuple):
    """A model without its weights. ``dtype`` suits the stored weights: fp32, or bf16 for anything narrower;
    ``adapters`` are the folders of adapters by the name that requests give, and ``notes`` lines on what of the stored
    weights is widened or not used."""

    folder: Path
    model: Model
    text: Text
    end_tokens: frozenset[int]
    dtype: str
    adapters: Mapping[str, Path] = {}
    notes: tuple[str, ...] = ()

    def encode(self, prompt: str) -> Prompt:
        """Returns the tokens of a text, or what the NumPy file of that name has where an encoder reads features. Raises
        InputError for another file."""
        if not (self.model.encoder and self.model.encoder.features):
            return self.text.encode(prompt)
        try:
            return SourceFeatures(read_features(Path(prompt).expanduser().read_bytes(), prompt))
        except OSError as error:
            raise InputError(
                f"{self.model.name} reads features, and {prompt[:80]!r} is no file of them ({error.strerror}). Give a "
                "NumPy file's name as the prompt."
            ) from None

    def context_of(self, prompt: Prompt) -> Sequence[int]:
        """Returns what a text goes on from: the prompt, which an encoder reads apart."""
        return () if self.model.encoder or isinstance(prompt, SourceFeatures) else prompt

    def served(self, weights: str, platform: str) -> "ModelFolder":
        """Returns the folder as it is loaded. Every weight is widened if ``weights`` of another dtype are made of them,
        and on CPUs, whose products would widen narrow ones in every step."""
        if not weights and not (self.model.stored and platform == "cpu"):
            return self
        notes = () if weights else (*self.notes, f"CPUs have no products of narrow weights: served in {self.dtype}")
        return self._replace(model=replace(self.model, stored=None), notes=notes)


def open_model(folder: Path, adapters: Mapping[str, Path] = {}) -> ModelFolder:
    """Opens a folder or a GGUF file, and beside it folders of adapters. Raises InputError for a missing or unreadable
    file, CannotRunError for a damaged one."""
    folder = as_folder(folder.expanduser())
    base_path = base_folder(folder) if is_adapter(folder) else folder
    if not (base_path / CONFIG).is_file():
        raise InputError(
            f"{base_path} has no {CONFIG}. Give the folder of a finished run, of a model with {CONFIG} and its "
            f"safetensors files, or the output of convert for a run that is not finished."
        )
    require_intact(base_path, [CONFIG, *(str(file.relative_to(base_path)) for file in files_beside(base_path))])
    model = model_from_config(base_path / CONFIG, folder.resolve().name)
    if is_adapter(folder):
        require_intact(folder, [ADAPTER_CONFIG, *(str(file.relative_to(folder)) for file in files_beside(folder))])
        model = adapted_model(model, folder)
    if adapters:
        model = model_with_adapters(model, list(adapters.values()))
    tokenizer_file = next((path for path in (folder / TOKENIZER, base_path / TOKENIZER) if path.is_file()), None)
    tokenizer = read_tokenizer(tokenizer_file) if tokenizer_file else None
    with open_files(base_path) as tensors:
        weights = folder_weights(model, base_path, tensors)
    model = replace(model, stored=weights.stored)
    if model.encoder:
        start_token, *forced = start_tokens(base_path, model.encoder.start_token)
        model = replace(model, encoder=replace(model.encoder, start_token=start_token, forced=tuple(forced)))
    end_token_ids = end_tokens(folder if (folder / GENERATION).is_file() else base_path, tokenizer)
    return ModelFolder(folder, model, Text(tokenizer), frozenset(end_token_ids), weights.dtype, adapters, weights.notes)


MOST_HELD = 8
"""Tokens that may wait for a character's end: it has up to 4 bytes, what is still incomplete then is none."""


class TextStream:
    """Decodes the tokens of one sequence one by one; a character of several tokens comes with the last of them. The
    time of a token does not depend on how many came before."""

    def __init__(self, text: Text, prompt: Sequence[int]) -> None:
        self.text = text
        self.tokens = list(prompt)
        # Some tokenizers decode a token by its context, so a few earlier tokens are decoded again.
        self.start, self.shown = max(0, len(prompt) - 8), len(prompt)

    def push(self, token: int) -> str:
        """Adds a token and returns the new text; "" while a character is incomplete."""
        self.tokens.append(token)
        return self._new()

    def finish(self) -> str:
        """Returns the rest of the text."""
        return self._new(last=True)

    def _new(self, *, last: bool = False) -> str:
        text = self.text.decode(self.tokens[self.start :])
        shown_text = self.text.decode(self.tokens[self.start : self.shown])
        if text == shown_text and not last:
            self.tokens.pop()  # a special token, of which the text has nothing
        num_held_tokens = len(self.tokens) - self.shown
        if len(text) <= len(shown_text) or (text.endswith("\ufffd") and num_held_tokens <= MOST_HELD and not last):
            return ""
        self.start, self.shown = self.shown, len(self.tokens)  # so that a token costs as much late in a text as early
        return text[len(shown_text) :]
