"""Options of every verb that opens an engine, and the engine opened by them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwright.algebra.generation.program import WeightStorage, weight_dtype
from meshwright.cli.output import say, width
from meshwright.cli.verb import Bytes, Count, MeshSizes, Options, argument, option
from meshwright.core.errors import CannotRunError, InputError
from meshwright.report.answer import filled
from meshwright.serve.options import EngineOptions
from meshwright.spec.cluster import Cluster
from meshwright.spec.strategy import make_mesh

if TYPE_CHECKING:
    from meshwright.serve.model_folder import ModelFolder
    from meshwright.serve.opening import OpenedEngine


class EngineGiven(Options, group="Engine"):
    """Options of every verb that opens an engine; vLLM's names of them work too."""

    what: Path = argument(metavar="FOLDER")
    on: Cluster | None = option("Devices: cpu:4 is this machine as 4 emulated ones. Default: those that it has.")
    plan: Path | None = option("A plan written by service -o; it sets the mesh and options not given here.")
    axes: MeshSizes | None = option(
        "Mesh axes, such as tensor=2; each index of data has its own engine. Default: planned."
    )
    max_len: Count | None = option("Most positions of a request. Default: the model's.", "--max-len", "--max-model-len")
    max_requests: Count | None = option(
        "Requests that run at once. Default: 256, 32 on CPUs.", "--max-requests", "--max-num-seqs"
    )
    token_budget: Count | None = option(
        "Tokens of a step. Default: 2,048, 256 on CPUs.", "--token-budget", "--max-num-batched-tokens", is_rare=True
    )
    page_len: Count | None = option(
        "Positions of a page of the cache. Default: 32 on CPUs, 128 on TPUs, 16 on GPUs.",
        "--page-len",
        "--block-size",
        is_rare=True,
    )
    cache_bytes: Bytes | None = option(
        "Memory of the cache on each device, such as 4GB. Default: what the weights leave.",
        "--cache-bytes",
        "--kv-cache-memory",
    )
    host_cache_bytes: Bytes = option(
        "Host memory for pages of prompts that are evicted from the devices, such as 16GB.", default=0, is_rare=True
    )
    cache_dtype: Literal["auto", "bf16", "fp32", "int8", "fp8"] = option(
        "Dtype of keys and values; auto: the weights'.", "--cache-dtype", "--kv-cache-dtype", default="auto"
    )
    weights: WeightStorage = option("How weights are stored.", "--weights", "--quantization", default="as they are")
    draft: str | None = option(
        "What drafts tokens that a step checks together: ngram, or the folder of a smaller model with the same tokens.",
        "--draft", "--speculative-model")  # fmt: skip
    num_drafts: Count = option(
        "Tokens that --draft proposes in each step.",
        "--num-drafts",
        "--num-speculative-tokens",
        default=4,
        needs={"draft": "--draft"},
        is_rare=True,
    )
    policy: Literal["chunked", "interleaved", "static"] = option(
        "How requests share steps.", default="chunked", is_rare=True
    )
    batch_invariant: bool = option("Results that do not depend, bit for bit, on what else runs.", is_rare=True)
    adapters: tuple[str, ...] = option(
        "Adapters in PEFT's format, which requests choose by name as their model.",
        "--adapters",
        "--lora-modules",
        metavar="NAME=FOLDER ...",
    )
    no_prefix_cache: bool = option(
        "Recompute shared prefixes instead of reusing their pages.",
        "--no-prefix-cache",
        "--no-enable-prefix-caching",
        is_rare=True,
    )


def open_given(
    given: EngineGiven, source: "ModelFolder | None" = None, *, in_background: bool = True
) -> "OpenedEngine":
    """Opens the engine of the options, of ``source`` if the folder is open already, and prints its properties."""
    options = opened_options(given)
    from meshwright.serve.opening import open_engine

    opened_engine = open_engine(source or given.what, options, in_background=in_background)
    say_all(opened_engine.lines)
    return opened_engine


def say_all(lines: Sequence[str]) -> None:
    """Prints lines on standard error, wrapped to the width of the terminal."""
    for line in lines:
        say(filled(line, width(), 2))


def opened_options(given: EngineGiven) -> EngineOptions:
    """Returns the options of an engine after `prepare_devices`. Raises InputError for --axes beside --plan."""
    if given.plan and given.axes:
        raise InputError(f"{given.plan} states the axes. Leave out --axes or --plan.")
    prepare_devices(given.on, given.axes)
    return engine_options(given, given.axes)


def engine_options(given: EngineGiven, mesh: dict[str, int] | None) -> EngineOptions:
    """Returns the options of an engine on ``mesh`` from those of the command line. Raises InputError for a cache of 0
    bytes."""
    if given.cache_bytes == 0:
        raise InputError("a cache of 0 bytes holds no page. Give --cache-bytes such as 4GB, or leave it out.")
    value_by_name = vars(given) | {
        "cache_dtype": None if given.cache_dtype == "auto" else given.cache_dtype,
        "weights": weight_dtype(given.weights),
        "prefix_cache": not given.no_prefix_cache and given.policy != "static",
        "mesh": mesh,
        "num_devices": given.on.num_chips if given.on else 0,
        "adapters": folders_by_name(given.adapters),
    }
    field_names = EngineOptions.__struct_fields__
    return EngineOptions(**{name: value_by_name[name] for name in field_names if value_by_name.get(name) is not None})


def folders_by_name(pairs: Sequence[str]) -> dict[str, Path]:
    """Returns the folders of ``NAME=FOLDER`` pairs by name. Raises InputError for a pair without a name or folder, and
    for a name that occurs twice."""
    folder_by_name = dict[str, Path]()
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder or name in folder_by_name:
            fault = "is there twice" if name in folder_by_name else "is not NAME=FOLDER"
            raise InputError(f"--adapters {pair} {fault}. Give each adapter a name of its own, such as sql=./sql-lora.")
        folder_by_name[name] = Path(folder).expanduser()
    return folder_by_name


def prepare_devices(cluster: Cluster | None, axes: dict[str, int] | None) -> None:
    """Emulates devices for ``--on cpu:N``. Raises InputError if ``--axes`` and ``--on`` differ, CannotRunError if this
    machine has too few devices."""
    needed = math.prod(make_mesh(axes).values()) if axes else None
    flags = f"--on {cluster.short_name}" if cluster else ""
    if axes:
        flags = f"--axes {','.join(f'{axis}={size}' for axis, size in axes.items())}"
    if cluster is not None:
        if needed is not None and needed != cluster.num_chips:
            raise InputError(
                f"{flags} is {needed} devices and --on {cluster.short_name} is {cluster.num_chips}. Make the two agree."
            )
        needed = cluster.num_chips
        if cluster.kind == "host":
            from meshwright.parallel.mesh import emulate_devices

            emulate_devices(needed)
    import jax

    num_own = len(jax.devices())
    if cluster is not None and cluster.kind != "host" and jax.devices()[0].platform == "cpu":
        raise CannotRunError(
            f"{cluster.short_name} is not this machine, which has {num_own} of platform cpu. Use --on cpu:8 to emulate."
        )
    if needed is not None and needed > num_own:
        raise CannotRunError(
            f"{flags} is {needed} devices and this machine has {num_own}. Use smaller axes, or emulate them: "
            f"--on cpu:{needed}."
        )
