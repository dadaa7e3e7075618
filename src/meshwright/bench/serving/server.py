"""Runs a server in a separate process, whose engine is timed before it answers requests."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from meshwright.batching.limits import SchedulerLimits
from meshwright.bench.serving.clock import EngineClock, measure_clock
from meshwright.core.errors import CannotRunError
from meshwright.serve.options import EngineOptions

END_S = 30.0
"""Seconds that a server may take to end before it is killed."""


class BenchedServer(msgspec.Struct, frozen=True, kw_only=True):
    """An opened engine: lines that describe it, its limits, its measured clock, and the URL of its server ("" without a
    server)."""

    lines: tuple[str, ...]
    limits: SchedulerLimits
    clock: EngineClock
    url: str


@contextmanager
def benched_server(
    folder: Path, options: EngineOptions, *, num_devices: int | None = None, serves: bool = True
) -> Iterator[BenchedServer]:
    """Opens a model folder in another process, emulating ``num_devices`` if given, and times its engine; with
    ``serves`` it runs a server until the context exits. Raises CannotRunError if that process ends early."""
    context = multiprocessing.get_context("spawn")
    our_pipe, their_pipe = context.Pipe()
    process = context.Process(target=_run, args=(their_pipe, folder, options, num_devices, serves), daemon=True)
    process.start()
    their_pipe.close()
    try:
        server_or_error = our_pipe.recv()
        if isinstance(server_or_error, Exception):
            raise server_or_error
        yield server_or_error
    except EOFError:
        process.join()
        raise CannotRunError(f"the server ended with code {process.exitcode} before it answered.") from None
    finally:
        process.terminate()
        process.join(END_S)
        if process.is_alive():
            process.kill()


def _run(pipe: Connection, folder: Path, options: EngineOptions, num_devices: int | None, serves: bool) -> None:
    try:
        if num_devices is not None:
            from meshwright.parallel.mesh import emulate_devices

            emulate_devices(num_devices)
        from meshwright.serve.frontend import Frontend
        from meshwright.serve.http.app import make_app
        from meshwright.serve.http.run import Listening, serve_app
        from meshwright.serve.http.served import served_model
        from meshwright.serve.opening import open_engine

        opened_engine = open_engine(folder, options, in_background=False)
        engine, *other_engines = opened_engine.engine.engines
        if other_engines:
            raise CannotRunError("only one engine can be timed. Give --axes without data, such as tensor=2.")
        server = BenchedServer(lines=opened_engine.lines, limits=engine.limits, clock=measure_clock(engine), url="")
        if not serves:
            pipe.send(server)
            return
        frontend = Frontend(opened_engine.engine, max_queued=2**20)
        app = make_app(frontend, served_model(opened_engine.source))
    except Exception as error:
        pipe.send(error)
        return
    listening = Listening(port=0, drain_s=1)
    serve_app(app, frontend, listening, lambda url: pipe.send(msgspec.structs.replace(server, url=url)))
