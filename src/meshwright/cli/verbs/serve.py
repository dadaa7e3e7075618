"""`meshwright serve`: a model over HTTP, with OpenAI's routes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from meshwright.algebra.generation import WeightStorage, weight_dtype
from meshwright.cli.output import compiling, say
from meshwright.cli.verb import Bytes, Count, MeshSizes, Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.spec.cluster import Cluster

if TYPE_CHECKING:
    from meshwright.serve.engine import Engine
    from meshwright.serve.model_folder import ModelFolder
    from meshwright.serve.opening import EngineOptions, OpenedEngine
    from meshwright.simulate.step_prices import StepPrices


class EngineGiven(Options):
    """Options of every verb that opens an engine; those of vLLM are other names of ours."""

    what: Path = argument(metavar="FOLDER")
    on: Cluster | None = option("Devices: cpu:4 is this machine as 4 emulated ones. Default: those that it has.")
    plan: Path | None = option("A plan of plan --serve -o, which says the mesh and what is not given here.")
    axes: MeshSizes | None = option("Mesh axes, such as tensor=2; data has an engine each. Default: planned.")
    max_len: Count | None = option("Most positions of a request. Default: the model's.", "--max-len", "--max-model-len")
    max_requests: Count | None = option(
        "Requests that run at once. Default: 256, 32 on CPUs.", "--max-requests", "--max-num-seqs"
    )
    token_budget: Count | None = option(
        "Tokens of a step. Default: 2,048, 256 on CPUs.", "--token-budget", "--max-num-batched-tokens"
    )
    page_len: Count | None = option(
        "Positions of a page of the cache. Default: 32 on CPUs, 128 on TPUs, 16 on GPUs.", "--page-len", "--block-size"
    )
    cache_bytes: Bytes | None = option(
        "Memory of the cache on each device, such as 4GB. Default: what is left.", "--cache-bytes", "--kv-cache-memory"
    )
    host_cache_bytes: Bytes = option(
        "Memory of the host for pages of prompts that lost their room on the devices, such as 16GB.", default=0
    )
    cache_dtype: Literal["auto", "bf16", "fp32", "int8", "fp8"] = option(
        "Dtype of keys and values; auto: the weights'.", "--cache-dtype", "--kv-cache-dtype", default="auto"
    )
    weights: WeightStorage = option("How weights are stored.", "--weights", "--quantization", default="as they are")
    draft: str | None = option(
        "What proposes tokens, checked together in a step: ngram, or a folder with a smaller model of the same tokens.",
        "--draft", "--speculative-model",
    )  # fmt: skip
    num_drafts: Count = option(
        "Tokens that --draft proposes for each step.",
        "--num-drafts",
        "--num-speculative-tokens",
        default=4,
        needs={"draft": "--draft"},
    )
    policy: Literal["chunked", "interleaved", "static"] = option("How requests share steps.", default="chunked")
    batch_invariant: bool = option("The same tokens and log-probabilities, bit for bit, whatever else runs.")
    adapters: tuple[str, ...] = option(
        "Adapters in PEFT's format, which requests choose by name as their model.",
        "--adapters",
        "--lora-modules",
        metavar="NAME=FOLDER ...",
    )
    no_prefix_cache: bool = option(
        "Compute the beginnings that prompts share again.", "--no-prefix-cache", "--no-enable-prefix-caching"
    )


class Given(EngineGiven):
    host: str = option("Address to listen on; 0.0.0.0 is every network of this machine.", default="127.0.0.1")
    port: int = option("Port to listen on; 0 takes a free one.", type=click.IntRange(0, 65535), default=8000)
    uds: str | None = option("Unix socket to listen on in place of a port.")
    name: str | None = option("What clients call the model. Default: its folder.", "--name", "--served-model-name")
    api_key: tuple[str, ...] = option("Key that clients must send; give it again for more.", "--api-key")
    max_queued: Count = option("Requests that wait or run at most; more get a 429.", default=1024)
    deadline: float | None = option("Seconds that a request may take. Default: any.")
    drain: Count = option("Seconds that what runs may go on after SIGTERM.", default=60)
    log_requests: bool = option("Write a line of JSON for each request to standard error.")
    no_log_stats: bool = option("Say no line every 10 s of what was done.", "--no-log-stats", "--disable-log-stats")


@verb(Given)
def command(given: Given) -> None:
    """Serve the model of a FOLDER over HTTP: a finished run, or config.json with safetensors files.

    Routes are OpenAI's: /v1/completions, /v1/chat/completions, /v1/models; also /metrics for Prometheus, /health,
    /tokenize, /openapi.json. SIGTERM finishes what runs.
    """
    from meshwright.serve.http.run import Listening, serve_app

    listening = Listening(host=given.host, port=given.port, uds=given.uds, drain_s=given.drain)
    listening.bind().close()  # an address that is taken is said before minutes of compiling
    from meshwright.serve.http.served import served_model
    from meshwright.serve.model_folder import open_model

    source = open_model(given.what, _folders_by_name(given.adapters))
    served = served_model(source, given.name)
    opened = open_given(given, source)
    from meshwright.serve.frontend import Frontend
    from meshwright.serve.http.app import HttpOptions, make_app

    frontend = Frontend(opened.engine, max_queued=given.max_queued, deadline_s=given.deadline)
    app = make_app(frontend, served, HttpOptions(api_keys=given.api_key, log=given.log_requests))
    metrics = app.state.metrics
    metrics.load_prices = partial(_prices, opened.engine.engines)

    def on_line() -> None:
        if (line := metrics.line()) and not given.no_log_stats:
            say(line)

    serve_app(app, frontend, listening, lambda url: say(f"serving {served.name} at {url}"), on_line)


def _prices(engines: "Sequence[Engine]") -> "StepPrices":
    from meshwright.api.step_prices import step_prices  # a second of imports, once the server answers

    return step_prices(engines)


def open_given(given: EngineGiven, source: "ModelFolder | None" = None, **more: bool) -> "OpenedEngine":
    """Opens the engine that was asked for, of a folder that may be open, and says what it has."""
    from meshwright.cli.verbs.generate import devices_of

    if given.plan and given.axes:
        raise InputError(f"{given.plan} says the axes. Leave --axes out, or --plan.")
    devices_of(given.on, given.axes)
    from meshwright.serve.opening import open_engine

    opened = open_engine(source or given.what, engine_options(given, given.axes), on_shape=compiling(), **more)
    for line in opened.lines:
        say(line)
    return opened


def engine_options(given: EngineGiven, mesh: dict[str, int] | None) -> "EngineOptions":
    """Returns the options of an engine."""
    from meshwright.serve.opening import EngineOptions

    if given.cache_bytes == 0:
        raise InputError("a cache of 0 bytes holds no page. Give --cache-bytes such as 4GB, or leave it out.")
    return EngineOptions(
        max_len=given.max_len or 0,
        max_requests=given.max_requests or 0,
        token_budget=given.token_budget or 0,
        page_len=given.page_len or 0,
        cache_bytes=given.cache_bytes or 0,
        host_cache_bytes=given.host_cache_bytes,
        cache_dtype="" if given.cache_dtype == "auto" else given.cache_dtype,
        weights=weight_dtype(given.weights),
        policy=given.policy,
        prefix_cache=not given.no_prefix_cache and given.policy != "static",
        batch_invariant=given.batch_invariant,
        mesh=mesh,
        draft=given.draft or "",
        num_drafts=given.num_drafts,
        num_devices=given.on.num_chips if given.on else 0,
        plan=given.plan,
        adapters=_folders_by_name(given.adapters),
    )


def _folders_by_name(pairs: Sequence[str]) -> dict[str, Path]:
    """Returns the folders of adapters by name. Raises InputError for a pair without a name, and a name that is given
    twice."""
    found = dict[str, Path]()
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder or name in found:
            wrong = "is there twice" if name in found else "is not NAME=FOLDER"
            raise InputError(f"--adapters {pair} {wrong}. Give each adapter a name of its own, such as sql=./sql-lora.")
        found[name] = Path(folder).expanduser()
    return found
