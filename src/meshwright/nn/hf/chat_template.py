"""The chat templates of a tokenizer's folder, rendered as transformers does it, in Jinja's sandbox."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.core.errors import InputError
from meshwright.core.files import read_text
from meshwright.nn.hf.tokenizer import TOKENIZER_CONFIG, read_table

TEMPLATE = "chat_template.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first or the second."""
REFUSES = "the chat template refuses it: "
BEGIN, END = "\ufdd0", "\ufdd1"
"""Two codes that no text has, around the text that a template renders in a generation block."""


class ChatTemplates(NamedTuple):
    """Templates by name, one of them "default", their sources, and the special tokens that they may write."""

    templates: Mapping[str, Template]
    sources: Mapping[str, str]
    special: Mapping[str, str]

    def render(self, messages: list[dict[str, Any]], tools: Any = None, /, **more: Any) -> str:
        """Returns the text of a chat, in which `BEGIN` and `END` surround what a generation block marks.

        Raises InputError for what the template refuses. ``more`` are variables of the template.
        """
        template = self.templates.get("tool_use" if tools else "default", self.templates["default"])
        given = {"messages": messages, "documents": None, "add_generation_prompt": False}
        try:
            return template.render({**self.special, **given, "tools": tools, **more})
        except Exception as error:  # a template may raise anything
            raise InputError(f"{REFUSES}{error}.") from None


def read_chat_templates(folder: Path) -> ChatTemplates | None:
    """Returns a folder's chat templates, of `TEMPLATE` or of its configuration; None without one.

    Raises InputError for a template that is not valid.
    """
    config = read_table(folder / TOKENIZER_CONFIG, remedy="remove it")
    given = config.get("chat_template")
    file = folder / TEMPLATE
    if file.is_file():
        given = read_text(file, "Mend it.")
    listed = given if isinstance(given, list) else [{"name": "default", "template": given}]
    pairs = ((one.get("name"), one.get("template")) for one in listed if isinstance(one, dict))
    sources = {str(name): source for name, source in pairs if isinstance(source, str)}
    if "default" not in sources:
        return None
    try:
        templates = {name: _compiled(source) for name, source in sources.items()}
    except TemplateError as error:
        raise InputError(f"the chat template of {folder} is not valid: {error}. Mend it.") from None
    named = {name: config.get(name) for name in SPECIAL}
    special = {
        name: str(one.get("content")) if isinstance(one, dict) else str(one) for name, one in named.items() if one
    }
    return ChatTemplates(templates, sources, special)


def as_templates_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message without null fields, and with its reasoning under the names that templates read."""
    kept = {name: value for name, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in REASONING if name in kept), None)
    if reasoning is not None:
        kept |= {"thinking": kept.get("thinking", reasoning), "reasoning_content": reasoning}
    return kept


class _Generation(Extension):
    """The block ``{% generation %} ... {% endgeneration %}`` around text of the assistant."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # Jinja's own filter escapes HTML.
    environment.filters["tojson"] = lambda found, ensure_ascii=False, **how: json.dumps(
        found, ensure_ascii=ensure_ascii, **how
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)
