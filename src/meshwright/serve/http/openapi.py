"""The OpenAPI document, made of the types that bodies and answers are read and written with."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from meshwright import __version__
from meshwright.serve.http.bodies import Body
from meshwright.serve.http.border import OPEN_PATHS
from meshwright.serve.http.errors import ErrorAnswer

Schema = dict[str, Any]
"""A part of the document, in JSON."""

_ERRORS = {
    400: "What was sent cannot be understood or done",
    401: "No API key, or a wrong one",
    404: "There is no such model",
    413: "The body is too large",
    429: "Too many requests; Retry-After says when to try again",
    503: "No requests are taken: the server stops, or its engine failed",
    504: "The request was not done in its time",
}


class Operation(NamedTuple):
    """A route: its path, its name, what it is for, and the types of its body and its answer. It is a POST if it has a
    body, and without a type of answer it gives text."""

    path: str
    name: str
    summary: str
    body: type[Body] | None
    answer: type | None

    @property
    def method(self) -> str:
        return "get" if self.body is None else "post"

    @property
    def generates(self) -> bool:
        """Whether the engine runs for it; then it may also answer with a stream of events."""
        return self.path.endswith("completions")

    def errors(self, *, with_key: bool) -> list[int]:
        """Returns the statuses of the errors that it may answer with."""
        statuses = [400, 404, 413] if self.body else [404] * ("{" in self.path)
        statuses += [429, 503, 504] if self.generates else [503] * (self.name == "health")
        return sorted(statuses + [401] * (with_key and self.path not in OPEN_PATHS))


def openapi(operations: Sequence[Operation], *, with_key: bool) -> Schema:
    """Returns the document for these routes; ``with_key``: an API key is needed."""
    body_types = list(dict.fromkeys(kind for row in operations for kind in (row.body, row.answer, ErrorAnswer) if kind))
    references, schemas = msgspec.json.schema_components(body_types, ref_template="#/components/schemas/{name}")
    ref_of = dict(zip(body_types, references, strict=True))
    paths: Schema = {}
    for row in operations:
        content_by_type: Schema = {"text/plain": {"schema": {"type": "string"}}}
        if row.answer is not None:
            content_by_type = {"application/json": {"schema": ref_of[row.answer]}}
            content_by_type |= {"text/event-stream": {"schema": {}}} if row.generates else {}
        responses: Schema = {"200": {"description": "Done", "content": content_by_type}}
        operation: Schema = {"summary": row.summary, "operationId": row.name, "responses": responses}
        for status in row.errors(with_key=with_key):
            reply = {"description": _ERRORS[status], "content": {"application/json": {"schema": ref_of[ErrorAnswer]}}}
            retry_header = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds"}}
            responses[str(status)] = reply | ({"headers": retry_header} if status == 429 else {})
        if row.body is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref_of[row.body]}}}
        if "{" in row.path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        if "401" in responses:
            operation["security"] = [{"bearer": []}]
        paths[row.path] = {row.method: operation}
    bearer_scheme = {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}} if with_key else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "meshwright", "version": __version__, "description": "A model behind OpenAI's interface."},
        "paths": paths,
        "components": {"schemas": schemas} | bearer_scheme,
    }
