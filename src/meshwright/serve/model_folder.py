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
    """Encodes and decodes text with the model's tokenizer; ``skips_special`` leaves special tokens out of decoded text.
    Without a tokenizer text is token numbers, ``"17 4 230"``."""

    tokenizer: Tokenizer | None = None
    skips_special: bool = True

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text. Raises InputError if there is no tokenizer and a word is not a whole number."""
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
        """Returns the text of tokens; their numbers, with spaces between them, if there is no tokenizer."""
        if self.tokenizer is None:
            return " ".join(map(str, tokens))
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=self.skips_special))


class ModelFolder(NamedTuple):
    """An opened folder, without the weights. ``dtype`` to load weights in: fp32, or bf16 if they are stored narrower;
    ``adapters``: name in requests -> adapter folder; ``notes``: lines on stored weights that are widened or not
    used."""

    folder: Path
    model: Model
    text: Text
    end_tokens: frozenset[int]
    dtype: str
    adapters: Mapping[str, Path] = {}
    notes: tuple[str, ...] = ()

    def encode(self, prompt: str) -> Prompt:
        """Returns the tokens of a text; if the model's encoder reads features, ``prompt`` is a NumPy file's name, and
        returns its features. Raises InputError if there is no such file."""
        if not (self.model.encoder and self.model.encoder.features):
            return self.text.encode(prompt)
        try:
            return SourceFeatures(read_features(Path(prompt).expanduser().read_bytes(), prompt))
        except OSError as error:
            raise InputError(
                f"{self.model.name} reads features, and {prompt[:80]!r} cannot be read ({error.strerror}). Give a "
                "NumPy file's name as the prompt."
            ) from None

    def context_of(self, prompt: Prompt) -> Sequence[int]:
        """Returns the tokens that the output continues: the prompt, or () if an encoder reads the prompt."""
        return () if self.model.encoder or isinstance(prompt, SourceFeatures) else prompt

    def served(self, weights: str, platform: str) -> "ModelFolder":
        """Returns the folder as it will be loaded: with all weights widened to ``dtype`` if they are to be quantised to
        ``weights``, or on CPUs, which would widen narrow weights in every step; else unchanged."""
        if not weights and not (self.model.stored and platform == "cpu"):
            return self
        notes = () if weights else (*self.notes, f"CPUs cannot multiply narrow weights: served in {self.dtype}")
        return self._replace(model=replace(self.model, stored=None), notes=notes)


def open_model(folder: Path, adapters: Mapping[str, Path] = {}) -> ModelFolder:
    """Opens a model folder or GGUF file, and the given adapter folders. Raises InputError if a file is missing or
    cannot be read, CannotRunError if one is damaged."""
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
"""Maximum tokens that wait for an incomplete character (at most 4 bytes); after more, the text is shown as it is."""


class TextStream:
    """Decodes the tokens of one sequence one by one; returns a character of several tokens with its last token. The
    time per token does not grow with the length of the text."""

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
        """Returns the text not returned yet, incomplete characters included."""
        return self._new(last=True)

    def _new(self, *, last: bool = False) -> str:
        text = self.text.decode(self.tokens[self.start :])
        shown_text = self.text.decode(self.tokens[self.start : self.shown])
        if text == shown_text and not last:
            self.tokens.pop()  # a special token, which adds no text
        num_held_tokens = len(self.tokens) - self.shown
        if len(text) <= len(shown_text) or (text.endswith("\ufffd") and num_held_tokens <= MOST_HELD and not last):
            return ""
        self.start, self.shown = self.shown, len(self.tokens)  # so that the cost of a token does not grow
        return text[len(shown_text) :]
