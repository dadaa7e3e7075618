"""The OpenAPI document, made of the types that bodies and answers are read and written with."""

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright import __version__
from meshwright.serve.http.answers import ChatAnswer, CompletionAnswer
from meshwright.serve.http.errors import ErrorAnswer

_SUMMARIES = {
    "/v1/completions": "Text after prompts",
    "/v1/chat/completions": "The next message of a chat",
    "/tokenize": "Tokens of a text or a chat",
    "/detokenize": "Text of tokens",
    "/v1/models": "The models that are served",
    "/v1/models/{model}": "One model",
    "/health": "Whether requests are taken",
    "/tokenizer_info": "What the tokenizer is",
    "/version": "The server's version",
    "/metrics": "Figures for Prometheus",
    "/openapi.json": "This document",
}
_ERRORS = {
    400: "What was sent cannot be understood or done",
    401: "No API key, or a wrong one",
    404: "There is no such model",
    413: "The body is too large",
    429: "Too many requests; Retry-After says when to try again",
    503: "No requests are taken: the server stops, or its engine failed",
    504: "The request was not done in its time",
}
_GENERATES = {"/v1/completions": CompletionAnswer, "/v1/chat/completions": ChatAnswer}
_OPEN = ("/health", "/version", "/metrics", "/openapi.json")


def openapi(bodies: Mapping[str, type], answers: Mapping[str, type], *, with_key: bool) -> dict[str, Any]:
    """Returns the document for routes that read these bodies and give these answers; ``with_key``: an API key."""
    given = {**answers, **_GENERATES}
    kinds = dict.fromkeys([*bodies.values(), *given.values(), ErrorAnswer])
    refs, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    ref = dict(zip(kinds, refs, strict=True))
    paths: dict[str, Any] = {}
    for path, summary in _SUMMARIES.items():
        body = bodies.get(path)
        codes = [*((400, 413) if body else ()), *((429, 503, 504) if path in _GENERATES else ())]
        codes += [404] if body or "{" in path else []
        codes += [401] if with_key and path not in _OPEN else []
        codes += [503] if path == "/health" else []
        operation: dict[str, Any] = {
            "summary": summary,
            "operationId": path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_"),
            "responses": {"200": {"description": "Done", "content": _content(path, ref.get(given.get(path)))}}  # type: ignore[arg-type]
            | {str(code): _error(code, ref[ErrorAnswer]) for code in sorted(codes)},
        }
        if body is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref[body]}}}
        if "{" in path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        if with_key and path not in _OPEN:
            operation["security"] = [{"bearer": []}]
        paths[path] = {"post" if body is not None else "get": operation}
    components: dict[str, Any] = {"schemas": schemas}
    if with_key:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    info = {"title": "meshwright", "version": __version__, "description": "A model served as OpenAI's interface."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _content(path: str, schema: Any) -> dict[str, Any]:
    if path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": schema or {"type": "object"}}}
    if path in _GENERATES:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content


def _error(code: int, schema: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"description": _ERRORS[code], "content": {"application/json": {"schema": schema}}}
    if code == 429:
        described["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds"}}
    return described
