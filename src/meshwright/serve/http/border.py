"""Wraps every route with request ids, the check of the API key and a log line for each request."""

import hmac
import logging
import re
import secrets
import sys
import time
from collections.abc import Collection

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.serve.http.bodies import JsonObject
from meshwright.serve.http.errors import RequestError, error_response

OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/openapi.json"})
"""Paths that need no API key."""
_LOGGER = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Border:
    """ASGI middleware. Every response has the request's ``X-Request-Id``, or a new one; requests without a valid key
    get 401 (if there are ``api_keys``); ``logs_requests`` writes a line of JSON per request to standard error.
    ``scope["state"]`` has ``request_id``, ``start_s`` and ``known``, fields of that line that handlers add."""

    def __init__(self, app: ASGIApp, *, api_keys: Collection[str], logs_requests: bool) -> None:
        self.app, self.logs_requests = app, logs_requests
        self.keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        sent_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = sent_id if _REQUEST_ID.fullmatch(sent_id) else secrets.token_hex(16)  # safe in headers and logs
        log_fields: JsonObject = {}
        start_s, status = time.perf_counter(), 0
        scope.setdefault("state", {}).update(request_id=request_id, start_s=start_s, known=log_fields)

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            if self.keys and scope["path"] not in OPEN_PATHS and not self._knows(headers.get(b"authorization", b"")):
                refusal = RequestError(
                    "the API key is missing or wrong. Send Authorization: Bearer KEY.", 401, code="invalid_api_key"
                )
                await error_response(refusal)(scope, receive, send_named)
            else:
                await self.app(scope, receive, send_named)
        except Exception:
            _LOGGER.exception("%s %s failed", scope["method"], scope["path"])
            raise
        finally:
            if self.logs_requests:
                line_fields = {"time": round(time.time(), 3), "request_id": request_id, "method": scope["method"]}
                line_fields |= {"path": scope["path"], "status": status, "seconds": time.perf_counter() - start_s}
                sys.stderr.write(msgspec.json.encode({**line_fields, **log_fields}).decode() + "\n")

    def _knows(self, auth_header: bytes) -> bool:
        scheme, _, sent_key = auth_header.partition(b" ")
        # constant time, so that timing reveals nothing about the key
        return scheme.lower() == b"bearer" and any(hmac.compare_digest(sent_key, key) for key in self.keys)
