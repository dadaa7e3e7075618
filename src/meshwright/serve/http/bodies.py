"""The bodies of requests and their decoding. A null field counts as not given; an unknown field is an error."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, inspect
from starlette.requests import Request

from meshwright.core.errors import nearest
from meshwright.core.files import DAMAGED_JSON
from meshwright.serve.http.errors import RequestError
from meshwright.serve.request import MOST_LOGPROBS

if TYPE_CHECKING:
    Json = Mapping[str, "Json"] | Sequence["Json"] | str | float | bool | None
else:
    Json = Any  # msgspec has no recursive types
JsonObject = dict[str, Json]
Tokens = list[Annotated[int, Meta(ge=0, lt=2**31)]]
_Positive32 = Annotated[int, Meta(ge=0, lt=2**31)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_ONE_FIELD = Meta(extra_json_schema={"minProperties": 1, "maxProperties": 1})
_StopString = Annotated[str, Meta(min_length=1, max_length=1_000)]
_MOST_NAMED = 8


class Harmless(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that clients send and this server ignores, with any value."""

    user: Json = None
    store: Json = None
    metadata: Json = None
    service_tier: Json = None
    safety_identifier: Json = None
    prompt_cache_key: Json = None
    prompt_cache_retention: Json = None
    prompt_cache_options: Json = None
    parallel_tool_calls: Json = None
    prediction: Json = None
    # Reasoning is not separated from texts, and each server computes its own prompts, so these change nothing.
    separate_reasoning: Json = None
    stream_reasoning: Json = None
    include_reasoning: Json = None
    kv_transfer_params: Json = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether a stream ends with an event of token counts, and whether every event has token counts."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A JSON schema that the answer must match."""

    schema: JsonObject | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form of an answer in OpenAI's API; ``json_schema`` is given only with the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of an answer in vLLM's API; exactly one field is given. ``grammar`` is in Lark's syntax."""

    json: JsonObject | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1_024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(Harmless, kw_only=True, forbid_unknown_fields=True):
    """The common fields of completions and chats: OpenAI's first, then fields added by vLLM and SGLang."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=64)] | None = None
    max_tokens: _Positive32 | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1_024)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    min_tokens: _Positive32 | None = None
    stop_token_ids: Tokens | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[StructuredOutputs, _ONE_FIELD] | None = None
    prompt_logprobs: None = None
    no_stop_trim: bool | None = None
    return_hidden_states: Annotated[bool, Meta(extra_json_schema={"const": False})] | None = None


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/completions``."""

    prompt: str | list[str | int | Tokens] | None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    suffix: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only text parts are supported."""

    type: Annotated[str, Meta(extra_json_schema={"const": "text"})]
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message of a chat; the chat template decides which fields it uses."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: None = None
    annotations: Json = None
    audio: None = None
    function_call: None = None


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/chat/completions``; the last seven fields are accepted only with values that change nothing."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    max_completion_tokens: _Positive32 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    functions: Annotated[list[Json], Meta(extra_json_schema={"maxItems": 0})] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Annotated[str, Meta(pattern="^text$")]] | None = None
    verbosity: Literal["medium"] | None = None
    audio: None = None
    moderation: None = None
    web_search_options: None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/tokenize``: a ``prompt``, or the ``messages`` of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: Tokens


Body = CompletionBody | ChatBody | TokenizeBody | DetokenizeBody
_Body = TypeVar("_Body", bound=Body)


MOST_BODY_BYTES = 2**24


async def read_body(request: Request, decoder: msgspec.json.Decoder[_Body]) -> _Body:
    """Reads and decodes a JSON body. Raises RequestError, with the name of the wrong field, for any fault."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(f"Content-Type is {content_type!r}. Send JSON, with Content-Type: application/json.")
    too_large_error = RequestError(f"the body has more than {MOST_BODY_BYTES:,} bytes. Send a smaller one.", 413)
    content_length = request.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length[:20]) > MOST_BODY_BYTES:
        raise too_large_error
    raw_body = bytearray()
    async for chunk in request.stream():
        raw_body += chunk
        if len(raw_body) > MOST_BODY_BYTES:  # a body in chunks has no Content-Length
            raise too_large_error
    try:
        return decoder.decode(raw_body)
    except msgspec.ValidationError as error:
        raise _misfit(str(error), decoder.type, raw_body) from None
    except DAMAGED_JSON as error:
        raise RequestError(f"the body is not JSON in UTF-8: {error}. Send a JSON object.") from None


def _misfit(error_text: str, body_type: type[msgspec.Struct], raw_body: bytearray) -> RequestError:
    """Returns the error for a message of msgspec about a body, such as "Expected `int`, got `str` - at `$.n`"."""
    fault_text, _, path = error_text.partition(" - at `")
    path = path.removesuffix("`").removeprefix("$").removeprefix(".")
    places = list[tuple[str, Json, inspect.Type | None]]()
    with suppress(*DAMAGED_JSON):  # the body may be damaged JSON after the fault
        places = list(_places(msgspec.json.decode(raw_body), inspect.type_info(body_type)))
    if fault_text.startswith("Object contains unknown field"):
        # msgspec names only the first unknown field, and clients send several
        unknown_paths = [place_path for place_path, _, field_type in places if field_type is None]
        paths = unknown_paths or [f"{path}.{fault_text.split('`')[1]}".removeprefix(".")]
        rest = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
        predicate, advice = (
            ("are not fields", " Leave them out.") if paths[1:] else ("is not a field", " Leave it out.")
        )
        hint = nearest(paths[0], body_type.__struct_fields__) if not paths[1:] else ""
        if hint.endswith("?"):
            advice = f"{hint} If not, leave it out."
        message = f"{', '.join(paths[:_MOST_NAMED])}{rest} {predicate} that this server knows.{advice}"
        return RequestError(message, param=paths[0])
    param = path.partition("[")[0] or None
    if fault_text.startswith("Object missing required field"):
        param = param or fault_text.split("`")[1]
    where_text = path or "the body"
    if fault_text.startswith("Expected `null`"):
        return RequestError(f"{where_text} is not supported by this server. Leave it out.", param=param)
    faulty_places = [place for place in places if place[0] == path]
    if literal_types := [field_type for *_, field_type in faulty_places if isinstance(field_type, inspect.LiteralType)]:
        fault_text += f": give one of {', '.join(map(str, literal_types[0].values))}"
    if faulty_places and isinstance(value := faulty_places[0][1], str | float | int):
        where_text += f" is {msgspec.json.encode(value).decode()[:60]}"
    return RequestError(f"{where_text}: {fault_text[:1].lower()}{fault_text[1:]}.", param=param)


def _places(value: Json, kind: inspect.Type | None, path: str = "") -> Iterator[tuple[str, Json, inspect.Type | None]]:
    """Yields (path, value, type) of each value in a decoded body, once per alternative of a union; the type is None
    for an unknown field."""
    yield path, value, kind
    if isinstance(kind, inspect.Metadata):
        yield from _places(value, kind.type, path)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _places(value, member, path)
    elif isinstance(kind, inspect.ListType) and isinstance(value, list):
        for item_index, item in enumerate(value):
            yield from _places(item, kind.item_type, f"{path}[{item_index}]")
    elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
        type_of_field = {field.encode_name: field.type for field in kind.fields}
        for name, item in value.items():
            if name in type_of_field or kind.forbid_unknown_fields:
                yield from _places(item, type_of_field.get(name), f"{path}.{name}".removeprefix("."))
