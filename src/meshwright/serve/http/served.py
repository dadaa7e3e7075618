"""A served model: its name, tokenizer and chat template, and the conversion of prompts to tokens."""

import json
import math
import re
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec
from llguidance import LLMatcher
from tokenizers.models import BPE

from meshwright.core.errors import InputError
from meshwright.nn.hf.adapter import base_folder, is_adapter
from meshwright.nn.hf.chat_template import BEGIN, END, ChatTemplates, read_chat_templates
from meshwright.serve.drawing.grammar import GrammarKind, GrammarReader
from meshwright.serve.http.bodies import ChatMessage, Json, JsonObject
from meshwright.serve.http.errors import RequestError
from meshwright.serve.model_folder import ModelFolder, Text

_UNMARKED = str.maketrans("", "", BEGIN + END)


class ServedModel(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A model or adapter under the ``name`` that clients use. ``parent`` is the name of an adapter's base (None for a
    base); ``adapters`` are the names of a base's adapters; ``created`` is a Unix time in s; ``pieces`` caches the
    results of `piece`."""

    name: str
    parent: str | None = None
    adapters: tuple[str, ...] = ()
    text: Text
    vocab_size: int
    end_tokens: frozenset[int] = frozenset()
    chat: ChatTemplates | None = None
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    pieces: dict[int, tuple[str, bytes]] = {}

    def each(self) -> dict[str, "ServedModel"]:
        """Returns name -> served model, for this model and its adapters."""
        adapter_models = (msgspec.structs.replace(self, name=name, parent=self.name) for name in self.adapters)
        return {self.name: self} | {adapter.name: adapter for adapter in adapter_models}

    @property
    def adapter(self) -> str:
        """The name of the adapter in the engine, "" for the base."""
        return self.name if self.parent else ""

    @property
    def whole(self) -> Text:
        """`text`, but decoding special tokens too."""
        return self.text._replace(skips_special=False)

    def text_of(self, skips_special: bool | None) -> Text:
        """Returns `whole` if ``skips_special`` is False, else `text`."""
        return self.whole if skips_special is False else self.text

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Returns the tokens of a text; ``special`` adds the tokenizer's start and end tokens."""
        if self.text.tokenizer is not None:
            # the batch call releases the interpreter for other threads
            (encoding,) = self.text.tokenizer.encode_batch_fast([text], add_special_tokens=special)
            return list(encoding.ids)
        return self.text.encode(text)

    @cached_property
    def longest_piece(self) -> float:
        """The maximum characters of a token; infinite if a token can stand for any text."""
        tokenizer = self.text.tokenizer
        if tokenizer is None:
            return math.inf
        model = tokenizer.model
        is_bounded = isinstance(model, BPE) and (model.byte_fallback or not model.fuse_unk)
        return max(map(len, tokenizer.get_vocab())) if is_bounded else math.inf

    def render(self, messages: Sequence[ChatMessage], tools: list[JsonObject] | None, variables: JsonObject) -> str:
        """Returns the prompt text of a chat. Raises RequestError if there is no chat template or rendering fails."""
        if self.chat is None:
            raise RequestError(f"{self.name} has no chat template. Use /v1/completions.", param="messages")
        plain_messages = [_texts_alone(message, message_index) for message_index, message in enumerate(messages)]
        try:
            return self.chat.render(plain_messages, tools, **variables).translate(_UNMARKED)
        except InputError as error:
            raise RequestError(str(error), param="messages") from None

    def grammar(self, kind: GrammarKind, given: Json) -> LLMatcher:
        """Returns the matcher of a grammar (text, or JSON). Raises InputError if invalid, or without a tokenizer."""
        return self._grammars.read(kind, given if isinstance(given, str) else json.dumps(given))

    @cached_property
    def _grammars(self) -> GrammarReader:
        if self.text.tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer, so its texts cannot follow a grammar. Ask for any text.")
        return GrammarReader(self.text.tokenizer, self.vocab_size, self.end_tokens)

    @cached_property
    def special(self) -> dict[int, str]:
        """Special token -> its text; `text` leaves these tokens out, `whole` decodes them."""
        if self.text.tokenizer is None:
            return {}
        added_tokens = self.text.tokenizer.get_added_tokens_decoder()
        return {token: added_token.content for token, added_token in added_tokens.items() if added_token.special}

    def piece(self, token: int, *, first: bool = False) -> tuple[str, bytes]:
        """Returns the text that a token adds, and its bytes, which are right for part of a character too. ``first``:
        the token begins a text, where some tokenizers drop the leading space."""
        if first:
            text = self.whole.decode([token])
            return text, self._bytes(token, text)
        text_and_bytes = self.pieces.get(token)
        if text_and_bytes is None:
            before_tokens, before_text = self._before  # alone, a SentencePiece token loses its leading space
            text = self.whole.decode([*before_tokens, token])
            text = text[len(before_text) :] if text.startswith(before_text) else self.whole.decode([token])
            text_and_bytes = self.pieces[token] = (text, self._bytes(token, text))
        return text_and_bytes

    @cached_property
    def _before(self) -> tuple[list[int], str]:
        """The tokens of some text, and the text that they decode to."""
        tokens = self.encode("0", special=False)
        return tokens, self.whole.decode(tokens)

    def _bytes(self, token: int, text: str) -> bytes:
        token_name = (self.text.tokenizer.id_to_token(token) or "") if self.text.tokenizer else ""
        if "\ufffd" in text and re.fullmatch("<0x[0-9A-F]{2}>", token_name):
            return bytes.fromhex(token_name[3:5])
        if "\ufffd" in text and token_name and all(letter in _BYTE_OF for letter in token_name):
            return bytes(_BYTE_OF[letter] for letter in token_name)
        return text.encode(errors="replace")


def served_model(found: ModelFolder, name: str | None = None) -> ServedModel:
    """Returns the served model of an opened folder under ``name`` (None: the folder's name).

    Raises InputError if the chat template is not valid or an adapter has the same name.
    """
    folder: Path = found.folder
    chat_templates = read_chat_templates(folder)
    if chat_templates is None and is_adapter(folder):
        chat_templates = read_chat_templates(base_folder(folder))
    name, adapter_names = name or found.model.name, tuple(found.adapters)
    if name in adapter_names:
        raise InputError(f"the base and an adapter are both called {name!r}. Give one of them another name.")
    return ServedModel(
        name=name,
        adapters=adapter_names,
        text=found.text,
        vocab_size=found.model.vocab_size,
        end_tokens=found.end_tokens,
        chat=chat_templates,
    )


def _texts_alone(message: ChatMessage, message_index: int) -> JsonObject:
    """Returns the fields of a message for a chat template. Raises RequestError for a part that is not text."""
    content_parts = message.content if isinstance(message.content, list) else []
    if any(part.type != "text" or part.text is None for part in content_parts):
        field_path = f"messages[{message_index}].content"
        raise RequestError(f"{field_path} has a part that is not text. This server takes only text.", param="messages")
    fields: JsonObject = msgspec.to_builtins(message)
    return fields


def _bytes_by_letter() -> dict[str, int]:
    """Returns letter -> byte for the alphabet in which GPT-2's byte-level tokens are written."""
    plain_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other_bytes = [byte for byte in range(256) if byte not in plain_bytes]
    return {chr(byte): byte for byte in plain_bytes} | {chr(256 + i): byte for i, byte in enumerate(other_bytes)}


_BYTE_OF = _bytes_by_letter()
