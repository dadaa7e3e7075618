"""`meshwright serve`: a model over HTTP, with OpenAI's routes."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.engine import EngineGiven, folders_by_name, open_given
from meshwright.cli.output import say
from meshwright.cli.verb import Count, option, verb
from meshwright.core.errors import InputError
from meshwright.core.units import counted

if TYPE_CHECKING:
    from meshwright.serve.engine import Engine
    from meshwright.simulate.step_prices import StepPrices


class Given(EngineGiven, group="Server"):
    host: str | None = option("Address to listen on; 0.0.0.0 is every network of this machine. Default: 127.0.0.1.")
    port: int | None = option("Port to listen on; 0 takes a free one. Default: 8000.", type=click.IntRange(0, 65535))
    uds: str | None = option("Unix socket to listen on in place of an address and a port.", is_rare=True)
    name: str | None = option("What clients call the model. Default: its folder.", "--name", "--served-model-name")
    api_key: tuple[str, ...] = option("Key that clients must send; give it again for more.", "--api-key")
    max_queued: Count = option("Most requests that wait or run; further ones get status 429.", default=1024)
    deadline: float | None = option("Time limit of a request in seconds. Default: none.")
    drain: int = option("Seconds that running requests have to finish after SIGTERM.", default=60, is_rare=True)
    log_requests: bool = option("Write a line of JSON for each request to standard error.")
    no_log_stats: bool = option(
        "Do not print a line of statistics every 10 s.", "--no-log-stats", "--disable-log-stats", is_rare=True
    )


@verb(Given, needs="serve")
def command(given: Given) -> None:
    """Serve the model of a FOLDER over HTTP: a finished run, or config.json with safetensors files, or GGUF.

    Routes are OpenAI's: /v1/completions, /v1/chat/completions, /v1/models; also /metrics for Prometheus, /health,
    /tokenize, /openapi.json. SIGTERM lets running requests finish.
    """
    from meshwright.serve.http.run import Listening, serve_app

    for flag, value in (("--name", given.name), *(("--api-key", key) for key in given.api_key)):
        if value == "":
            raise InputError(f"{flag} is empty. Give a text, or leave the option out.")
    if given.deadline == 0:
        raise InputError("--deadline 0 leaves no time for a request. Give more seconds, or leave it out for no limit.")
    address_fields = {"host": given.host, "port": given.port, "uds": given.uds}
    given_address: dict[str, Any] = {name: value for name, value in address_fields.items() if value is not None}
    if given.uds and len(given_address) > 1:
        flags_text = " and ".join(f"--{name}" for name in given_address)
        raise InputError(f"{flags_text} each say where to listen. Leave --uds out, or the others.")
    listening = Listening(**given_address, drain_s=given.drain)
    listening.bind().close()  # an address that is taken is said before minutes of compiling
    from meshwright.serve.http.served import served_model
    from meshwright.serve.model_folder import open_model

    model_folder = open_model(given.what, folders_by_name(given.adapters))
    named_model = served_model(model_folder, given.name)
    opened_engine = open_given(given, model_folder)
    from meshwright.serve.frontend import Frontend
    from meshwright.serve.http.app import make_app

    frontend = Frontend(opened_engine.engine, max_queued=given.max_queued, deadline_s=given.deadline)
    app = make_app(frontend, named_model, api_keys=given.api_key, logs_requests=given.log_requests)
    metrics = app.state.metrics
    metrics.load_prices = partial(_prices, opened_engine.engine.engines)

    def on_line() -> None:
        if (line := metrics.line()) and not given.no_log_stats:
            say(line)

    serve_app(app, frontend, listening, lambda url: say(f"serving {named_model.name} at {url}"), on_line)
    if frontend.num_cut:
        say(f"the server has ended with {counted(frontend.num_cut, 'request')} unfinished")


def _prices(engines: "Sequence[Engine]") -> "StepPrices":
    from meshwright.api.served_step import step_prices  # a second of imports, once the server answers

    return step_prices(engines)
