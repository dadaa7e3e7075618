"""Lowers and compiles a step for its target, in a process of its own that writes its results to a folder.

``options.json`` has the options of the compiler. ``lowered`` appears once the step has been traced: every sharded dim
divides, and every type agrees. ``memory.json`` and ``module.hlo`` appear when they are complete. ``error.json`` says
what failed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh

from meshwright.core.errors import InputError
from meshwright.core.files import write_json_whole, write_text_whole
from meshwright.parallel.mesh import abstract_mesh, device_mesh, in_order
from meshwright.spec.chip import GivenOptions
from meshwright.verify.request import LOWERED, MEMORY, MODULE, OPTIONS, Memory, Request


class CompilableStep(Protocol):
    """A step that can be lowered, as the builders of `parallel` return."""

    compiler: GivenOptions

    def lower(self, *sizes: int, platform: str = "") -> jax.stages.Lowered: ...


MakeStep = Callable[[Request, Mesh | AbstractMesh], tuple[CompilableStep, tuple[int, ...]]]
"""Builds the step of a request on a mesh, and the arguments of its `lower`."""


def compile_request(request: Request, folder: Path, make_step: MakeStep) -> None:
    """Lowers the step and, unless the depth is "lower", compiles it; writes each result to ``folder`` at once."""
    only_lower = request.depth == "lower"
    mesh = abstract_mesh(request.strategy.mesh) if only_lower else target_mesh(request)
    step, sizes = make_step(request, mesh)
    write_json_whole(folder / OPTIONS, step.compiler)
    lowered = step.lower(*sizes, platform=request.target.platform if only_lower else "")
    (folder / LOWERED).touch()
    if only_lower:
        return
    compiled = lowered.compile()
    found: Any = compiled.memory_analysis()
    memory = Memory(
        arguments=found.argument_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        outputs=max(0, found.output_size_in_bytes - found.alias_size_in_bytes),
        peak=found.peak_memory_in_bytes,
    )
    if request.target.platform == "cpu":
        # the other compilers dump the text; some of libtpu's programs cannot be printed after compilation
        write_text_whole(folder / MODULE, compiled.as_text() or "")
    write_json_whole(folder / MEMORY, memory)


def target_mesh(request: Request) -> Mesh:
    """Makes the mesh over the devices of the target, in the order of the plan's placement.

    Only those of a CPU are there. Raises InputError for another number of chips of TPUs than the plan's.
    """
    target = request.target
    if target.platform == "cpu":
        devices = list(jax.devices("cpu"))
    else:
        options = {name: tuple(v) if isinstance(v, list) else v for name, v in target.options.items()}
        found = topologies.get_topology_desc(platform=target.platform, topology_name=target.topology, **options)
        devices = list(found.devices)
    chips = in_order(devices) if target.platform == "tpu" else sorted(devices, key=lambda device: device.id)
    if target.platform == "tpu" and len(chips) != target.num_devices:
        raise InputError(
            f"{target.topology} has {len(chips)} chips, but the plan has {target.num_devices}. Name the cluster with "
            f"its shape, such as v5p:4x4x8."
        )
    placed = [chips[number] for number in request.order] if request.order else chips
    return device_mesh(request.strategy.mesh, placed)
