"""Writes the bodies of answers, whole or as server-sent events."""

import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from meshwright.serve.http.growing import GrowingText, ReportedToken
from meshwright.serve.http.served import ServedModel
from meshwright.serve.request import Finish

encode = msgspec.json.Encoder().encode


class CachedTokens(msgspec.Struct):
    """How many prompt tokens were found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Numbers of tokens: of the prompts, each counted once, and generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """The tokens of a text and the likeliest at each position; ``text_offset`` counts characters from its start."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One text of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/completions``; ``created`` is a Unix time."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class LikelyToken(msgspec.Struct, kw_only=True):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatToken(LikelyToken, kw_only=True):
    """A token of a message, with the likeliest tokens at its position."""

    top_logprobs: list[LikelyToken] = []


class ChatLogprobs(msgspec.Struct):
    """The tokens of a message with their log-probabilities."""

    content: list[ChatToken]


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The message of the assistant."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One message of a chat's answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatAnswer(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/chat/completions``; ``created`` is a Unix time."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Writer:
    """Writes one answer, whole or as events; the common part of all events is encoded once."""

    kind, whole, prefix = "", msgspec.Struct, ""
    before_text, after_text, no_text = b"", b"", b""

    def __init__(self, served: ServedModel, request_id: str) -> None:
        self.served, self.name, self.created_s = served, f"{self.prefix}-{request_id}", int(time.time())
        self.usage_null = b""
        head_fields = {"id": self.name, "object": self.kind, "created": self.created_s, "model": served.name}
        self._start = b"data: " + encode(head_fields)[:-1] + b',"choices":['
        self._heads: dict[int, bytes] = {}

    def event(self, choice: GrowingText, usage: Usage | None = None) -> bytes:
        """Returns the event with a choice's unsent text, tokens and finish reason; b"" without text and finish."""
        if not choice.piece and not choice.finish:
            return b""  # nothing yet: an incomplete character, or the start of a stop string
        piece, reported_tokens = choice.take()
        text = self.before_text + encode(piece) + self.after_text if piece else self.no_text
        logprobs = encode(self.logprobs(choice, reported_tokens)) if reported_tokens else b"null"
        finish = b'"%b"' % choice.finish.encode() if choice.finish else b"null"
        tail = self.usage_null if usage is None else b',"usage":' + encode(usage)
        return b'%b%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (self._head(choice), text, logprobs, finish, tail)

    def first(self, choice: GrowingText) -> bytes:
        """Returns the first event of a choice; b"" if this kind of answer has none."""
        return b""

    def last(self, usage: Usage) -> bytes:
        """Returns the last event, which has the numbers of tokens."""
        return self._start + b'],"usage":' + encode(usage) + b"}\n\n"

    def answer(self, choices: Sequence[GrowingText], usage: Usage) -> bytes:
        """Returns the whole answer as JSON."""
        choice_rows = []
        for choice in choices:
            text, reported_tokens = choice.take()
            choice_rows.append(self.row(choice, text, reported_tokens if choice.reports else None))
        head_fields = {"id": self.name, "created": self.created_s, "model": self.served.name}
        return encode(self.whole(**head_fields, choices=choice_rows, usage=usage))

    def row(
        self, choice: GrowingText, text: str, entries: Sequence[ReportedToken] | None
    ) -> CompletionChoice | ChatChoice:
        """Returns a choice of a whole answer; ``entries`` are its reported tokens, None if none were requested."""
        raise NotImplementedError

    def logprobs(self, choice: GrowingText, entries: Sequence[ReportedToken]) -> CompletionLogprobs | ChatLogprobs:
        """Returns the log-probabilities of ``entries`` in the format of this kind of answer."""
        raise NotImplementedError

    def _head(self, choice: GrowingText) -> bytes:
        head = self._heads.get(choice.index)
        if head is None:
            head = self._heads[choice.index] = self._start + b'{"index":%d,' % choice.index
        return head


class CompletionWriter(Writer):
    """Writes the answer of ``/v1/completions``."""

    kind, whole, prefix = "text_completion", CompletionAnswer, "cmpl"
    before_text, after_text, no_text = b'"text":', b"", b'"text":""'

    def logprobs(self, choice: GrowingText, entries: Sequence[ReportedToken]) -> CompletionLogprobs:
        columns = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, report in entries:
            is_first = choice.at_start
            text, raw_bytes = self._token(token, is_first)
            columns.tokens.append(text)
            columns.token_logprobs.append(None if report is None else report.logprob)
            logprob_of_text = dict[str, float]()
            for likely_token, logprob in (*report.top, (token, report.logprob)) if report else ():
                likely_text = self._token(likely_token, is_first)[0]
                # Several tokens may have one text: the sampled token gets it as key, else the likeliest.
                is_taken = likely_token != token and (likely_text == text or likely_text in logprob_of_text)
                logprob_of_text.setdefault(f"token_id:{likely_token}" if is_taken else likely_text, logprob)
            columns.top_logprobs.append(logprob_of_text if report else None)
            columns.text_offset.append(choice.place(token, raw_bytes))
        return columns

    def row(self, choice: GrowingText, text: str, entries: Sequence[ReportedToken] | None) -> CompletionChoice:
        logprobs = None if entries is None else self.logprobs(choice, entries)
        return CompletionChoice(index=choice.index, text=text, logprobs=logprobs, finish_reason=choice.finish)

    def _token(self, token: int, is_first: bool) -> tuple[str, bytes]:
        """Returns a token's text (for part of a character "bytes:" and escapes, as OpenAI has it), and its bytes."""
        text, raw_bytes = self.served.piece(token, first=is_first)
        return text if "\ufffd" not in text else "bytes:" + "".join(rf"\x{byte:02x}" for byte in raw_bytes), raw_bytes


class ChatWriter(Writer):
    """Writes the answer of ``/v1/chat/completions``."""

    kind, whole, prefix = "chat.completion.chunk", ChatAnswer, "chatcmpl"
    before_text, after_text, no_text = b'"delta":{"content":', b"}", b'"delta":{}'

    def first(self, choice: GrowingText) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return b"%b%b%b}\n\n" % (self._head(choice), delta, self.usage_null)

    def logprobs(self, choice: GrowingText, entries: Sequence[ReportedToken]) -> ChatLogprobs:
        chat_tokens = []
        for token, report in entries:
            if report is not None:
                is_first = choice.at_start
                top = []
                for likely_token, logprob in report.top:
                    text, utf8 = self.served.piece(likely_token, first=is_first)
                    top.append(LikelyToken(token=text, logprob=logprob, bytes=list(utf8)))
                text, utf8 = self.served.piece(token, first=is_first)
                chat_tokens.append(ChatToken(token=text, logprob=report.logprob, bytes=list(utf8), top_logprobs=top))
                choice.place(token, utf8)
        return ChatLogprobs(chat_tokens)

    def row(self, choice: GrowingText, text: str, entries: Sequence[ReportedToken] | None) -> ChatChoice:
        message, logprobs = AnswerMessage(content=text), None if entries is None else self.logprobs(choice, entries)
        return ChatChoice(index=choice.index, message=message, logprobs=logprobs, finish_reason=choice.finish)
