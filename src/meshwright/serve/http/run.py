"""Runs the app on a socket until a signal or until its engine fails; finishes running requests before it ends."""

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from types import FrameType

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from meshwright.core.errors import CannotRunError, InputError
from meshwright.serve.frontend import Frontend
from meshwright.serve.http.errors import RequestError, error_of

SWITCH_S = 0.0005
"""Python's switch interval: how long a thread keeps the interpreter while another waits for it."""

LINE_S = 10
"""Seconds between log lines."""

KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than clients keep theirs (httpx and openai's package: 5 s), which
would otherwise send requests on connections that the server is closing."""

MOST_HEAD_BYTES = 65_536
"""Maximum bytes of a request line and its headers: as in h11, and eight times nginx's limit."""


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Where to listen: ``host`` and ``port`` (0: a free port), or the Unix socket ``uds``. ``drain_s``: how long
    running requests may continue after a signal (None: for ever)."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    drain_s: int | None = None

    def bind(self) -> socket.socket:
        """Returns a bound socket. Raises InputError if the address cannot be bound."""
        address_family = socket.AF_UNIX if self.uds else socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio sets TCP_NODELAY, so that each token is sent at once, only if the protocol is given
        listener = socket.socket(address_family, socket.SOCK_STREAM, 0 if self.uds else socket.IPPROTO_TCP)
        try:
            if self.uds:
                if Path(self.uds).is_socket():
                    Path(self.uds).unlink()  # left by a server that was killed
                listener.bind(self.uds)
            else:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            listener.close()
            address_text = self.uds or f"{self.host}:{self.port}"
            raise InputError(f"cannot listen on {address_text}: {error}. Give another address.") from None
        return listener


class BoundedProtocol(HttpToolsProtocol):
    """Answers a request whose line and headers exceed `MOST_HEAD_BYTES` (httptools has no limit) with 431, and one that
    is not HTTP with 400, in the app's error format, and closes the connection."""

    _head_bytes, _num_ended, _in_head = 0, 0, True

    def on_headers_complete(self) -> None:
        self._in_head = False
        # headers that arrived in one read passed the check on unfinished ones
        if (
            len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)
            > MOST_HEAD_BYTES
        ):
            self._refuse_head()
            raise ValueError  # ends httptools' parsing
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._num_ended = True, self._num_ended + 1
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        num_ended = self._num_ended
        super().data_received(data)
        # bytes after a whole request in the same read are at most one read long
        self._head_bytes = self._head_bytes + len(data) if self._in_head and num_ended == self._num_ended else 0
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError("the request is not valid HTTP. Send HTTP/1.1."))

    def _refuse_head(self) -> None:
        self._refuse(RequestError(f"the headers have more than {MOST_HEAD_BYTES:,} bytes.", 431))

    def _refuse(self, error: RequestError) -> None:
        if not self.transport.is_closing():
            body = msgspec.json.encode(error_of(error)[1])
            head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            self.transport.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """After a signal or a failure of the engine, refuses new requests, finishes running ones and ends. A second signal
    ends it at once. Calls ``on_line`` every `LINE_S` in a thread."""

    def __init__(
        self,
        app: ASGIApp,
        frontend: Frontend,
        listening: Listening,
        on_ready: Callable[[], None] = lambda: None,
        on_line: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=BoundedProtocol,
                lifespan="on",
                ws="none",
                log_config=None,  # uvicorn's default closes other handlers, and absl's then closes its stream
                log_level="critical",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=listening.drain_s,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self.frontend, self.on_ready, self.on_line = frontend, on_ready, on_line

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.timeout_graceful_shutdown is not None:  # clients get an error before their connections close
            asyncio.get_running_loop().call_later(self.config.timeout_graceful_shutdown, self.frontend.cut_off)
            self.config.timeout_graceful_shutdown += 1
        while self.servers:  # their `wait_closed` waits, from Python 3.12 on, for all connections
            self.servers.pop().close()
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()

    async def on_tick(self, counter: int) -> bool:
        if (counter + 1) % (10 * LINE_S) == 0:  # uvicorn calls it 10 times a second
            await asyncio.to_thread(self.on_line)
        self.should_exit = self.should_exit or bool(self.frontend.failure)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # true at a second signal
        self.should_exit = True
        self.frontend.stop_taking()


def serve_app(
    app: ASGIApp,
    frontend: Frontend,
    listening: Listening,
    on_ready: Callable[[str], None] = lambda url: None,
    on_line: Callable[[], None] = lambda: None,
) -> None:
    """Serves until SIGTERM or SIGINT, and returns when running requests have finished, or at a second signal.

    Raises InputError if the address cannot be bound, and CannotRunError after the engine has failed. Calls ``on_ready``
    with the URL, or the path of the Unix socket, once it answers, and ``on_line`` as `DrainingServer` does.
    """
    # The engine's thread and the event loop alternate; Python's default of 5 ms would delay tokens visibly.
    sys.setswitchinterval(SWITCH_S)
    listener = listening.bind()
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    url = listening.uds or f"http://{host}:{listener.getsockname()[1]}"
    try:
        DrainingServer(app, frontend, listening, lambda: on_ready(url), on_line).run(sockets=[listener])
    finally:
        frontend.join()  # a second signal skips the end of the app's lifespan
        if listening.uds:
            with suppress(OSError):
                Path(listening.uds).unlink()
    if frontend.failure:
        raise CannotRunError(f"{frontend.failure} The server has ended; start it again.")
