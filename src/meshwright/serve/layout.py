"""Chooses how a model folder is served on devices: the mesh and number of engines, and the values of unset options."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from jax import Device

from meshwright.core.errors import CannotRunError, InputError
from meshwright.masks.names import mask_named
from meshwright.parallel.generation.packed_step import ALIKE_ROWS
from meshwright.parallel.mesh import in_order
from meshwright.serve.model_folder import ModelFolder
from meshwright.serve.options import EngineOptions
from meshwright.spec.chip import chip_of_kind
from meshwright.spec.model import Model
from meshwright.spec.strategy import LAYOUTS, Strategy, make_mesh, mesh_words, sequence_shards

if TYPE_CHECKING:
    from meshwright.plan.plan_file import ServicePlan

PAGE_LENS = {"cpu": 32, "tpu": 128}
"""Positions of a page by platform (GPUs: 16), which attention kernels read at once."""


class EngineLayout(NamedTuple):
    """The strategy of each engine, the number of engines, the options with unset values (0, "") filled in from the plan
    or the devices, and the plan, if any."""

    strategy: Strategy
    num_engines: int
    options: EngineOptions
    plan: "ServicePlan | None" = None

    @property
    def words(self) -> str:
        """The mesh in words, with the number of engines if there are several or a plan has more."""
        num_planned = self.plan.generate.num_engines if self.plan else 1
        planned_text = f" of {num_planned}" * (num_planned > self.num_engines)
        count_text = f"{self.num_engines}{planned_text} engines of " * bool(planned_text or self.num_engines > 1)
        return count_text + mesh_words(self.strategy.mesh)

    def unplanned_words(self, device_kind: str, dtype: str) -> str:
        """Names where serving weights of ``dtype`` on these devices differs from the plan; "" if nowhere."""
        if self.plan is None:
            return ""
        with suppress(InputError):  # not a chip of the catalogue
            device_kind = chip_of_kind(device_kind).name
        options, plan, weight_dtype = self.options, self.plan, self.options.weights or dtype
        rows = [
            ("on", device_kind, plan.generate.part.chip.name),
            ("weights", weight_dtype, plan.weights.replace("stored", weight_dtype)),
            ("keys and values", options.cache_dtype, plan.cache),
            ("requests", f"{options.max_requests:,}", f"{plan.generate.batch_seqs:,}"),
            ("drafts", f"{options.drafts}", f"{plan.num_drafts}"),
            ("engines for prefill only", "0", f"{plan.prefill.num_engines * plan.has_pools}"),
        ]
        return ", ".join(f"{name} {served} (planned {planned})" for name, served, planned in rows if served != planned)


def engine_layout(source: ModelFolder, options: EngineOptions, devices: Sequence[Device]) -> EngineLayout:
    """Returns the layout of a plan or mesh in ``options``, else one of the planner if it knows the devices, else the
    usual mesh. Raises InputError if the plan is for another model, CannotRunError if it needs more devices than given.
    """
    state_name = "fp32" if source.dtype == "fp32" else "bf16-adam"
    if options.plan is not None:
        layout = _of_plan(source.model, options, len(devices))
    elif options.mesh is None and len(devices) > 1 and (planned_layout := _planned(source.model, options, devices)):
        layout = planned_layout
    else:
        mesh = make_mesh(options.mesh or usual_mesh(source.model, len(devices)))
        # fsdp splits weights only, and gathers them
        assignment = LAYOUTS["gathered" if mesh["fsdp"] > 1 else "prompts"]
        layout = EngineLayout(Strategy(mesh={**mesh, "data": 1}, assignment=assignment), mesh["data"], options)
    strategy = msgspec.structs.replace(layout.strategy, state=state_name, precision="")
    needed = strategy.num_chips * layout.num_engines
    if needed > len(devices):
        raise CannotRunError(
            f"{layout.words}: {needed} devices are needed, and there are {len(devices)}. Plan for {len(devices)}, use "
            f"smaller axes, or emulate devices: --on cpu:{needed}."
        )
    mask_name = source.model.attention_mask
    if mask_name and set(mask_named(mask_name).data) - {"lengths"}:  # prompt positions may attend to later ones
        layout = layout._replace(
            options=msgspec.structs.replace(layout.options, policy="interleaved", prefix_cache=False)
        )
    return layout._replace(
        strategy=strategy, options=with_usual(layout.options, devices[0].platform, source.dtype, strategy)
    )


def with_usual(options: EngineOptions, platform: str, dtype: str, strategy: Strategy) -> EngineOptions:
    """Returns options with unset values (0, "") filled in for a platform, weights and strategy, and ``max_requests``
    rounded up to a multiple of the shards of sequences."""
    num_owners = sequence_shards(strategy)
    is_cpu, checks = platform == "cpu", 1 + options.drafts
    seqs, rows = (ALIKE_ROWS // checks, ALIKE_ROWS) if options.batch_invariant else (32, 256) if is_cpu else (256, 2048)
    max_requests = -(-(options.max_requests or seqs) // num_owners) * num_owners
    return msgspec.structs.replace(
        options,
        max_requests=max_requests,
        token_budget=options.token_budget or max(rows * num_owners, max_requests * checks),
        # devices that split a page each hold as many slots as their platform reads at once
        page_len=options.page_len or PAGE_LENS.get(platform, 16) * sequence_shards(strategy, "S"),
        cache_dtype=options.cache_dtype or dtype,
    )


def usual_mesh(model: Model, num_devices: int) -> dict[str, int]:
    """Returns the mesh without a plan: the largest ``tensor`` that divides heads and widths, ``data`` for the rest."""
    split_dims = ("N", "K", "F", "Fe", "Fs", "Nx", "Kx", "Fx")
    tensor_size = math.gcd(num_devices, *(model.dims[dim] for dim in split_dims if dim in model.dims))
    return {"data": num_devices // tensor_size, "tensor": tensor_size}


USUAL_PROMPT, USUAL_OUTPUT = 1024, 256
"""Tokens of a request for which the planner plans if no plan is given."""


def _planned(model: Model, options: EngineOptions, devices: Sequence[Device]) -> EngineLayout | None:
    """Returns the planner's layout with the most tokens per second and no separate prefill pool; None for devices that
    are not in the catalogue, or if the planner finds none."""
    from meshwright.plan.serving.planner import plan_service, service_setting
    from meshwright.plan.serving.service import Service
    from meshwright.plan.serving.storing import StoredDtypes
    from meshwright.spec.cluster import make_cluster

    prompt_len = min(USUAL_PROMPT, model.max_positions // 2)
    service = Service(prompt_len=prompt_len, output_len=min(USUAL_OUTPUT, model.max_positions - prompt_len))
    stored_dtypes = StoredDtypes(options.weights or "bf16", "int8" if options.cache_dtype == "int8" else "bf16")
    with suppress(InputError, CannotRunError):
        chip = chip_of_kind(devices[0].device_kind)
        axis_sizes = [len(set(coords)) for coords in zip(*(device.coords for device in in_order(devices)), strict=True)]
        grid_shape = tuple(size for size in axis_sizes if size > 1) if chip.topology == "torus" else (len(devices), 1)
        result = plan_service(service_setting(model, make_cluster(chip, grid_shape)), service, stored=[stored_dtypes])
        pool = next((plan.generate for plan in result.plans if not plan.has_pools), None)
        return EngineLayout(pool.strategy, pool.num_engines, options) if pool else None
    return None


def _of_plan(model: Model, options: EngineOptions, num_devices: int) -> EngineLayout:
    """Returns the layout of ``options.plan``: its decode engines, as many as fit the devices; they prefill too."""
    from meshwright.plan.plan_file import ServicePlan, load_plan

    assert options.plan is not None
    plan = load_plan(options.plan, ServicePlan)
    for dim, plan_size in plan.model.dims.items():
        if plan_size != (model_size := model.dims.get(dim)):
            raise InputError(
                f"{options.plan} is for {plan.model.name}, whose {dim} is {plan_size}; {model.name} has {dim}="
                f"{model_size}. Plan for this model, or give the folder of the plan's model."
            )
    pool, storage = plan.generate, plan.stored.storage
    return EngineLayout(
        pool.strategy,
        max(1, min(pool.num_engines, num_devices // pool.strategy.num_chips)),
        msgspec.structs.replace(
            options,
            max_len=options.max_len or min(plan.service.max_len, model.max_positions),
            max_requests=options.max_requests or pool.batch_seqs,
            weights=options.weights or storage.weights,
            # a planned bf16 means the dtype of the weights
            cache_dtype=options.cache_dtype or storage.cache_dtype.removeprefix("bf16"),
        ),
        plan,
    )
