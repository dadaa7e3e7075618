"""Chats, and prompts with completions, as tokens of which some count in the loss.

A record is rendered and masked as TRL's SFTTrainer does it: chats by the tokenizer's template, in Jinja's sandbox.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tokenizers import Tokenizer

from meshwright.core.errors import InputError
from meshwright.nn.hf.chat_template import (
    BEGIN,
    END,
    REASONING,
    REFUSES,
    TEMPLATE,
    ChatTemplates,
    read_chat_templates,
)
from meshwright.nn.hf.gguf import as_folder
from meshwright.nn.hf.tokenizer import TOKENIZER_CONFIG
from meshwright.train.data.text import SKIP, TextPiece
from meshwright.train.data.tokenizer import TextTokenizer
from meshwright.train.settings import LossOn


class ChatTokenizer(NamedTuple):
    """A tokenizer with the chat templates of its ``folder``, if it has any; ``loss_on``: which tokens of a record
    count."""

    tokenizer: Tokenizer
    end_id: int
    chats: ChatTemplates | None
    loss_on: LossOn
    folder: Path
    identity: str
    dtype: str = "int32"
    """The dtype of tokens in a store, which has the complement ``~token`` of a token without a loss."""

    def encode(self, pieces: Sequence[TextPiece], *, skip_bad: bool = False) -> list[list[int] | None]:
        """Returns the tokens of each record; a token without a loss is replaced by its complement.

        Raises InputError for a record that is malformed or that the template refuses; with ``skip_bad`` it becomes
        None.
        """
        encoded: list[list[int] | None] = []
        for piece in pieces:
            try:
                encoded.append(self._tokens(msgspec.json.decode(piece.text), piece.text, piece.where))
            except InputError as error:
                if not skip_bad:
                    raise InputError(f"{str(error).removesuffix('.')}; {SKIP}.") from None
                encoded.append(None)
        return encoded

    def _tokens(self, record: dict[str, Any], raw: str, where: str) -> list[int]:
        if BEGIN in raw or END in raw:
            raise InputError(f"{where} has the code {BEGIN!a} or {END!a}, which is not a character. Take it out.")
        prompt, completion, prompt_ids = record.get("prompt"), record.get("completion"), list[int]()
        chat = list[dict[str, Any]]()
        if prompt is None:
            chat = _messages(record.get("messages"), where)
            ids, counted = self._rendered(record, chat, where)
        elif isinstance(prompt, str) and isinstance(completion, str) and self.loss_on != "assistant":
            end = self.tokenizer.id_to_token(self.end_id) or ""
            text = prompt + completion.removesuffix(end) + end
            prompt_ids, ids = self.tokenizer.encode(prompt).ids, self.tokenizer.encode(text).ids
            counted = np.ones(len(ids), bool)
        else:
            prompt_messages = _messages(prompt, where)
            prompt_ids, _ = self._rendered(record, prompt_messages, where, add_generation_prompt=True)
            chat = prompt_messages + _messages(completion, where)
            ids, counted = self._rendered(record, chat, where)
        if prompt is not None and self.loss_on != "all":
            # Tokens may merge where the completion begins: it counts from the first token that differs.
            is_same = [left == right for left, right in zip(prompt_ids, ids, strict=False)]
            counted[: (*is_same, False).index(False)] = False
        if self.loss_on == "assistant" and not counted.any():
            roles = dict.fromkeys(str(message.get("role")) for message in chat)
            raise InputError(
                f"{where} has no message of the assistant, but of {', '.join(roles)}. Mend or leave out the record, or "
                "leave out train.loss_on=assistant."
            )
        tokens = np.array(ids, np.int64)
        return np.where(counted, tokens, ~tokens).tolist()

    def _rendered(
        self, record: Mapping[str, Any], messages: list[dict[str, Any]], where: str, **asked: bool
    ) -> tuple[list[int], np.ndarray]:
        """Returns tokens, and for each whether it counts: those of the assistant do, or all."""
        if self.chats is None:
            raise InputError(
                f"{where} is a chat, and {self.folder} has no chat template: neither {TEMPLATE} nor one in "
                f"{TOKENIZER_CONFIG}. Add it."
            )
        tools, options = record.get("tools"), record.get("chat_template_kwargs") or {}
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
            text = self.chats.render(messages, tools, **{**asked, **options})
        except Exception as error:  # of the tools, or of their names and the template's
            reason = str(error).removesuffix(".").removeprefix(REFUSES)
            raise InputError(f"{where}: {REFUSES}{reason}. Mend the record.") from None
        parts = re.split(f"[{BEGIN}{END}]", text)
        encoding = self.tokenizer.encode("".join(parts), add_special_tokens=False)
        counted = np.full(len(encoding.ids), self.loss_on != "assistant")
        char_ends = np.cumsum([len(part) for part in parts])
        for begin, end in zip(char_ends[0::2], char_ends[1::2], strict=False):
            first_token, last_token = (encoding.char_to_token(int(char)) for char in (begin, end - 1))
            if begin < end and first_token is not None:
                counted[first_token : None if last_token is None else last_token + 1] = True
        return encoding.ids, counted


def _messages(found: Any, where: str) -> list[dict[str, Any]]:
    """Returns the messages of a chat, each of which says something."""
    if not (isinstance(found, list) and found and all(isinstance(entry, dict) and "role" in entry for entry in found)):
        raise InputError(
            f"{where} is no chat. Give messages=[{{role, content}}, ...], or prompt and completion, both texts or both "
            "such lists (lists for train.loss_on=assistant)."
        )
    for number, message in enumerate(found, 1):
        if not _says_something(message):
            raise InputError(
                f"{where}: message {number}, of role {message.get('role')!r}, has no content that is a text. "
                "Mend the record."
            )
    return found


def _says_something(message: Mapping[str, Any]) -> bool:
    """True for a message with a text, a list of parts or calls of tools; what a tool answers may be an object."""
    content = message.get("content")
    if content is None:
        return any(message.get(name) for name in ("tool_calls", *REASONING))
    is_answer = message.get("role") not in ("system", "user", "assistant")
    return isinstance(content, str | list) or (is_answer and isinstance(content, dict))


def open_chat_tokenizer(path: Path, given: TextTokenizer, *, loss_on: LossOn) -> ChatTokenizer:
    """Returns the tokenizer with the chat templates of its folder, which prompts and completions as texts do not need.

    Raises InputError, with ``loss_on`` "assistant", for a template without `generation` blocks.
    """
    place = as_folder(path.expanduser())
    folder = place if place.is_dir() else place.parent
    chats = read_chat_templates(folder)
    if chats and loss_on == "assistant" and not re.search(r"\{%-?\s*generation\s*-?%\}", chats.sources["default"]):
        raise InputError(
            f"the chat template of {folder} does not mark what the assistant says, as train.loss_on=assistant needs. "
            "Put {% generation %} and {% endgeneration %} around that, or leave the setting out."
        )
    identity = json.dumps([given.identity, *((chats.sources, chats.special) if chats else ()), loss_on])
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return ChatTokenizer(given.tokenizer, given.end_id, chats, loss_on, folder, digest)
