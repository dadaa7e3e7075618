"""Turns the body of an HTTP request into requests for the engine."""

import asyncio
import secrets
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher

from meshwright.core.errors import InputError
from meshwright.core.units import counted
from meshwright.nn.hf.features import read_features
from meshwright.serve.drawing.grammar import GrammarKind
from meshwright.serve.drawing.sampling import Sampling
from meshwright.serve.frontend import Frontend
from meshwright.serve.http import bodies
from meshwright.serve.http.errors import RequestError
from meshwright.serve.http.served import ServedModel
from meshwright.serve.request import Prompt, RequestBounds, SourceFeatures, TokenRequest

COMPLETION_TOKENS = 16
"""Default ``max_tokens`` of a completion, as in OpenAI's API; the default of a chat is the model's limit."""
_LONG_TEXT, _MANY_MESSAGES = 4_096, 64
"""A text of at least so many characters is encoded, and a chat of so many messages rendered, in another thread, so that
other requests are not delayed."""


class AskedText(msgspec.Struct, kw_only=True):
    """The engine requests of a body: ``n`` consecutive requests for each prompt. ``echoes`` are the texts of the
    prompts, if the answer repeats them; ``is_from_source`` is True if an encoder reads the prompts."""

    body: bodies.GenerationBody
    served: ServedModel
    requests: list[TokenRequest]
    echoes: list[str] | None = None
    is_from_source: bool = False

    @property
    def n(self) -> int:
        return self.body.n or 1


async def asked_of_completion(body: bodies.CompletionBody, served: ServedModel, frontend: Frontend) -> AskedText:
    """Returns the requests of a completion body. Raises RequestError or InputError if they cannot be answered."""
    if body.suffix:
        raise RequestError("suffix is not supported: text is only generated after a prompt.", param="suffix")
    if body.best_of not in (None, body.n or 1):
        raise RequestError("best_of may only equal n. Leave it out.", param="best_of")
    special = body.add_special_tokens is not False
    inputs = _prompts("" if body.prompt is None else body.prompt)
    _require_room(len(inputs) * (body.n or 1), frontend)
    if body.echo and frontend.bounds.source_len:
        raise RequestError("an encoder reads the prompt, which is no part of the answer. Leave echo out.", param="echo")
    prompts: list[Prompt]
    if frontend.bounds.features:
        prompts = [_features(item) for item in inputs]
    else:
        for item in inputs:  # check all before encoding any, which takes longer
            if isinstance(item, str):
                _require_length(item, "prompt", served, frontend)
        prompts = [await encoded(served, item, special) if isinstance(item, str) else item for item in inputs]
    asked_text = _asked(body, served, frontend, prompts, body.logprobs, await _grammar(body, served))
    if body.echo:
        decode = served.text_of(body.skip_special_tokens).decode
        asked_text.echoes = [item if isinstance(item, str) else decode(item) for item in inputs]
    return asked_text


async def asked_of_chat(body: bodies.ChatBody, served: ServedModel, frontend: Frontend) -> AskedText:
    """Returns the requests of a chat body. Raises RequestError or InputError if they cannot be answered."""
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs. Set logprobs to true.", param="top_logprobs")
    if body.functions:
        raise RequestError("functions are not supported. Send tools, which replace them.", param="functions")
    _require_room(body.n or 1, frontend)
    effort_variables = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    text = await chat_text(served, body.messages, body.tools, effort_variables | template_variables(body))
    _require_length(text, "messages", served, frontend)
    prompt = await encoded(served, text, bool(body.add_special_tokens))
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _asked(body, served, frontend, [prompt], num_logprobs, await _grammar(body, served))


async def _grammar(body: bodies.GenerationBody, served: ServedModel) -> LLMatcher | None:
    """Returns the grammar of the answer, None for any text. Raises RequestError for a grammar that is not valid."""
    forms = list[tuple[str, GrammarKind, bodies.Json]]()
    if form := body.response_format:
        if (form.type == "json_schema") != (form.json_schema is not None):
            raise RequestError(
                f"response_format has the type {form.type} and {'a' if form.json_schema else 'no'} json_schema. Give a "
                "schema with the type json_schema.",
                param="response_format",
            )
        if form.json_schema:
            forms.append(("response_format", "json_schema", form.json_schema.schema))
        elif form.type == "json_object":
            forms.append(("response_format", "json_schema", {"type": "object"}))
    if (constraints := body.structured_outputs) is not None:
        any_object_schema = {"type": "object"} if constraints.json_object else None
        form_by_kind: dict[GrammarKind, bodies.Json] = {
            "regex": constraints.regex,
            "choice": constraints.choice,
            "lark": constraints.grammar,
        }
        form_by_kind["json_schema"] = any_object_schema if constraints.json is None else constraints.json
        given_forms = [("structured_outputs", kind, value) for kind, value in form_by_kind.items() if value is not None]
        if not given_forms:
            raise RequestError(
                "structured_outputs is empty. Give json, regex, choice or grammar.", param="structured_outputs"
            )
        forms += given_forms
    if not forms:
        return None
    if len(forms) > 1:
        raise RequestError("the form of the answer is given more than once. Give one.", param=forms[-1][0])
    ((param, kind, value),) = forms
    try:
        return await asyncio.to_thread(served.grammar, kind, value)
    except InputError as error:
        raise RequestError(str(error), param=param) from None


async def chat_text(
    served: ServedModel,
    messages: list[bodies.ChatMessage],
    tools: list[bodies.JsonObject] | None,
    variables: bodies.JsonObject,
) -> str:
    """Returns the prompt text of a chat. Raises RequestError if the template fails or the text is not UTF-8."""
    render_args = messages, tools, variables
    is_short = len(messages) < _MANY_MESSAGES
    text = served.render(*render_args) if is_short else await asyncio.to_thread(served.render, *render_args)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError("the text of the chat is not UTF-8. Correct the messages.", param="messages") from None
    return text


def template_variables(body: bodies.ChatBody | bodies.TokenizeBody) -> bodies.JsonObject:
    """Returns the chat template variables of a body. Raises RequestError if they contain messages or tools."""
    variables = dict(body.chat_template_kwargs or {})
    clashes = sorted({"messages", "tools"} & variables.keys())
    if clashes:
        raise RequestError(f"chat_template_kwargs has {clashes[0]}. Give it outside.", param="chat_template_kwargs")
    is_continued, adds_prompt = bool(body.continue_final_message), body.add_generation_prompt
    adds_prompt = not is_continued if adds_prompt is None else adds_prompt
    return {"add_generation_prompt": adds_prompt} | variables | {"continue_final_message": is_continued}


async def encoded(served: ServedModel, text: str, special: bool) -> list[int]:
    """Returns the tokens of a text, encoded in another thread if it is long; ``special`` adds special tokens."""
    if len(text) < _LONG_TEXT:
        return served.encode(text, special=special)
    return await asyncio.to_thread(served.encode, text, special=special)


def _require_length(text: str, param: str, served: ServedModel, frontend: Frontend) -> None:
    """Raises RequestError for a text with more characters than all positions could hold."""
    num_positions = frontend.bounds.source_len or frontend.max_len
    limit = num_positions * served.longest_piece
    if len(text) > limit:
        raise RequestError(
            f"{param} has {len(text):,} characters; {num_positions:,} positions hold {limit:,} at most. Shorten it.",
            param=param,
            code="context_length_exceeded",
        )


def require_tokens(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises RequestError for a token outside the vocabulary."""
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        wrong_token = min(tokens) if min(tokens) < 0 else max(tokens)
        raise RequestError(f"{param} has token {wrong_token}; the model has tokens 0 to {vocab_size - 1}.", param=param)


def sampling_of(body: bodies.GenerationBody, vocab_size: int, *, seed: int, number: int) -> Sampling:
    """Returns the sampling settings of a body. Raises RequestError or InputError for a setting out of range."""
    logit_bias = list[tuple[int, float]]()
    for digits, bias in (body.logit_bias or {}).items():
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 11 and int(digits) < vocab_size):
            raise RequestError(f"logit_bias has {digits!r}, which is not a token of the model.", param="logit_bias")
        logit_bias.append((int(digits), bias))
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=seed,
        number=number,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=tuple(logit_bias),
    )


def _require_room(num_seqs: int, frontend: Frontend) -> None:
    """Raises RequestError for more sequences than the server ever accepts."""
    if num_seqs > frontend.max_queued:
        limit_text = f"this server takes {frontend.max_queued:,} sequences at once"
        raise RequestError(f"{num_seqs:,} sequences are requested; {limit_text}. Ask for fewer.", param="n")


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Returns the list of prompts of a body: a text, texts, tokens, or lists of tokens; else raises RequestError."""
    if isinstance(prompt, str):
        return [prompt]
    item_types = {type(item) for item in prompt}
    if item_types == {int}:
        return [prompt]
    if len(item_types) != 1:
        fault = "mixes texts and tokens" if item_types else "is an empty list"
        raise RequestError(f"prompt {fault}. Give a text, texts, tokens, or lists of tokens.", param="prompt")
    return prompt


def _features(prompt: str | list[int]) -> SourceFeatures:
    """Decodes features from a NumPy file in base64. Raises RequestError for anything else."""
    try:
        if not isinstance(prompt, str):
            raise ValueError("tokens")
        return SourceFeatures(read_features(b64decode(prompt, validate=True), "prompt"))
    except InputError as error:
        raise RequestError(str(error), param="prompt") from None
    except ValueError:
        fault = "the encoder reads features, and prompt is not base64"
        raise RequestError(f"{fault}. Send a NumPy file of log-mel features in base64.", param="prompt") from None


def _asked(
    body: bodies.GenerationBody,
    served: ServedModel,
    frontend: Frontend,
    prompts: Sequence[Prompt],
    num_logprobs: int | None,
    grammar: LLMatcher | None,
) -> AskedText:
    n, is_echoed = body.n or 1, isinstance(body, bodies.CompletionBody) and bool(body.echo)
    vocab_size = frontend.vocab_size
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream. Set stream to true.", param="stream_options")
    if body.return_hidden_states:
        raise RequestError("return_hidden_states is not supported. Leave it out.", param="return_hidden_states")
    if body.stop_token_ids:
        require_tokens(body.stop_token_ids, vocab_size, "stop_token_ids")
    stop_tokens = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else served.end_tokens)
    seed = secrets.randbits(32) if body.seed is None else body.seed % 2**32  # clients send 64 signed bits
    requests, scores_prompts = list[TokenRequest](), is_echoed and num_logprobs is not None
    for prompt in prompts:
        if not isinstance(prompt, SourceFeatures):
            require_tokens(prompt, vocab_size, "prompt")
        max_tokens = _max_tokens(body, len(prompt), frontend.bounds)
        requests += (
            TokenRequest.of(
                prompt,
                max_tokens=max_tokens,
                min_tokens=body.min_tokens or 0,
                sampling=sampling_of(body, vocab_size, seed=seed, number=sequence_index),
                # A client that scores a prompt drops the one drawn token, so a stop token is reported too.
                stop_tokens=frozenset() if scores_prompts and max_tokens == 1 else stop_tokens,
                logprobs=num_logprobs,
                adapter=served.adapter,
                echo=scores_prompts or (is_echoed and max_tokens == 0),
                grammar=grammar,
            )
            for sequence_index in range(len(requests), len(requests) + n)  # else sequences of one seed would be equal
        )
    return AskedText(body=body, served=served, requests=requests, is_from_source=frontend.bounds.source_len > 0)


def _max_tokens(body: bodies.GenerationBody, prompt_len: int, bounds: RequestBounds) -> int:
    """Returns the maximum output tokens of a prompt. Raises RequestError if they exceed the free positions."""
    num_tokens, tokens_left = body.max_tokens, bounds.room(prompt_len)
    if isinstance(body, bodies.ChatBody):
        num_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else num_tokens
        num_tokens = max(1, tokens_left) if num_tokens is None else num_tokens
    elif num_tokens is None:
        num_tokens = min(COMPLETION_TOKENS, max(1, tokens_left))  # without free positions it is refused below
    if num_tokens > tokens_left:
        raise RequestError(
            f"the model has {bounds.max_len:,} positions; the prompt has {counted(prompt_len, 'token')} and "
            f"{num_tokens:,} more are requested. Shorten the prompt, or lower max_tokens.",
            param="messages" if isinstance(body, bodies.ChatBody) else "prompt",
            code="context_length_exceeded",
        )
    return num_tokens
