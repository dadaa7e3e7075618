"""Opens a folder as an engine; sizes the page cache for the memory, and the longest request that fits."""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Thread, main_thread
from typing import NamedTuple

import jax
import jax.numpy as jnp
from msgspec.structs import replace

from meshwright.algebra.generation.cache import cache_table, pages_of_windows, source_len
from meshwright.algebra.generation.derive import derive_encoding, derive_generation
from meshwright.algebra.generation.program import Storage
from meshwright.algebra.generation.stored import quantised_weights, weight_bytes
from meshwright.algebra.notation import ShardedArray, local_elements, product
from meshwright.algebra.rewrites.repeated_heads import strategy_of_heads
from meshwright.algebra.transformer import weight_variables
from meshwright.batching.limits import SchedulerLimits
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError
from meshwright.core.files import cache_folder
from meshwright.core.host_memory import keep_freed_memory
from meshwright.core.progress import working
from meshwright.core.units import counted, format_bytes
from meshwright.nn.hf.weights import load_params
from meshwright.nn.weights import Params
from meshwright.parallel.generation.packed_step import PackedStep
from meshwright.parallel.mesh import device_mesh, in_order
from meshwright.serve.drawing.drafts import Drafter, ModelDrafter, NgramDrafter
from meshwright.serve.engine import Engine
from meshwright.serve.group import EngineGroup
from meshwright.serve.layout import EngineLayout, engine_layout
from meshwright.serve.model_folder import ModelFolder, open_model
from meshwright.serve.options import USUAL_ENGINE, EngineOptions
from meshwright.serve.request import RequestBounds, TokenRequest
from meshwright.spec.model import GROUP, GROUPED, Model
from meshwright.spec.strategy import STATE_BYTES, Strategy, held_dims, make_mesh, sequence_shards
from meshwright.spec.weights import without_mtp_words

LEAST_LEN, LEN_STEP = 256, 1024
"""Positions of an engine for given requests are at least the first figure; up to the second they are a power of two,
beyond it a multiple of it."""

MOST_EXACTLY = 32
"""An engine for up to this many given requests has a slot for each; for more it has the usual number of slots."""


class OpenedEngine(NamedTuple):
    """An engine or group of engines, the model folder that it serves, and lines that describe it."""

    source: ModelFolder
    engine: Engine | EngineGroup
    lines: tuple[str, ...]


def open_engine(
    folder: Path | str | ModelFolder,
    options: EngineOptions = USUAL_ENGINE,
    *,
    in_background: bool = True,
    requests: Sequence[TokenRequest] = (),
) -> OpenedEngine:
    """Loads a folder (a finished run or a Hugging Face model; of an open `ModelFolder` with the adapters that it has)
    and compiles the shapes of its steps.

    ``in_background`` waits only for the two shapes that fit every step, and compiles the rest in a thread while the
    engine runs. With ``requests`` the engine gets two shapes and, unless ``options`` set them, the slots and positions
    that these need. Raises InputError for options that contradict the model or the memory, CannotRunError for a model
    that cannot be served.
    """
    keep_freed_memory()  # else glibc returns each step's scratch memory, and the kernel clears it again
    source = folder if isinstance(folder, ModelFolder) else open_model(Path(folder), options.adapters or {})
    if requests:
        bounds = RequestBounds.of(source.model, 0)
        requests = [bounds.resolved(request) for request in requests]
        options = _options_for(requests, options, source.model.max_positions)
    if source.model.encoder:  # the decoder's keys depend on the source
        options = replace(options, prefix_cache=False)
    devices = jax.devices()[: options.num_devices or None]
    layout = engine_layout(source, options, devices)
    options, strategy = layout.options, layout.strategy
    draft_source = None if options.draft in ("", NGRAM) else _draft_model(Path(options.draft), source.model)
    source = source.served(options.weights, devices[0].platform)
    draft_source = draft_source and draft_source.served(options.weights, devices[0].platform)
    storage = _storage(source, options, sequence_shards(strategy))
    found_pages = _pages(source.model, draft_source, layout, storage)
    limits = SchedulerLimits(
        policy=options.policy,
        max_requests=options.max_requests,
        token_budget=options.token_budget,
        page_len=options.page_len,
        num_pages=found_pages.num_pages,
        prefix_cache=options.prefix_cache,
        num_drafts=options.drafts,
    )
    step = PackedStep(
        source.model,
        strategy,
        max_len=found_pages.max_len,
        max_seqs=options.max_requests,
        storage=replace(storage, num_pages=found_pages.num_pages),
        batch_invariant=options.batch_invariant,
    )
    packed_steps, num_chips = [step], strategy.num_chips
    if layout.num_engines > 1:
        ordered_devices = in_order(devices) or devices
        device_shares = (ordered_devices[i * num_chips : (i + 1) * num_chips] for i in range(layout.num_engines))
        packed_steps = [step.on(device_mesh(strategy.mesh, share)) for share in device_shares]
    engines = [_engine(source, draft_source, layout, step, limits) for step in packed_steps]
    engine = engines[0] if len(engines) == 1 else EngineGroup(engines)
    # a batch-invariant engine runs requests while it warms up
    is_first_only = in_background and not requests and not options.batch_invariant
    with working("compiling programs") as work:
        engine.warm_up(work.at, requests, first_only=is_first_only)
    if is_first_only:  # a script that ends waits for at most one program, the command line for none
        Thread(target=engine.warm_up, args=[_while_running], name="programs").start()
    return OpenedEngine(source, engine, _lines(source, layout, storage, found_pages, engines[0].weight_bytes))


def _options_for(requests: Sequence[TokenRequest], options: EngineOptions, max_positions: int) -> EngineOptions:
    """Returns options with room for ``requests``, rounded up so that similar requests reuse the compiled programs."""
    num_slots = 1 << (len(requests) - 1).bit_length() if len(requests) <= MOST_EXACTLY else 0
    needed_len = max(len(request.prompt) + request.max_tokens for request in requests)
    rounded_len = -(-needed_len // LEN_STEP) * LEN_STEP
    if needed_len <= LEN_STEP:
        rounded_len = max(1 << (needed_len - 1).bit_length(), LEAST_LEN)
    max_len = max(needed_len, min(rounded_len, max_positions))
    return replace(options, max_requests=options.max_requests or num_slots, max_len=options.max_len or max_len)


def _storage(source: ModelFolder, options: EngineOptions, num_owners: int) -> Storage:
    """Returns the storage of weights and caches, with the number of pages left unset."""
    storage = Storage(
        cache_dtype=options.cache_dtype,  # type: ignore[arg-type]
        weights=options.weights,  # type: ignore[arg-type]
        page_len=options.page_len,
        adapters=len(source.adapters),
    )
    window_len = source.model.sliding_window
    # window pages support neither host memory nor sources, and are counted for steps within the token budget
    if not window_len or source.model.encoder or options.host_cache_bytes or options.policy != "chunked":
        return storage
    pages_per_seq = -(-(options.max_len or source.model.max_positions) // options.page_len)
    num_seqs, num_rows = options.max_requests // num_owners, options.token_budget // num_owners
    num_pages = pages_of_windows(window_len, options.page_len, num_seqs=num_seqs, num_rows=num_rows)
    # more pages, which the prefix tree keeps for later prompts
    num_pages += num_pages // 2 if options.prefix_cache else 0
    # windows as long as requests would save nothing
    return replace(storage, window_pages=num_pages * num_owners if num_pages < num_seqs * pages_per_seq else 0)


def _engine(
    source: ModelFolder, draft: ModelFolder | None, layout: EngineLayout, step: PackedStep, limits: SchedulerLimits
) -> Engine:
    """Returns an engine that runs a step, with the weights loaded onto its devices, and its drafter."""
    options, params = layout.options, _loaded(source, step)
    drafter = NgramDrafter(options.num_drafts) if options.draft == NGRAM else Drafter()
    if draft:
        strategy = Strategy(mesh=make_mesh({}), state=layout.strategy.state)
        storage = replace(step.storage, adapters=0, window_pages=0)
        draft_step = PackedStep(draft.model, strategy, max_len=step.max_len, max_seqs=step.max_seqs, storage=storage)
        draft_step = draft_step.on(device_mesh(strategy.mesh, list(step.mesh.devices.flat[:1])))
        drafter = ModelDrafter(draft_step, _loaded(draft, draft_step), options.num_drafts)
    adapter_names, host_bytes = tuple(source.adapters), options.host_cache_bytes / layout.num_engines
    return Engine(step, params, limits, drafter=drafter, adapters=adapter_names, host_cache_bytes=host_bytes)


def _lines(
    source: ModelFolder, layout: EngineLayout, storage: Storage, pages: "_FoundPages", weight_bytes: int
) -> tuple[str, ...]:
    """Returns the lines that describe an engine: mesh, weights, cache, limits, differences from the plan, drafts."""
    options, model, weight_words = layout.options, source.model, without_mtp_words(source.model)
    unplanned_words = layout.unplanned_words(jax.devices()[0].device_kind, source.dtype)
    if num_adapters := len(source.adapters):
        weight_words += f", {counted(num_adapters, 'adapter')} of up to rank {model.dims['Ra'] // num_adapters}"
    group_sizes = {model.dims[dim] // model.dims[f"{dim}g"] for dim in GROUPED if model.dims.get(f"{dim}g")}
    if options.weights == "int4" and min(group_sizes) < GROUP:
        weight_words += f", a scale for each {min(group_sizes)} to {max(group_sizes)} inputs"
    source_text = f" after a source of {source_len(model):,}" * bool(model.encoder)
    return (
        f"{model.name}: {layout.words}, {format_bytes(weight_bytes)} of weights on each device{weight_words}",
        f"cache: {counted(pages.num_pages, 'page')} of {storage.page_len:,} positions, {format_bytes(pages.bytes)} of "
        f"{storage.cache_dtype} keys and values on each device, limited by {pages.limited_by}"
        + (f"; {storage.window_pages:,} pages for windows" if storage.window_pages else "")
        + (f"; {format_bytes(options.host_cache_bytes)} on the host" if options.host_cache_bytes else ""),
        f"up to {counted(options.max_requests, 'request')} at once of {pages.max_len:,} positions at most{source_text}"
        f"; {options.token_budget} rows a step" + " of each engine" * (layout.num_engines > 1),
        *([f"unlike the plan: {unplanned_words}"] if unplanned_words else []),
        *source.notes,
        *([f"{counted(options.num_drafts, 'draft')} a step and request, by {options.draft}"] if options.draft else []),
    )


NGRAM = "ngram"
"""The value of ``draft`` that drafts without a model."""


def _draft_model(folder: Path, model: Model) -> ModelFolder:
    """Opens a draft model. Raises InputError for a missing folder, encoders, another vocabulary, fewer positions."""
    if not folder.expanduser().exists():
        raise InputError(f"the draft folder {folder} does not exist. Give ngram, or the folder of a smaller model.")
    draft = open_model(folder)
    if model.encoder or draft.model.encoder:
        raise InputError(f"{model.name} or {draft.model.name} has an encoder, and drafts need none. Use --draft ngram.")
    if draft.model.vocab_size != model.vocab_size:
        raise InputError(
            f"the draft {folder} has V={draft.model.vocab_size:,} tokens and {model.name} has V={model.vocab_size:,}. "
            "Give a draft of the same family, or --draft ngram."
        )
    if draft.model.max_positions < model.max_positions:
        raise InputError(
            f"the draft {folder} has {draft.model.max_positions:,} positions and {model.name} has "
            f"{model.max_positions:,}. Give a draft with as many."
        )
    return draft


def _loaded(source: ModelFolder, step: PackedStep) -> Params:
    """Loads a folder's weights onto the devices of ``step``, and lets the step keep compiled programs in files."""
    step.keep_programs(cache_folder() / "programs")
    dtype = jnp.float32 if source.dtype == "fp32" else jnp.bfloat16
    adapter_folders = list(source.adapters.values())
    return step.place(load_params(source.model, source.folder, step.loaded_shardings, dtype, adapter_folders))


def _while_running(num_done: int, num_shapes: int) -> None:
    if not main_thread().is_alive():
        sys.exit()  # ends only this thread, for which the process waits


# -- pages -------------------------------------------------------------------------------------------------


class _FoundPages(NamedTuple):
    num_pages: int
    max_len: int
    bytes: float
    limited_by: str


def _pages(model: Model, draft: ModelFolder | None, layout: EngineLayout, storage: Storage) -> _FoundPages:
    """Returns the number of pages and the longest request that fits. Raises InputError if memory is too small."""
    options = layout.options
    if options.host_cache_bytes > (memory_bytes := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise InputError(
            f"host_cache_bytes={format_bytes(options.host_cache_bytes)} is more than this machine's memory, "
            f"{format_bytes(memory_bytes)}. Give less."
        )
    if options.max_len > model.max_positions:
        raise InputError(
            f"max_len={options.max_len:,}, but {model.name} has {model.max_positions:,} positions. Give at most that."
        )
    max_len, page_len = options.max_len or model.max_positions, storage.page_len
    one_page_storage, strategy = (
        replace(storage, num_pages=1),
        strategy_of_heads(layout.strategy, model.common_kv_heads),
    )
    make_table = partial(cache_table, batch_seqs=options.max_requests, max_len=page_len)
    rows = make_table(model, storage=one_page_storage, strategy=strategy)
    array_of = derive_generation(model, strategy, one_page_storage).declared
    if model.encoder:
        array_of = derive_encoding(model, strategy, one_page_storage).declared | array_of
    shards = product(strategy.mesh[axis] for axis in array_of[rows[0].name].axes_of("Pg"))
    # bytes of a page on each device that pages are spread over (a device has 1 of ``shards`` pages), and of all rings
    sized_rows = [(row, row.num_bytes / product(strategy.mesh[a] for a in array_of[row.name].spread)) for row in rows]
    if draft:  # the draft model has all its pages on one device
        sized_rows += [
            (row, row.num_bytes)
            for row in make_table(draft.model, storage=replace(one_page_storage, adapters=0, window_pages=0))
        ]
    page_bytes = sum(num_bytes for row, num_bytes in sized_rows if "Pg" in row.dims)
    window_bytes = sum(num_bytes for row, num_bytes in sized_rows if "Pw" in row.dims)
    space, limited_by = (options.cache_bytes, "cache_bytes")
    if not options.cache_bytes:
        space, limited_by = _free_bytes(model, layout, array_of, storage)
    if draft and not options.cache_bytes:
        space -= weight_bytes(draft.model, storage.weights, int(STATE_BYTES[layout.strategy.state]["weights"]))
    space -= window_bytes
    source_pages = -(-source_len(model) // page_len)
    needed = -(-(max_len + options.drafts) // page_len) + source_pages
    wanted_pages = -(-options.max_requests * needed // shards) * shards
    page_cap = int(space // page_bytes) // shards * shards if page_bytes else wanted_pages * (space >= 0)
    room = page_cap // shards  # pages that one request can use
    if options.max_requests > max(page_cap, 256):
        raise InputError(
            f"max_requests={options.max_requests:,} need a page each, and {page_cap:,} pages fit. Give a smaller "
            f"max_requests, or more cache_bytes."
        )
    requests_text = counted(options.max_requests, "request")
    if wanted_pages <= page_cap:
        taken_bytes = wanted_pages * page_bytes + window_bytes
        return _FoundPages(wanted_pages, max_len, taken_bytes, f"{requests_text} of {max_len:,} positions")
    if room <= source_pages or (options.max_len and room < needed):
        remedy = "a smaller max_len, more cache_bytes, or a cache in int8"
        remedy = "a smaller page_len, more cache_bytes, or both" if max_len <= page_len else remedy
        raise InputError(
            f"{format_bytes(space)} ({limited_by}) hold {counted(room, 'page')} of {page_len:,} positions; one request "
            f"of {max_len:,} positions needs {needed:,}, {format_bytes(needed * shards * page_bytes)}. Give {remedy}."
        )
    taken_bytes = page_cap * page_bytes + window_bytes
    return _FoundPages(
        page_cap, min(max_len, (room - source_pages) * page_len - options.drafts), taken_bytes, limited_by
    )


def _free_bytes(
    model: Model, layout: EngineLayout, array_of: Mapping[str, ShardedArray], storage: Storage
) -> tuple[float, str]:
    """Returns the bytes of a device that pages may use, and what limits them, in words."""
    device, mesh = jax.devices()[0], layout.strategy.mesh
    if device.platform == "cpu":
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # emulated devices share the machine's memory
        return free_bytes / 2 / (layout.strategy.num_chips * layout.num_engines), "half of the free memory"
    stats = device.memory_stats() or {}
    dims, item_bytes = held_dims(model.dims, mesh), int(STATE_BYTES[layout.strategy.state]["weights"])
    quantised_by_name = quantised_weights(model, storage.weights)
    held_bytes = 0.0
    for name, (weight, repeat) in weight_variables(model).items():
        dtype_by_name = {array.name: array.dtype for array in quantised_by_name.get(name, ())} or {name: weight.dtype}
        for part, dtype in dtype_by_name.items():
            if part in array_of:
                held_bytes += repeat * local_elements(array_of[part], dims, mesh) * DTYPE_BYTES.get(dtype, item_bytes)
    # the weights are not loaded yet, so they are subtracted
    return max(0.0, 0.9 * stats.get("bytes_limit", 0) - held_bytes), "90% of the device's memory without the weights"
