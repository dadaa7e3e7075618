"""Tokenises chats, and prompts with completions, and marks the tokens that count in the loss.

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
from meshwright.nn.hf.chat_template import BEGIN, END, REASONING, REFUSES, TEMPLATE, ChatTemplates, read_chat_templates
from meshwright.nn.hf.gguf import as_folder
from meshwright.nn.hf.tokenizer import TOKENIZER_CONFIG
from meshwright.train.data.text import SKIP, TextPiece
from meshwright.train.data.tokenizer import TextTokenizer
from meshwright.train.settings import LossOn


class ChatTokenizer(NamedTuple):
    """A tokenizer with the chat templates of its ``folder``, if it has any; ``loss_on`` says which tokens of a record
    count in the loss."""

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
        ids_by_piece: list[list[int] | None] = []
        for piece in pieces:
            try:
                ids_by_piece.append(self._tokens(msgspec.json.decode(piece.text), piece.text, piece.where))
            except InputError as error:
                if not skip_bad:
                    raise InputError(f"{str(error).removesuffix('.')}; {SKIP}.") from None
                ids_by_piece.append(None)
        return ids_by_piece

    def _tokens(self, record: dict[str, Any], raw: str, where: str) -> list[int]:
        if BEGIN in raw or END in raw:
            raise InputError(f"{where} has the code {BEGIN!a} or {END!a}, which is not a character. Take it out.")
        prompt, completion, prompt_ids = record.get("prompt"), record.get("completion"), list[int]()
        messages = list[dict[str, Any]]()
        if prompt is None:
            messages = _messages(record.get("messages"), where)
            token_ids, is_counted = self._rendered(record, messages, where)
        elif isinstance(prompt, str) and isinstance(completion, str) and self.loss_on != "assistant":
            end_text = self.tokenizer.id_to_token(self.end_id) or ""
            text = prompt + completion.removesuffix(end_text) + end_text
            prompt_ids, token_ids = self.tokenizer.encode(prompt).ids, self.tokenizer.encode(text).ids
            is_counted = np.ones(len(token_ids), bool)
        else:
            prompt_messages = _messages(prompt, where)
            prompt_ids, _ = self._rendered(record, prompt_messages, where, add_generation_prompt=True)
            messages = prompt_messages + _messages(completion, where)
            token_ids, is_counted = self._rendered(record, messages, where)
        if prompt is not None and self.loss_on != "all":
            # Tokens may merge where the completion begins: it counts from the first token that differs.
            is_same = [left == right for left, right in zip(prompt_ids, token_ids, strict=False)]
            is_counted[: (*is_same, False).index(False)] = False
        if self.loss_on == "assistant" and not is_counted.any():
            roles = dict.fromkeys(str(message.get("role")) for message in messages)
            raise InputError(
                f"{where} has no message of the assistant, but of {', '.join(roles)}. Mend or leave out the record, or "
                "leave out train.loss_on=assistant."
            )
        return [token_id if counts else ~token_id for token_id, counts in zip(token_ids, is_counted, strict=True)]

    def _rendered(
        self, record: Mapping[str, Any], messages: list[dict[str, Any]], where: str, **render_flags: bool
    ) -> tuple[list[int], np.ndarray]:
        """Returns the tokens of messages, and for each whether it counts in the loss: the assistant's do, or all."""
        if self.chats is None:
            raise InputError(
                f"{where} is a chat, and {self.folder} has no chat template: neither {TEMPLATE} nor one in "
                f"{TOKENIZER_CONFIG}. Add it."
            )
        tools, record_options = record.get("tools"), record.get("chat_template_kwargs") or {}
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
            text = self.chats.render(messages, tools, **{**render_flags, **record_options})
        except Exception as error:  # from the tools' JSON, the template, or names of arguments
            reason = str(error).removesuffix(".").removeprefix(REFUSES)
            raise InputError(f"{where}: {REFUSES}{reason}. Mend the record.") from None
        text_parts = re.split(f"[{BEGIN}{END}]", text)
        encoding = self.tokenizer.encode("".join(text_parts), add_special_tokens=False)
        is_counted = np.full(len(encoding.ids), self.loss_on != "assistant")
        char_ends = np.cumsum([len(part) for part in text_parts])
        for begin_char, end_char in zip(char_ends[0::2], char_ends[1::2], strict=False):
            first_token, last_token = (encoding.char_to_token(int(char)) for char in (begin_char, end_char - 1))
            if begin_char < end_char and first_token is not None:
                is_counted[first_token : None if last_token is None else last_token + 1] = True
        return encoding.ids, is_counted


def _messages(chat: Any, where: str) -> list[dict[str, Any]]:
    """Returns ``chat`` if it is a list of messages with content, else raises InputError."""
    if not (isinstance(chat, list) and chat and all(isinstance(entry, dict) and "role" in entry for entry in chat)):
        raise InputError(
            f"{where} is no chat. Give messages=[{{role, content}}, ...], or prompt and completion, both texts or both "
            "such lists (lists for train.loss_on=assistant)."
        )
    for message_number, message in enumerate(chat, 1):
        if not _says_something(message):
            raise InputError(
                f"{where}: message {message_number}, of role {message.get('role')!r}, has no content that is a text. "
                "Mend the record."
            )
    return chat


def _says_something(message: Mapping[str, Any]) -> bool:
    """True if a message has a text, a list of parts or tool calls; a tool's answer may also be an object."""
    content = message.get("content")
    if content is None:
        return any(message.get(name) for name in ("tool_calls", *REASONING))
    is_answer = message.get("role") not in ("system", "user", "assistant")
    return isinstance(content, str | list) or (is_answer and isinstance(content, dict))


def open_chat_tokenizer(path: Path, given: TextTokenizer, *, loss_on: LossOn) -> ChatTokenizer:
    """Returns the tokenizer with the chat templates of its folder; plain prompts and completions need no template.

    Raises InputError, with ``loss_on`` "assistant", for a template without `generation` blocks.
    """
    source_path = as_folder(path.expanduser())
    folder = source_path if source_path.is_dir() else source_path.parent
    templates = read_chat_templates(folder)
    if (
        templates
        and loss_on == "assistant"
        and not re.search(r"\{%-?\s*generation\s*-?%\}", templates.sources["default"])
    ):
        raise InputError(
            f"the chat template of {folder} does not mark what the assistant says, as train.loss_on=assistant needs. "
            "Put {% generation %} and {% endgeneration %} around that, or leave the setting out."
        )
    identity_text = json.dumps(
        [given.identity, *((templates.sources, templates.special) if templates else ()), loss_on]
    )
    digest = hashlib.sha256(identity_text.encode()).hexdigest()
    return ChatTokenizer(given.tokenizer, given.end_id, templates, loss_on, folder, digest)
