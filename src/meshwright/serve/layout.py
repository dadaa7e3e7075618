"""How a folder is to be served, and the engines and meshes that its devices make up."""

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.algebra.generation import Storage
from meshwright.batching.limits import Policy
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.fields import Checked, check_figures
from meshwright.masks.names import mask_named
from meshwright.parallel.generation.packed_step import ALIKE_ROWS
from meshwright.parallel.mesh import in_order
from meshwright.serve.model_folder import ModelFolder
from meshwright.spec.model import Model
from meshwright.spec.strategy import LAYOUTS, Strategy, make_mesh, mesh_words, sequence_shards


class EngineOptions(Checked, frozen=True, kw_only=True):
    """How a folder is served; 0 and "" stand for a value that suits the devices.

    ``max_len``: positions of a request, at most the model's. ``max_requests``: requests that run at once, by default
    256, 32 on CPUs. ``token_budget``: rows of a step, by default 2,048, 256 on CPUs, for each place with requests of
    its own. ``page_len``: positions of a page, by default 32 on CPUs, 128 on TPUs, 16 on GPUs, on each device that has
    part of it. ``cache_bytes`` of each device hold pages: by default 90% of what the weights leave of an accelerator's
    memory, or half of a machine's free memory, but no more than all requests need at their longest.
    ``host_cache_bytes`` of the host hold pages of prompts that lost their room.
    ``weights`` are stored in "int8", "fp8", "int4" or as they are (""). ``plan`` is a file of `plan --serve`, which
    says the mesh, and what is not given of these. ``mesh`` has an engine for each of ``data``; by default see
    `usual_mesh`, on the first ``num_devices`` (0: all). ``prefix_cache``: see `batching.limits.SchedulerLimits`.
    ``batch_invariant``: see `PackedStep`; up to 32 requests then run at once, in steps of 32 tokens. ``draft``:
    "ngram", or the folder of a smaller model with the same tokens, which proposes ``num_drafts`` tokens for each step
    of a request; see `drawing.drafts`. ``adapters`` of the model are the folders of their weights by the name that
    requests give.
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
    adapters: dict[str, Path] | None = None
    num_devices: int = 0
    plan: Path | None = None
    draft: str = ""
    num_drafts: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        zero = ("max_len", "max_requests", "token_budget", "cache_bytes", "host_cache_bytes", "page_len", "num_devices")
        check_figures(self, "EngineOptions", may_be_zero=zero)
        _ = Storage(cache_dtype=self.cache_dtype or "bf16", weights=self.weights).executed  # type: ignore[arg-type]

    @property
    def drafts(self) -> int:
        """Tokens that are drafted for each step of a request."""
        return self.num_drafts if self.draft else 0


PAGE_LENS = {"cpu": 32, "tpu": 128}
"""Positions of a page by platform: what its attention reads at once."""

USUAL_ENGINE = EngineOptions()


class EngineLayout(NamedTuple):
    """The strategy of each of some engines; the options, with what a plan says and what suits the devices in place of 0
    and ""; and how many engines the plan has."""

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


def engine_layout(source: ModelFolder, options: EngineOptions, devices: Sequence[Any]) -> EngineLayout:
    """Returns the engines for devices: those of a plan, of a mesh, or else of the planner where it knows the devices.

    Raises InputError for a plan of another model, CannotRunError for more devices than there are.
    """
    state = "fp32" if source.dtype == "fp32" else "bf16-adam"
    if options.plan is not None:
        found = _of_plan(source.model, options, len(devices))
    elif options.mesh is None and len(devices) > 1 and (planned := _planned(source.model, options, devices)):
        found = planned
    else:
        mesh = make_mesh(options.mesh or usual_mesh(source.model, len(devices)))
        # weights are gathered where fsdp splits them alone
        rules = LAYOUTS["gathered" if mesh["fsdp"] > 1 else "prompts"]
        found = EngineLayout(Strategy(mesh={**mesh, "data": 1}, assignment=rules), mesh["data"], options)
    strategy = msgspec.structs.replace(found.strategy, state=state, precision="")
    needed = strategy.num_chips * found.num_engines
    if needed > len(devices):
        raise CannotRunError(
            f"{found.words}: {needed} devices are needed, and there are {len(devices)}. Plan for these, use smaller "
            f"axes, or emulate them: --on cpu:{needed}."
        )
    mask = source.model.attention_mask
    if mask and set(mask_named(mask).data) - {"lengths"}:  # positions of a prompt may see later ones
        found = found._replace(options=msgspec.structs.replace(found.options, policy="interleaved", prefix_cache=False))
    return found._replace(
        strategy=strategy, options=with_usual(found.options, devices[0].platform, source.dtype, strategy)
    )


def with_usual(options: EngineOptions, platform: str, dtype: str, strategy: Strategy) -> EngineOptions:
    """Returns options with what suits a platform, weights and a strategy in place of 0 and "".

    Raises InputError for requests that do not divide over the places that have sequences of their own.
    """
    owners = sequence_shards(strategy)
    if options.max_requests % owners:
        raise InputError(
            f"max_requests={options.max_requests} must divide over the {owners} places of {mesh_words(strategy.mesh)} "
            f"that have requests of their own. Give a multiple of {owners}."
        )
    on_cpu, each = platform == "cpu", 1 + options.drafts
    most, rows = (ALIKE_ROWS // each, ALIKE_ROWS) if options.batch_invariant else (32, 256) if on_cpu else (256, 2048)
    max_requests = options.max_requests or -(-most // owners) * owners
    return msgspec.structs.replace(
        options,
        max_requests=max_requests,
        token_budget=options.token_budget or max(rows * owners, max_requests * each),
        page_len=options.page_len or PAGE_LENS.get(platform, 16) * sequence_shards(strategy, "S"),
        cache_dtype=options.cache_dtype or dtype,
    )


def usual_mesh(model: Model, num_devices: int) -> dict[str, int]:
    """Returns the mesh for devices that no plan is for: tensor as far as it divides heads and widths, else data."""
    tensor = math.gcd(num_devices, *(model.dims[dim] for dim in ("N", "K", "F", "Fe", "Fs") if dim in model.dims))
    return {"data": num_devices // tensor, "tensor": tensor}


USUAL_PROMPT, USUAL_OUTPUT = 1024, 256
"""Tokens of the requests that devices without a plan are planned for."""


def _planned(model: Model, options: EngineOptions, devices: Sequence[Any]) -> EngineLayout | None:
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
        return EngineLayout(pool.strategy, pool.num_engines, options) if pool else None
    return None


def _of_plan(model: Model, options: EngineOptions, num_devices: int) -> EngineLayout:
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
    return EngineLayout(
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
