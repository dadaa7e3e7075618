"""Opens a folder as an engine: what of the memory its pages get, and the longest request that they allow."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread, main_thread
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.algebra.generation import CACHE_DTYPES, Storage, cache_table
from meshwright.batching.limits import Policy, SchedulerLimits
from meshwright.core.errors import InputError, nearest
from meshwright.core.fields import Checked, check_figures
from meshwright.core.files import cache_folder
from meshwright.core.host_memory import keep_freed_memory
from meshwright.core.units import format_bytes
from meshwright.nn.hf.weights import load_params
from meshwright.parallel.generation.packed_step import ALIKE_ROWS, PackedStep
from meshwright.serve.engine import Engine
from meshwright.serve.model_folder import ModelFolder, open_model
from meshwright.spec.model import Model
from meshwright.spec.strategy import Strategy, make_mesh, mesh_words
from meshwright.spec.weights import num_params, without_mtp_words


class EngineOptions(Checked, frozen=True, kw_only=True):
    """How a folder is served; 0 and "" stand for a value that suits the devices.

    ``max_len``: positions of a request, at most the model's. ``max_requests``: requests that run at once, by default
    256, 32 on CPUs. ``token_budget``: rows of a step, by default 2,048, 256 on CPUs. ``page_len``: positions of a page,
    by default 32 on CPUs, 128 on TPUs, 16 on GPUs. ``cache_bytes`` of each device hold pages: by default 90% of what
    the weights leave of an accelerator's memory, or half of a machine's free memory, but no more than all requests need
    at their longest. ``host_cache_bytes`` of the host hold pages of prompts that lost their room. ``weights`` is "int8"
    or "". ``mesh`` is {"tensor": devices} by default. ``prefix_cache``: see `batching.limits.SchedulerLimits`.
    ``batch_invariant``: see `PackedStep`; up to 32 requests then run at once, in steps of 32 tokens.
    """

    max_len: int = 0
    max_requests: int = 0
    token_budget: int = 0
    page_len: int = 0
    cache_bytes: float = 0
    host_cache_bytes: float = 0
    cache_dtype: str = ""
    weights: str = ""
    policy: Policy = "chunked"
    prefix_cache: bool = True
    batch_invariant: bool = False
    mesh: dict[str, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        zero = ("max_len", "max_requests", "token_budget", "cache_bytes", "host_cache_bytes", "page_len")
        check_figures(self, "EngineOptions", may_be_zero=zero)
        if self.cache_dtype not in ("", *CACHE_DTYPES):
            raise InputError(f"cache dtype {self.cache_dtype!r} is not known.{nearest(self.cache_dtype, CACHE_DTYPES)}")


PAGE_LENS = {"cpu": 32, "tpu": 128}
"""Positions of a page by platform: what its attention reads at once."""

USUAL_ENGINE = EngineOptions()


class OpenedEngine(NamedTuple):
    """An engine with the folder it is of, and lines that say what it has."""

    source: ModelFolder
    engine: Engine
    lines: tuple[str, ...]


def open_engine(
    folder: Path | str,
    options: EngineOptions = USUAL_ENGINE,
    *,
    on_shape: Callable[[int, int], None] | None = None,
    in_background: bool = True,
) -> OpenedEngine:
    """Loads a folder, a finished run or a Hugging Face model, and compiles every shape of its steps.

    ``on_shape`` is told how many shapes are compiled, of how many. Programs that are in files are read while the engine
    runs already, if that may be done ``in_background``. Raises InputError for options that contradict the
    model or the memory, CannotRunError for a model that cannot be served.
    """
    keep_freed_memory()
    source = open_model(Path(folder))
    devices = jax.devices()
    mesh = make_mesh(options.mesh or {"tensor": len(devices)})
    strategy = Strategy(mesh=mesh, state="fp32" if source.dtype == "fp32" else "bf16-adam")
    on_cpu = devices[0].platform == "cpu"
    max_requests = options.max_requests or (32 if on_cpu else 256)
    usual = ALIKE_ROWS if options.batch_invariant else 256 if on_cpu else 2048
    budget = options.token_budget or max(usual, max_requests)
    storage = Storage(
        cache_dtype=options.cache_dtype or source.dtype,  # type: ignore[arg-type]
        weights=options.weights,  # type: ignore[arg-type]
        page_len=options.page_len or PAGE_LENS.get(devices[0].platform, 16),
    )
    found = _pages(source.model, options, strategy, storage, max_requests)
    storage = Storage(
        cache_dtype=storage.cache_dtype, weights=storage.weights, page_len=storage.page_len, num_pages=found.num_pages
    )
    step = PackedStep(
        source.model,
        strategy,
        max_len=found.max_len,
        max_seqs=max_requests,
        storage=storage,
        batch_invariant=options.batch_invariant,
    )
    step.keep_programs(cache_folder() / "programs")
    dtype = jnp.float32 if source.dtype == "fp32" else jnp.bfloat16
    params = step.place(load_params(source.model, source.folder, step.loaded_shardings, dtype))
    limits = SchedulerLimits(
        policy=options.policy,
        max_requests=max_requests,
        token_budget=budget,
        page_len=storage.page_len,
        num_pages=found.num_pages,
        prefix_cache=options.prefix_cache,
    )
    engine = Engine(step, params, limits, host_cache_bytes=options.host_cache_bytes)
    if in_background and engine.is_compiled:
        # programs are read while the first requests run; a process that ends waits for one of them at most
        Thread(target=engine.warm_up, args=[_while_running], name="programs").start()
    else:
        engine.warm_up(on_shape or (lambda done, all: None))
    held = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(params))
    lines = (
        f"{source.model.name}: {mesh_words(mesh)}, {format_bytes(held)} of weights on each device"
        f"{without_mtp_words(source.model)}",
        f"cache: {found.num_pages:,} pages of {storage.page_len} positions, {format_bytes(found.bytes)} of "
        f"{storage.cache_dtype} keys and values on each device, limited by {found.limited_by}"
        + (f"; {format_bytes(options.host_cache_bytes)} on the host" if options.host_cache_bytes else ""),
        f"up to {max_requests} requests at once of {found.max_len:,} positions at most; {budget} rows a step",
    )
    return OpenedEngine(source, engine, lines)


def _while_running(done: int, all: int) -> None:
    if not main_thread().is_alive():
        sys.exit()


class _FoundPages(NamedTuple):
    num_pages: int
    max_len: int
    bytes: float
    limited_by: str


def _pages(
    model: Model, options: EngineOptions, strategy: Strategy, storage: Storage, max_requests: int
) -> _FoundPages:
    """Returns how many pages there are, and how long a request may be."""
    if options.max_len > model.max_positions:
        raise InputError(
            f"max_len={options.max_len:,}, but {model.name} has {model.max_positions:,} positions. Give at most that."
        )
    longest, page_len = options.max_len or model.max_positions, storage.page_len
    one = Storage(cache_dtype=storage.cache_dtype, weights=storage.weights, page_len=page_len, num_pages=1)
    table = cache_table(model, batch_seqs=1, max_len=page_len, storage=one, strategy=strategy, phase="packed")
    split = strategy.mesh["tensor"] if not model.latent_attention else 1
    page_bytes = sum(row.num_bytes for row in table) / split
    each, given = -(-longest // page_len), options.cache_bytes
    there, limited_by = (given, "cache_bytes") if given else _free_bytes(model, strategy)
    most, wanted = int(there // page_bytes), max_requests * each
    if wanted <= most:
        return _FoundPages(wanted, longest, wanted * page_bytes, f"{max_requests} requests of {longest:,} positions")
    if most < 1 or (options.max_len and most < each):
        raise InputError(
            f"{format_bytes(there)} ({limited_by}) hold {most:,} pages of {page_len} positions; one request of "
            f"{longest:,} positions needs {each:,}, {format_bytes(each * page_bytes)}. Give a smaller max_len, more "
            f"cache_bytes, or a cache in int8."
        )
    return _FoundPages(most, min(longest, most * page_len), most * page_bytes, limited_by)


def _free_bytes(model: Model, strategy: Strategy) -> tuple[float, str]:
    """Returns the bytes of a device that pages may have, and their name."""
    device: Any = jax.devices()[0]
    if device.platform == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return free / 2 / strategy.num_chips, "half of the free memory"
    stats = device.memory_stats() or {}
    weights = num_params(model) * (4 if strategy.state_dtype == "fp32" else 2) / strategy.num_chips
    return max(0.0, 0.9 * stats.get("bytes_limit", 0) - weights), "90% of the device's memory without the weights"
