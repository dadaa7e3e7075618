"""Makes the OpenAPI document from the types of bodies and answers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from meshwright import __version__
from meshwright.serve.http.bodies import Body
from meshwright.serve.http.border import OPEN_PATHS
from meshwright.serve.http.errors import ErrorAnswer

Schema = dict[str, Any]
"""A part of the OpenAPI document, as JSON."""

_ERRORS = {
    400: "The request is not valid or cannot be run",
    401: "No API key, or a wrong one",
    404: "There is no such model",
    413: "The body is too large",
    429: "Too many requests; Retry-After says when to try again",
    503: "No requests are accepted: the server is stopping, or its engine failed",
    504: "The request did not finish within its deadline",
}


class Operation(NamedTuple):
    """A route: its path, name and summary, and the types of its body and answer. The method is POST if it has a body,
    else GET; without a type of answer it returns text."""

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
        """True if the route runs the engine; it may then also answer with a stream of events."""
        return self.path.endswith("completions")

    def errors(self, *, with_key: bool) -> list[int]:
        """Returns the error statuses of the route, sorted; ``with_key``: the server needs an API key."""
        statuses = [400, 404, 413] if self.body else [404] * ("{" in self.path)
        statuses += [429, 503, 504] if self.generates else [503] * (self.name == "health")
        return sorted(statuses + [401] * (with_key and self.path not in OPEN_PATHS))


def openapi(operations: Sequence[Operation], *, with_key: bool) -> Schema:
    """Returns the OpenAPI document of these routes; ``with_key``: the server needs an API key."""
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
        "info": {"title": "meshwright", "version": __version__, "description": "A model behind OpenAI's API."},
        "paths": paths,
        "components": {"schemas": schemas} | bearer_scheme,
    }
