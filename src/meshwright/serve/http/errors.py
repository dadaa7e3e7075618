"""Converts exceptions to error responses in OpenAI's format."""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from meshwright.core.errors import InputError, UserError, one_line
from meshwright.serve.frontend import BusyError, DeadlineError, UnavailableError


class ErrorDetail(msgspec.Struct, kw_only=True):
    """The message of an error, OpenAI's type and code, and the parameter at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct):
    """The body of every error response."""

    error: ErrorDetail


class RequestError(UserError):
    """An error of a request: the HTTP ``status`` of its answer, the parameter at fault, OpenAI's code."""

    def __init__(self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


_TYPES = {
    **{HTTPStatus.UNAUTHORIZED: "authentication_error", HTTPStatus.NOT_FOUND: "not_found_error"},
    **{HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error", HTTPStatus.GATEWAY_TIMEOUT: "timeout_error"},
}
"""Status -> OpenAI's type of error; others are "invalid_request_error" below 500, else "server_error"."""
_STATUSES = {InputError: 400, BusyError: 429, UnavailableError: 503, DeadlineError: 504, ClientDisconnect: 400}


def error_of(error: Exception) -> tuple[int, ErrorAnswer, Mapping[str, str]]:
    """Returns the HTTP status, body and headers for an exception."""
    headers: Mapping[str, str] = {}
    param, code = None, None
    if isinstance(error, RequestError):
        status, param, code, message = error.status, error.param, error.code, str(error)
        headers = {"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else {}
    elif isinstance(error, HTTPException):
        status, message, headers = error.status_code, f"{error.detail}.", error.headers or {}
        if status == HTTPStatus.NOT_FOUND:
            message = "there is no such path. GET /openapi.json lists the routes."
    else:
        status = next((code for error_class, code in _STATUSES.items() if isinstance(error, error_class)), 500)
        message = str(error) if status < 500 or isinstance(error, UserError) else "the server failed; its log says how."
        if isinstance(error, BusyError):
            headers = {"Retry-After": str(error.retry_after_s)}
    error_type = _TYPES.get(HTTPStatus(status), "invalid_request_error" if status < 500 else "server_error")
    detail = ErrorDetail(message=one_line(message), type=error_type, param=param, code=code)
    return status, ErrorAnswer(detail), headers


def error_response(error: Exception) -> Response:
    """Returns the HTTP response for an exception."""
    status, body, headers = error_of(error)
    return Response(msgspec.json.encode(body), status, dict(headers), "application/json")
