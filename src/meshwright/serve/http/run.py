"""Runs the app on a socket until a signal, and ends with what runs finished."""

from types import FrameType

import msgspec
import uvicorn
from starlette.types import ASGIApp

from meshwright.serve.frontend import Frontend


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Where to listen: ``host`` and ``port``, 0 for a free one, or the Unix socket ``uds``. ``drain_s``: how long what
    runs may go on after a signal; None for ever."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    drain_s: int | None = None


class DrainingServer(uvicorn.Server):
    """Ends after a signal: takes nothing new, finishes what runs. A second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, frontend: Frontend) -> None:
        super().__init__(config)
        self.frontend = frontend

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self.frontend.stop_taking()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.servers[0].sockets[0].getsockname()[1])


def server_of(app: ASGIApp, frontend: Frontend, listening: Listening) -> DrainingServer:
    """Returns the server, for an event loop that runs; `serve_app` makes its own."""
    config = uvicorn.Config(
        app,
        host=listening.host,
        port=listening.port,
        uds=listening.uds,
        loop="asyncio",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=listening.drain_s,
        ws="none",
    )
    return DrainingServer(config, frontend)


def serve_app(app: ASGIApp, frontend: Frontend, listening: Listening | None = None) -> None:
    """Serves until SIGTERM or SIGINT, and returns when what runs is finished, or at a second signal."""
    server_of(app, frontend, listening or Listening()).run()
