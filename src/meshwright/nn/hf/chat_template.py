"""The chat templates of a tokenizer's folder, rendered as transformers does it, in Jinja's sandbox."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.core.errors import InputError
from meshwright.core.files import read_text
from meshwright.nn.hf.tokenizer import TOKENIZER_CONFIG, read_table, special_tokens

TEMPLATE, PROCESSOR_TEMPLATE = "chat_template.jinja", "chat_template.json"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of templates by name, next to `TEMPLATE`, whose name is "default"."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; templates read the first or the second."""
REFUSES = "the chat template refuses it: "
BEGIN, END = "\ufdd0", "\ufdd1"
"""Two noncharacters, which no text has, around the text that a template renders in a generation block."""
_UNMARKED = str.maketrans("", "", BEGIN + END)
_OPEN_END = "\ufdd2 "
"""Appended to the final message that is continued; its space shows whether the template strips that message."""


class ChatTemplates(NamedTuple):
    """Templates by name, one of them "default", their sources, and the special tokens that they may write."""

    templates: Mapping[str, Template]
    sources: Mapping[str, str]
    special: Mapping[str, str]

    def render(self, messages: list[dict[str, Any]], tools: Any = None, /, **more: Any) -> str:
        """Returns the text of a chat, in which `BEGIN` and `END` surround the text of generation blocks.

        ``more`` are variables of the template; with ``continue_final_message`` the text ends where the content of the
        last message does. Messages are given to the template as transformers does. If it refuses them, or omits or
        quotes a part of them, the other forms of `_forms` are tried. Raises InputError if the template refuses all
        forms.
        """
        template = self.templates.get("tool_use" if tools is not None else "default", self.templates["default"])
        variables = {**self.special, "documents": None, "add_generation_prompt": False, "tools": tools, **more}
        is_open = bool(variables.pop("continue_final_message", False))
        if is_open and variables["add_generation_prompt"]:
            raise InputError("continue_final_message and add_generation_prompt exclude each other. Give one of them.")
        outcomes = list[str | Exception]()
        for form_messages in _forms([_named(message) for message in messages]):
            try:
                text = template.render({**variables, "messages": _opened(form_messages) if is_open else form_messages})
                outcomes.append(text := _ended(text) if is_open else text)
            except Exception as error:  # a template may raise anything
                outcomes.append(error)
            else:
                if _says_all(text, form_messages):
                    return text
        rendered_texts = [text for text in outcomes if isinstance(text, str)]
        if not rendered_texts:
            raise InputError(f"{REFUSES}{outcomes[0]}.")
        return rendered_texts[0]

    @property
    def turn_end(self) -> str:
        """The text that the default template writes right after an answer, up to the end of the line; "" if it renders
        no answers."""
        with suppress(InputError):
            text = self.render([{"role": "user", "content": "Q"}, {"role": "assistant", "content": _OPEN_END}])
            return text.translate(_UNMARKED).partition(_OPEN_END.strip())[2].strip().partition("\n")[0]
        return ""


def read_chat_templates(folder: Path) -> ChatTemplates | None:
    """Returns a folder's chat templates: of `TEMPLATE` and `MORE_TEMPLATES`, else of the tokenizer's configuration,
    else of `PROCESSOR_TEMPLATE`; None without a default one.

    Raises InputError for a template that is not valid.
    """
    template: Any = read_table(folder / TOKENIZER_CONFIG, remedy="remove it").get("chat_template")
    template = template or read_table(folder / PROCESSOR_TEMPLATE, remedy="remove it").get("chat_template")
    template_entries = template if isinstance(template, list) else [{"name": "default", "template": template}]
    name_sources = ((item.get("name"), item.get("template")) for item in template_entries if isinstance(item, dict))
    source_by_name = {str(name): source for name, source in name_sources if isinstance(source, str)}
    file_by_name = {file.stem: file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    file_by_name |= {"default": folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    if file_by_name:
        default_source = {name: source for name, source in source_by_name.items() if name == "default"}
        source_by_name = default_source | {name: read_text(file, "Mend it.") for name, file in file_by_name.items()}
    if "default" not in source_by_name:
        return None
    try:
        template_by_name = {name: _compiled(source) for name, source in source_by_name.items()}
    except TemplateError as error:
        raise InputError(f"the chat template of {folder} is not valid: {error}. Mend it.") from None
    return ChatTemplates(template_by_name, source_by_name, special_tokens(folder))


# -- messages as templates read them ------------------------------------------------------------------

Message = dict[str, Any]


def _named(message: Message) -> Message:
    """Returns a message without null fields, with its reasoning under both keys that templates read."""
    set_fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((set_fields[name] for name in REASONING if name in set_fields), None)
    return set_fields if reasoning is None else {"thinking": reasoning, **set_fields, "reasoning_content": reasoning}


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Yields the messages unchanged, then in the other forms in which templates read messages.

    Some templates read text where OpenAI's format has a list of parts, some an object as the arguments of a call and
    some JSON, some a null content with calls, and some an empty content where there is none.
    """
    tried_forms = list[list[Message]]()
    for changes in product(*((None, change) for change in (_with_null, _with_text, _with_other_arguments))):
        form = messages
        for change in filter(None, changes):
            form = [change(message) for message in form]
        if form not in tried_forms:
            tried_forms.append(form)
            yield form


def _calls(message: Message) -> list[Message]:
    """Returns the functions that a message calls; [] if one of its calls is not a function call."""
    calls = message.get("tool_calls")
    call_list = calls if isinstance(calls, list) else []
    functions: list[Any] = [call.get("function") for call in call_list if isinstance(call, dict)]
    return functions if len(functions) == len(call_list) and all(isinstance(x, dict) for x in functions) else []


def _parts(message: Message) -> list[str] | None:
    """Returns the texts of a message whose content is a list of text parts only; None for other content."""
    content = message.get("content")
    content_parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in content_parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return texts if isinstance(content, list) and len(texts) == len(content_parts) else None


def _with_null(message: Message) -> Message:
    return {**message, "content": None} if _calls(message) and "content" not in message else message


def _with_text(message: Message) -> Message:
    texts = _parts(message)
    if texts is None:
        return {"content": "", **message}
    return {**message, "content": "\n".join(texts)}


def _with_other_arguments(message: Message) -> Message:
    functions = _calls(message)
    if not functions:
        return message
    rewritten = [{**function, "arguments": _other_form(function.get("arguments"))} for function in functions]
    calls = [{**call, "function": function} for call, function in zip(message["tool_calls"], rewritten, strict=True)]
    return {**message, "tool_calls": calls}


def _other_form(arguments: object) -> object:
    """Returns JSON arguments as an object, and an object as JSON; other arguments unchanged."""
    with suppress(TypeError, ValueError, RecursionError):
        if not isinstance(arguments, str):
            return json.dumps(arguments, ensure_ascii=False)
        return parsed if isinstance(parsed := json.loads(arguments), dict) else arguments
    return arguments


def _says_all(text: str, messages: list[Message]) -> bool:
    """True if a rendered text contains all text parts and names of calls, and no arguments as a quoted string."""
    for message in messages:
        part_texts, calls = _parts(message), _calls(message)
        if part_texts and (str(message["content"]) in text or not all(part.strip() in text for part in part_texts)):
            return False
        if not all(str(call.get("name")) in text for call in calls):
            return False
        texts = [arguments for call in calls if isinstance(arguments := call.get("arguments"), str)]
        if any(json.dumps(arguments, ensure_ascii=escaped) in text for arguments in texts for escaped in (True, False)):
            return False
    return True


def _opened(messages: list[Message]) -> list[Message]:
    """Returns messages with `_OPEN_END` after the last one's content. Raises InputError if that has no text."""
    content: Any = messages[-1].get("content")
    if _parts(messages[-1]):
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _OPEN_END}]
    elif isinstance(content, str):
        content += _OPEN_END
    else:
        raise InputError("continue_final_message needs a last message that has text. Give it text")
    return [*messages[:-1], {**messages[-1], "content": content}]


def _ended(text: str) -> str:
    """Returns the text before `_OPEN_END`, without spaces at its end if the template strips them."""
    text_before, end_mark, text_after = text.rpartition(_OPEN_END.strip())
    if not end_mark:
        raise InputError("it does not write the last message, which is to be continued")
    return text_before if text_after.startswith(" ") else text_before.rstrip()


class _Generation(Extension):
    """Jinja's extension for ``{% generation %} ... {% endgeneration %}``, which puts text between `BEGIN` and `END`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line_number)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # Jinja's own filter escapes HTML.
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)
