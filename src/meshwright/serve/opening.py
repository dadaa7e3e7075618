"""Opens a folder as an engine: what of the memory its pages get, and the longest request that they allow."""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread, main_thread
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec

from meshwright.algebra.generation import CACHE_DTYPES, Storage, cache_table, derive_phase
from meshwright.algebra.notation import ShardedArray, local_elements, product
from meshwright.algebra.rewrites.repeated_heads import strategy_of_heads
from meshwright.algebra.transformer import weight_variables
from meshwright.batching.limits import Policy, SchedulerLimits
from meshwright.core.errors import CannotRunError, InputError, nearest
from meshwright.core.fields import Checked, check_figures
from meshwright.core.files import cache_folder
from meshwright.core.host_memory import keep_freed_memory
from meshwright.core.units import format_bytes
from meshwright.nn.hf.weights import load_params
from meshwright.parallel.generation.packed_step import ALIKE_ROWS, PackedStep
from meshwright.parallel.mesh import in_order
from meshwright.serve.engine import Engine, EngineGroup
from meshwright.serve.model_folder import ModelFolder, open_model
from meshwright.spec.model import Model
from meshwright.spec.strategy import LAYOUTS, Strategy, held_dims, make_mesh, mesh_words
from meshwright.spec.weights import without_mtp_words


class EngineOptions(Checked, frozen=True, kw_only=True):
    """How a folder is served; 0 and "" stand for a value that suits the devices.

    ``max_len``: positions of a request, at most the model's. ``max_requests``: requests that run at once, by default
    256, 32 on CPUs. ``token_budget``: rows of a step, by default 2,048, 256 on CPUs. ``page_len``: positions of a page,
    by default 32 on CPUs, 128 on TPUs, 16 on GPUs. ``cache_bytes`` of each device hold pages: by default 90% of what
    the weights leave of an accelerator's memory, or half of a machine's free memory, but no more than all requests need
    at their longest. ``weights`` is "int8" or "". ``mesh`` has an engine for each of ``data``; it is planned by default
    for the first ``num_devices`` (0: all). ``plan`` is a file of `plan --serve`, which says the mesh and what is not
    given of these. ``prefix_cache``: see `batching.limits.SchedulerLimits`. ``batch_invariant``: see `PackedStep`; up
    to 32 requests then run at once, in steps of 32 tokens.
    """

    max_len: int = 0
    max_requests: int = 0
    token_budget: int = 0
    page_len: int = 0
    cache_bytes: float = 0
    cache_dtype: str = ""
    weights: str = ""
    policy: Policy = "chunked"
    prefix_cache: bool = True
    batch_invariant: bool = False
    mesh: dict[str, int] | None = None
    num_devices: int = 0
    plan: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        zero = ("max_len", "max_requests", "token_budget", "cache_bytes", "page_len", "num_devices")
        check_figures(self, "EngineOptions", may_be_zero=zero)
        if self.cache_dtype not in ("", *CACHE_DTYPES):
            raise InputError(f"cache dtype {self.cache_dtype!r} is not known.{nearest(self.cache_dtype, CACHE_DTYPES)}")


PAGE_LENS = {"cpu": 32, "tpu": 128}
"""Positions of a page by platform: what its attention reads at once."""

USUAL_ENGINE = EngineOptions()


class OpenedEngine(NamedTuple):
    """An engine, or a group of them, with the folder it is of, and lines that say what it has."""

    source: ModelFolder
    engine: Engine | EngineGroup
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
    devices = jax.devices()[: options.num_devices or None]
    layout = _layout(source, options, devices)
    strategy, options, parts = layout.strategy, layout.options, list[Sequence[Any] | None]([None])
    if layout.num_engines > 1:
        each, ordered = strategy.num_chips, in_order(devices) or devices
        parts = [ordered[number * each : (number + 1) * each] for number in range(layout.num_engines)]
    on_cpu = devices[0].platform == "cpu"
    max_requests = options.max_requests or (32 if on_cpu else 256)
    usual = ALIKE_ROWS if options.batch_invariant else 256 if on_cpu else 2048
    budget = options.token_budget or max(usual, max_requests)
    storage = Storage(
        cache_dtype=options.cache_dtype or source.dtype,  # type: ignore[arg-type]
        weights=options.weights,  # type: ignore[arg-type]
        page_len=options.page_len or PAGE_LENS.get(devices[0].platform, 16),
    )
    found = _pages(source.model, options, layout, storage, max_requests)
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
    limits = SchedulerLimits(
        policy=options.policy,
        max_requests=max_requests,
        token_budget=budget,
        page_len=storage.page_len,
        num_pages=found.num_pages,
        prefix_cache=options.prefix_cache,
    )
    dtype, engines = jnp.float32 if source.dtype == "fp32" else jnp.bfloat16, list[Engine]()
    for part in parts:
        own = step.on(part) if part else step
        own.keep_programs(cache_folder() / "programs")
        params = own.place(load_params(source.model, source.folder, own.loaded_shardings, dtype))
        engines.append(Engine(own, params, limits))
    engine = engines[0] if len(engines) == 1 else EngineGroup(engines)
    if in_background and engine.is_compiled:
        # programs are read while the first requests run; a process that ends waits for one of them at most
        Thread(target=engine.warm_up, args=[_while_running], name="programs").start()
    else:
        engine.warm_up(on_shape or (lambda done, all: None))
    held = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(params))
    lines = (
        f"{source.model.name}: {layout.words}, {format_bytes(held)} of weights on each device"
        f"{without_mtp_words(source.model)}",
        f"cache: {found.num_pages:,} pages of {storage.page_len} positions, {format_bytes(found.bytes)} of "
        f"{storage.cache_dtype} keys and values on each device, limited by {found.limited_by}",
        f"up to {max_requests} requests at once of {found.max_len:,} positions at most; {budget} rows a step"
        + " of each engine" * (len(engines) > 1),
    )
    return OpenedEngine(source, engine, lines)


def _while_running(done: int, all: int) -> None:
    if not main_thread().is_alive():
        sys.exit()


# -- engines and devices -----------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """The strategy of each of some engines, the options with what a plan says, and how many engines it has."""

    strategy: Strategy
    num_engines: int
    options: EngineOptions
    num_planned: int = 1

    @property
    def words(self) -> str:
        """Says the mesh."""
        all = f" of {self.num_planned}" * (self.num_planned > self.num_engines)
        count = f"{self.num_engines}{all} engines of " * bool(all or self.num_engines > 1)
        return count + mesh_words(self.strategy.mesh)


def _layout(source: ModelFolder, options: EngineOptions, devices: Sequence[Any]) -> _Layout:
    state = "fp32" if source.dtype == "fp32" else "bf16-adam"
    if options.plan is not None:
        found = _of_plan(source.model, options, len(devices))
    elif options.mesh is None and len(devices) > 1 and (planned := _planned(source.model, options, devices)):
        found = planned
    else:
        mesh = make_mesh(options.mesh or _usual(source.model, len(devices)))
        # weights are gathered where fsdp splits them alone
        rules = LAYOUTS["gathered" if mesh["fsdp"] > 1 else "prompts"]
        found = _Layout(Strategy(mesh={**mesh, "data": 1}, assignment=rules), mesh["data"], options)
    strategy = msgspec.structs.replace(found.strategy, state=state, precision="")
    needed = strategy.num_chips * found.num_engines
    if needed > len(devices):
        raise CannotRunError(
            f"{found.words}: {needed} devices are needed, and there are {len(devices)}. Plan for these, use smaller "
            f"axes, or emulate them: --on cpu:{needed}."
        )
    return found._replace(strategy=strategy)


def _usual(model: Model, num_devices: int) -> dict[str, int]:
    """Returns the mesh for devices that no plan is for: tensor as far as it divides heads and widths, else data."""
    tensor = math.gcd(num_devices, *(model.dims[dim] for dim in ("N", "K", "F", "Fe", "Fs") if dim in model.dims))
    return {"data": num_devices // tensor, "tensor": tensor}


USUAL_PROMPT, USUAL_OUTPUT = 1024, 256
"""Tokens of the requests that devices without a plan are planned for."""


def _planned(model: Model, options: EngineOptions, devices: Sequence[Any]) -> _Layout | None:
    """Returns what the planner finds for chips of the catalogue: the most tokens a second without pools; None for
    other devices, and where it finds nothing."""
    from meshwright.plan.serving.planner import plan_service, service_setting
    from meshwright.plan.serving.service import Service
    from meshwright.plan.serving.storing import StoredDtypes
    from meshwright.spec.chip import chip_of_kind
    from meshwright.spec.cluster import make_cluster

    prompt = min(USUAL_PROMPT, model.max_positions // 2)
    service = Service(prompt_len=prompt, output_len=min(USUAL_OUTPUT, model.max_positions - prompt))
    stored = StoredDtypes(options.weights or "bf16", "int8" if options.cache_dtype == "int8" else "bf16")
    with suppress(InputError, CannotRunError):
        chip = chip_of_kind(devices[0].device_kind)
        ends = [len(set(places)) for places in zip(*(each.coords for each in in_order(devices)), strict=True)]
        shape = tuple(size for size in ends if size > 1) if chip.topology == "torus" else (len(devices), 1)
        found = plan_service(service_setting(model, make_cluster(chip, shape)), service, stored=[stored])
        pool = next((one.generate for one in found.plans if not one.has_pools), None)
        return _Layout(pool.strategy, pool.num_engines, options) if pool else None
    return None


def _of_plan(model: Model, options: EngineOptions, num_devices: int) -> _Layout:
    """Returns what a plan says, with the engines that there are devices for; those that generate prefill too."""
    from meshwright.plan.serving.file import load_service

    assert options.plan is not None
    found = load_service(options.plan)
    for name, planned in found.model.dims.items():
        if planned != (own := model.dims.get(name)):
            raise InputError(
                f"{options.plan} is for {found.model.name}, whose {name} is {planned}; that of {model.name} is {own}. "
                f"Plan for this model, or give its folder."
            )
    pool, stored = found.generate, found.stored.storage
    return _Layout(
        pool.strategy,
        max(1, min(pool.num_engines, num_devices // pool.strategy.num_chips)),
        msgspec.structs.replace(
            options,
            max_len=options.max_len or min(found.service.max_len, model.max_positions),
            max_requests=options.max_requests or pool.batch_seqs,
            weights=options.weights or stored.weights,
            # bf16 is planned where it is the weights' own
            cache_dtype=options.cache_dtype or stored.cache_dtype.removeprefix("bf16"),
        ),
        pool.num_engines,
    )


# -- pages -------------------------------------------------------------------------------------------------


class _FoundPages(NamedTuple):
    num_pages: int
    max_len: int
    bytes: float
    limited_by: str


def _pages(model: Model, options: EngineOptions, layout: _Layout, storage: Storage, max_requests: int) -> _FoundPages:
    """Returns how many pages there are, and how long a request may be."""
    if options.max_len > model.max_positions:
        raise InputError(
            f"max_len={options.max_len:,}, but {model.name} has {model.max_positions:,} positions. Give at most that."
        )
    longest, page_len = options.max_len or model.max_positions, storage.page_len
    one = Storage(cache_dtype=storage.cache_dtype, weights=storage.weights, page_len=page_len, num_pages=1)
    strategy = strategy_of_heads(layout.strategy, model.num_kv_heads)
    table = cache_table(model, batch_seqs=1, max_len=page_len, storage=one, strategy=strategy, phase="packed")
    declared = derive_phase(model, "packed", strategy, one).declared
    spread = product(strategy.mesh[axis] for axis in declared[table[0].name].axes_of("Pg"))
    # bytes of a page on each of the devices over which pages are spread: a device has one of so many
    page_bytes = sum(row.num_bytes / product(strategy.mesh[a] for a in declared[row.name].spread) for row in table)
    each, given = -(-longest // page_len), options.cache_bytes
    there, limited_by = (given, "cache_bytes") if given else _free_bytes(model, layout, declared)
    most, wanted = int(there // page_bytes) // spread * spread, -(-max_requests * each // spread) * spread
    if wanted <= most:
        return _FoundPages(wanted, longest, wanted * page_bytes, f"{max_requests} requests of {longest:,} positions")
    if most < 1 or (options.max_len and most < each):
        raise InputError(
            f"{format_bytes(there)} ({limited_by}) hold {most:,} pages of {page_len} positions; one request of "
            f"{longest:,} positions needs {each:,}, {format_bytes(each * page_bytes)}. Give a smaller max_len, more "
            f"cache_bytes, or a cache in int8."
        )
    return _FoundPages(most, min(longest, most * page_len), most * page_bytes, limited_by)


def _free_bytes(model: Model, layout: _Layout, declared: Mapping[str, ShardedArray]) -> tuple[float, str]:
    """Returns the bytes of a device that pages may have, and their name."""
    device, mesh = jax.devices()[0], layout.strategy.mesh
    if device.platform == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return free / 2 / (layout.strategy.num_chips * layout.num_engines), "half of the free memory"
    stats: Any = device.memory_stats() or {}
    sizes = held_dims(model.dims, mesh)
    repeats = {name: repeat for name, (_, repeat) in weight_variables(model).items() if name in declared}
    own = sum(repeat * local_elements(declared[name], sizes, mesh) for name, repeat in repeats.items())
    weights = own * (4 if layout.strategy.state_dtype == "fp32" else 2)
    return max(0.0, 0.9 * stats.get("bytes_limit", 0) - weights), "90% of the device's memory without the weights"
