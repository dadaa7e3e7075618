"""Runs of plans on the devices at hand: training, and text from trained or published models."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.algebra.generation import WeightStorage
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.fields import Checked, check_figures, fitted
from meshwright.core.files import cache_folder
from meshwright.core.toml_file import sealed_toml
from meshwright.core.units import format_bytes
from meshwright.spec.model import require_runnable
from meshwright.spec.plan_file import Plan
from meshwright.spec.strategy import Strategy, make_mesh, mesh_words, require_runnable_assumptions
from meshwright.spec.weights import without_mtp_words

if TYPE_CHECKING:
    from meshwright.parallel.generation.generate_step import GenerateStep
    from meshwright.serve.model_folder import ModelFolder
    from meshwright.train.loop import OnStep
    from meshwright.train.record.result import TrainResult


def run_training(
    plan: Plan,
    settings: Mapping[str, Any] | None = None,
    *,
    runs: Path | str = "runs",
    resume: Path | str | None = None,
    on_step: "OnStep | None" = None,
) -> "TrainResult":
    """Trains by a plan on the devices of this process, or of all processes that were launched together.

    ``settings`` are those of training by name: ``{"steps": 20, "data": "text.jsonl"}``; ``weights`` are by default the
    plan's, and ``learning_rate`` a lower one if there are weights. The run writes a new folder under ``runs``, or
    continues in the folder ``resume``. Raises CannotRunError if the devices are not those of the plan.
    """
    require_runnable(plan.model)
    require_devices(plan)
    from meshwright.train.loop import train
    from meshwright.train.settings import fine_tuning_rate, settings_from_table

    table = {"weights": plan.job.weights, **(settings or {})}
    if table["weights"]:
        table.setdefault("learning_rate", fine_tuning_rate(plan.model))
    return train(
        plan.model,
        plan.strategy,
        plan.job,
        settings_from_table(table),
        run_root=Path(runs),
        resume=None if resume is None else Path(resume),
        predicted=plan.predicted,
        on_step=on_step,
        texts={"plan.toml": sealed_toml(plan)},
    )


def require_devices(plan: Plan) -> None:
    """Joins the other processes, emulates devices if the plan is for them, and counts the devices.

    Raises CannotRunError if they are not those of the plan, and for a plan that assumes other software.
    """
    require_runnable_assumptions(plan.assumptions)
    from meshwright.parallel.mesh import emulate_devices
    from meshwright.parallel.processes import start_processes

    cluster, processes = plan.cluster, start_processes()
    share, left = divmod(cluster.num_chips, processes)
    if left:
        raise CannotRunError(
            f"{cluster.num_chips} devices of {cluster.short_name} do not divide into {processes} processes. "
            f"Launch a number of processes that divides {cluster.num_chips}."
        )
    if cluster.kind == "host":
        emulate_devices(share)
    import jax

    devices = jax.devices()
    if cluster.kind != "host" and (devices[0].platform == "cpu" or len(devices) < cluster.num_chips):
        raise CannotRunError(
            f"the plan is for {cluster.num_chips} {cluster.chip.name} chips, but this machine has {len(devices)} of "
            f"platform {devices[0].platform}. Run it on such chips, or plan for emulated devices: --on cpu:8."
        )
    if processes > 1 and jax.local_device_count() != share:
        raise CannotRunError(
            f"this process has {jax.local_device_count()} devices, but the plan gives {share} to each of {processes} "
            f"processes. Start them with launch --processes {processes} --devices {share}, or make {share} visible."
        )


# -- text -----------------------------------------------------------------------------------------------


class TextOptions(Checked, frozen=True, kw_only=True):
    """How text is generated. The defaults are all devices on tensor and the likeliest tokens (``sampling`` takes a
    `Sampling`); ``weights`` is their dtype, and ``cache_dtype`` that of keys and values, by default the weights'."""

    max_tokens: int = 128
    sampling: Any = None
    mesh: dict[str, int] | None = None
    weights: WeightStorage = "as they are"
    cache_dtype: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_figures(self, "TextOptions", may_be_zero=("max_tokens",))


AS_TRAINED = TextOptions()


class GeneratedText(msgspec.Struct, frozen=True, kw_only=True):
    """The continuation of each prompt as text; ``generated`` has tokens and times, see `serve.offline.generate`."""

    model: str
    mesh: dict[str, int]
    texts: tuple[str, ...]
    generated: Any


def generate_text(
    folder: Path | str,
    prompts: Sequence[str],
    options: TextOptions = AS_TRAINED,
    *,
    on_text: Callable[[int, str], None] | None = None,
    on_loaded: Callable[[str], None] | None = None,
) -> GeneratedText:
    """Continues prompts with the model of a folder: a finished run, or config.json with safetensors files.

    ``on_text`` gets the number of a prompt and the next piece of its text as soon as it exists; ``on_loaded`` gets a
    line about the loaded model. Raises InputError for prompts that the model has too few positions for.
    """
    import jax

    from meshwright.serve.drawing.sampling import LIKELIEST
    from meshwright.serve.model_folder import TextStream, open_model
    from meshwright.serve.offline.generate import generate

    source = open_model(Path(folder))
    tokens = [source.text.encode(text) for text in prompts]
    mesh = make_mesh(options.mesh or {"tensor": len(jax.devices())})
    step, params = _loaded(source, mesh, tokens, options, on_loaded or (lambda line: None))
    streams = [TextStream(source.text, prompt) for prompt in tokens]
    pieces: list[list[str]] = [[] for _ in prompts]

    def push(row: int, text: str) -> None:
        pieces[row].append(text)
        if on_text is not None:
            on_text(row, text)

    found = generate(
        step,
        params,
        tokens,
        max_tokens=options.max_tokens,
        sampling=fitted(options.sampling or LIKELIEST, type(LIKELIEST), "TextOptions.sampling"),
        end_tokens=source.end_tokens,
        on_token=lambda row, token: push(row, streams[row].push(token)),
    )
    for row, stream in enumerate(streams):
        push(row, stream.finish())
    texts = tuple("".join(parts) for parts in pieces)
    return GeneratedText(model=source.model.name, mesh=mesh, texts=texts, generated=found)


def _loaded(
    source: "ModelFolder",
    mesh: dict[str, int],
    prompts: Sequence[Sequence[int]],
    options: TextOptions,
    say: Callable[[str], None],
) -> tuple["GenerateStep", dict[str, Any]]:
    """Returns the step for these prompts, and the weights on its devices."""
    import jax
    import jax.numpy as jnp

    from meshwright.nn.hf.weights import load_params
    from meshwright.parallel.generation.generate_step import GenerateStep
    from meshwright.parallel.mesh import keep_compiled_programs
    from meshwright.serve.offline.generate import require_prompts

    keep_compiled_programs(cache_folder())
    source = source.served("" if options.weights == "as they are" else options.weights, jax.default_backend())
    longest, there, more = max(map(len, prompts)), source.model.max_positions, options.max_tokens
    if longest + more > there:  # beyond its positions the model would not write text
        raise InputError(
            f"a prompt of {longest:,} {'token' if longest == 1 else 'tokens'} and {more:,} more need "
            f"{longest + more:,} positions, but {source.model.name} has {there:,}. Shorten the prompt, or use a "
            f"smaller --max-tokens."
        )
    strategy = Strategy(mesh=mesh, state="fp32" if source.dtype == "fp32" else "bf16-adam")
    parts = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    step = GenerateStep(
        source.model,
        strategy,
        max_len=max(1, *map(len, prompts)) + max(1, options.max_tokens),
        batch_seqs=-(-len(prompts) // parts) * parts,
        cache_dtype=options.cache_dtype or source.dtype,  # type: ignore[arg-type]
        weights=options.weights,
    )
    require_prompts(step, prompts, max_tokens=options.max_tokens)
    for line in (*step.compiler.notes, *source.notes):
        say(line)
    dtype = jnp.float32 if source.dtype == "fp32" else jnp.bfloat16
    params = step.place(load_params(source.model, source.folder, step.loaded_shardings, dtype))
    held = sum(array.addressable_shards[0].data.nbytes for array in params.values())
    cache = sum(row.num_bytes for row in step.table) / math.prod(mesh.values())
    say(
        f"{source.model.name}: {mesh_words(mesh)}, {format_bytes(held)} of weights on each device, "
        f"{format_bytes(cache)} of {step.table[0].dtype} keys and values over {step.batch_seqs} x {step.cache_len} "
        f"positions{without_mtp_words(source.model)}"
    )
    return step, params
