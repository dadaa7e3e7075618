"""Runs plans on the devices of this process: trains, and generates text with trained or published models."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.fields import fitted
from meshwright.core.toml_file import sealed_toml
from meshwright.core.units import counted
from meshwright.islands.member import find_identity
from meshwright.plan.plan_file import Plan
from meshwright.serve.options import EngineOptions
from meshwright.spec.assumptions import require_runnable_assumptions
from meshwright.spec.model import require_runnable

if TYPE_CHECKING:
    from meshwright.train.loop import OnStep
    from meshwright.train.record.result import TrainResult


def run_training(
    plan: Plan,
    settings: Mapping[str, Any] | None = None,
    *,
    runs: Path | str = "runs",
    resume: Path | str | None = None,
    on_step: "OnStep | None" = None,
) -> "TrainResult | None":
    """Trains the model of a plan on the devices of this process, or of all processes that were launched together.

    ``settings`` are training settings by name: ``{"steps": 20, "data": "text.jsonl"}``; ``weights`` are by default the
    plan's, and with weights the default ``learning_rate`` is a lower one. The run writes a new folder under ``runs``,
    or continues in the folder ``resume``. Under `launch --elastic` this process trains as one of several islands.
    Raises CannotRunError if the devices do not fit the plan.
    """
    require_runnable(plan.model)
    identity = find_identity()
    if identity:
        plan, whole_plan = island_plan(plan, identity.count), plan
    require_devices(plan)
    from meshwright.train.loop import train
    from meshwright.train.settings import fine_tuning_rate, settings_from_table

    settings_table = {"weights": plan.job.weights, **(settings or {})}
    if settings_table["weights"]:
        settings_table.setdefault("learning_rate", fine_tuning_rate(plan.model))
    if identity:
        from meshwright.train.elastic.run import IslandRun, train_island

        told = IslandRun(
            plan.model,
            plan.strategy,
            plan.job,
            settings_from_table(settings_table),
            Path(runs),
            None if resume is None else Path(resume),
            plan.predicted,
            on_step,
            {"plan.toml": sealed_toml(whole_plan)},
            whole_plan.strategy,
        )
        return train_island(identity, told)
    return train(
        plan.model,
        plan.strategy,
        plan.job,
        settings_from_table(settings_table),
        run_root=Path(runs),
        resume=None if resume is None else Path(resume),
        predicted=plan.predicted,
        on_step=on_step,
        texts={"plan.toml": sealed_toml(plan)},
    )


def island_plan(plan: Plan, count: int) -> Plan:
    """Returns the plan of one island: if the plan has islands, of one of these, whatever ``count``; else of one of
    ``count`` parts of its axis ``data``, on emulated devices only.

    Raises InputError if ``data`` or the batch does not divide by the number of islands.
    """
    strategy, cluster, job = plan.strategy, plan.cluster, plan.job
    data, num_islands = strategy.mesh.get("data", 1), strategy.num_islands
    if num_islands > 1:
        inner, own_cluster = strategy.inner(), cluster.island
    elif data % count or cluster.kind != "host":
        raise InputError(
            f"the plan is for one island with data={data} on {cluster.short_name}, and {count} islands are launched. "
            f"Plan for islands: --on '{count}*{cluster.short_name}@10Gbit/s'."
        )
    else:
        inner, num_islands = msgspec.structs.replace(strategy, mesh={**strategy.mesh, "data": data // count}), count
        own_cluster = msgspec.structs.replace(cluster, shape=(cluster.num_chips // count,))
    if job.batch_seqs % num_islands:
        raise InputError(
            f"batch_seqs={job.batch_seqs} does not divide into {num_islands} islands. Use a multiple of {num_islands}."
        )
    job = msgspec.structs.replace(job, batch_seqs=job.batch_seqs // num_islands)
    return msgspec.structs.replace(plan, strategy=inner, cluster=own_cluster, job=job)


def require_devices(plan: Plan) -> None:
    """Connects the processes that were launched together, emulates devices for ``cpu:N``, and checks the devices.

    Raises CannotRunError if they do not fit the plan, and for a plan that assumes other software.
    """
    require_runnable_assumptions(plan.assumptions)
    from meshwright.parallel.mesh import emulate_devices
    from meshwright.parallel.processes import start_processes

    cluster, num_procs = plan.cluster, start_processes()
    num_own, num_left_over = divmod(cluster.num_chips, num_procs)
    if num_left_over:
        raise CannotRunError(
            f"{cluster.num_chips} devices of {cluster.short_name} do not divide into {num_procs} processes. "
            f"Launch a number of processes that divides {cluster.num_chips}."
        )
    if cluster.kind == "host":
        emulate_devices(num_own)
    import jax

    devices = jax.devices()
    if cluster.kind != "host" and (devices[0].platform == "cpu" or len(devices) < cluster.num_chips):
        raise CannotRunError(
            f"the plan is for {cluster.num_chips} {cluster.chip.name} chips, but this machine has {len(devices)} of "
            f"platform {devices[0].platform}. Run it on such chips, or plan for emulated devices: --on cpu:8."
        )
    if num_procs > 1 and jax.local_device_count() != num_own:
        raise CannotRunError(
            f"this process has {jax.local_device_count()} devices, but the plan gives {num_own} to each of {num_procs} "
            f"processes. Start them with launch --processes {num_procs} --devices {num_own}, or make {num_own} visible."
        )


# -- text -----------------------------------------------------------------------------------------------


class TextOptions(EngineOptions, frozen=True, kw_only=True):
    """Options of `generate_text`. ``sampling`` is a `Sampling`, None takes the likeliest tokens. ``max_tokens`` None
    generates `USUAL_TOKENS`, or as many as the model's positions allow. Unset engine options fit the prompts."""

    max_tokens: int | None = None
    sampling: Any = None


USUAL_TOKENS = 128
AS_TRAINED, BETWEEN = TextOptions(), " => "


class GeneratedText(msgspec.Struct, frozen=True, kw_only=True):
    """Continuation of each prompt as text. ``generated`` has tokens and times, see `serve.offline.generate`;
    ``opened_s`` is the seconds until the model was loaded and compiled. ``between`` separates a prompt from its text if
    the model has an encoder, so that the text does not continue the prompt; else it is ""."""

    model: str
    mesh: dict[str, int]
    texts: tuple[str, ...]
    generated: Any
    opened_s: float
    between: str = ""


def generate_text(
    folder: Path | str,
    prompts: Sequence[str],
    options: TextOptions = AS_TRAINED,
    *,
    on_text: Callable[[int, str], None] | None = None,
    on_loaded: Callable[[str], None] | None = None,
) -> GeneratedText:
    """Returns the continuation of each prompt, without the prompt, by the model of a folder: a finished run, or
    config.json with safetensors files.

    ``on_text`` gets the index of a prompt and the next piece of its text as soon as it exists; ``on_loaded`` gets
    lines about the loaded model. Raises InputError if a prompt and its new tokens exceed the model's positions.
    """
    from meshwright.serve.drawing.sampling import LIKELIEST
    from meshwright.serve.model_folder import TextStream, open_model
    from meshwright.serve.offline.generate import as_requests, generate
    from meshwright.serve.opening import open_engine
    from meshwright.serve.request import RequestBounds

    start_s = time.perf_counter()
    source = open_model(Path(folder), options.adapters or {})
    prompt_ids = [source.encode(text) for text in prompts]
    sampling = fitted(options.sampling or LIKELIEST, type(LIKELIEST), "TextOptions.sampling")
    max_positions = source.model.max_positions
    bounds = RequestBounds.of(source.model, options.max_len or max_positions, source.adapters)
    room = min((bounds.room(len(prompt)) for prompt in prompt_ids), default=0)
    num_new = max(1, min(USUAL_TOKENS, room)) if options.max_tokens is None else options.max_tokens
    requests = as_requests(prompt_ids, max_tokens=num_new, sampling=sampling, end_tokens=source.end_tokens)
    num_in = max(len(bounds.resolved(request).prompt) for request in requests)
    if num_in + num_new > max_positions:  # beyond its positions the model would write nonsense
        raise InputError(
            f"a prompt of {counted(num_in, 'token')} and {num_new:,} more need {num_in + num_new:,} positions, but "
            f"{source.model.name} has {max_positions:,}. Shorten the prompt, or use a smaller max_tokens."
        )
    for request in requests:  # before anything compiles
        bounds.check(request)
    opened_engine = open_engine(source, options, requests=requests)
    opened_s = time.perf_counter() - start_s
    if on_loaded is not None:
        for line in opened_engine.lines:
            on_loaded(line)
    streams = [TextStream(source.text, source.context_of(prompt)) for prompt in prompt_ids]
    pieces_by_prompt: list[list[str]] = [[] for _ in prompts]
    between = BETWEEN * bool(source.model.encoder)
    if on_text is not None and between:
        for place in range(len(prompts)):
            on_text(place, between)

    def push(place: int, text: str) -> None:
        pieces_by_prompt[place].append(text)
        if on_text is not None:
            on_text(place, text)

    generation = generate(opened_engine.engine, requests, lambda place, token: push(place, streams[place].push(token)))
    for place, stream in enumerate(streams):
        push(place, stream.finish())
    texts = tuple("".join(parts) for parts in pieces_by_prompt)
    mesh_axes = {**opened_engine.engine.engines[0].packed.strategy.mesh, "data": len(opened_engine.engine.engines)}
    facts: dict[str, Any] = {"model": source.model.name, "mesh": mesh_axes, "opened_s": opened_s, "between": between}
    return GeneratedText(texts=texts, generated=generation, **facts)
