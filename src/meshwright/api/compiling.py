"""Lowers and compiles a step for `verify` in a separate process: ``python -m meshwright.api.compiling FOLDER``.

Files that it writes to the folder: ``options.json``, the compiler's options; ``lowered``, empty, once the step has been
traced, so that all sharded dims divide and dtypes agree; ``memory.json``; ``module.hlo`` on CPU; ``error.json``.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.experimental import topologies
from jax.sharding import Mesh

from meshwright.core.errors import InputError, UserError
from meshwright.core.files import write_json_whole, write_text_whole
from meshwright.cost.setting import Setting
from meshwright.parallel.mesh import abstract_mesh, compiler_options, device_mesh, in_order
from meshwright.spec.strategy import Form, Strategy
from meshwright.verify.request import ERROR, LOWERED, MEMORY, MODULE, OPTIONS, REQUEST, Memory, Request


def main(folder: Path) -> int:
    """Compiles the request in the folder. Returns the exit code: 0, or 1 after an error, written to ``error.json``."""
    try:
        compile_request(msgspec.json.decode((folder / REQUEST).read_bytes(), type=Request), folder)
    except Exception as error:
        error_kind = "plan" if isinstance(error, UserError) else type(error).__name__
        write_json_whole(folder / ERROR, {"kind": error_kind, "message": str(error)})
        return 1
    return 0


def compile_request(request: Request, folder: Path) -> None:
    """Lowers the real step and, unless the depth is "lower", compiles it; writes each file as soon as it is known."""
    is_only_lower, job = request.depth == "lower", request.setting.job
    mesh = abstract_mesh(request.strategy.mesh) if is_only_lower else target_mesh(request)
    step = step_of(request.setting, request.strategy, request.settings, mesh=mesh, form=request.form)
    platform = request.target.platform if is_only_lower else ""
    write_json_whole(folder / OPTIONS, compiler_options(mesh))
    if job.trains:
        lowered_step = step.lower(job.batch_seqs, job.seq_len, platform=platform)
    else:
        lowered_step = step.on(mesh, platform).lower_job(job)
    (folder / LOWERED).touch()
    if is_only_lower:
        return
    compiled_step = lowered_step.compile()
    memory_analysis: Any = compiled_step.memory_analysis()
    memory = Memory(
        arguments=memory_analysis.argument_size_in_bytes,
        temporaries=memory_analysis.temp_size_in_bytes,
        outputs=max(0, memory_analysis.output_size_in_bytes - memory_analysis.alias_size_in_bytes),
        peak=memory_analysis.peak_memory_in_bytes,
    )
    if request.target.platform == "cpu":
        # the other compilers dump the text; some of libtpu's programs cannot be printed after compilation
        write_text_whole(folder / MODULE, compiled_step.as_text() or "")
    write_json_whole(folder / MEMORY, memory)


def target_mesh(request: Request) -> Mesh:
    """Returns the mesh of the strategy over the target's devices, in the order of the plan's placement.

    CPU devices exist; TPUs and GPUs are descriptions for the compiler. Raises InputError if a TPU topology has another
    number of chips than the plan."""
    target = request.target
    if target.platform == "cpu":
        devices = list(jax.devices("cpu"))
    else:
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in target.options.items()}
        topology = topologies.get_topology_desc(platform=target.platform, topology_name=target.topology, **options)
        devices = list(topology.devices)
    chips = in_order(devices) if target.platform == "tpu" else sorted(devices, key=lambda device: device.id)
    if target.platform == "tpu" and len(chips) != target.num_devices:
        raise InputError(
            f"{target.topology} has {len(chips)} chips, but the plan has {target.num_devices}. Name the cluster with "
            f"its shape, such as v5p:4x4x8."
        )
    ordered_chips = [chips[chip_index] for chip_index in request.order] if request.order else chips
    return device_mesh(request.strategy.mesh, ordered_chips)


def step_of(
    setting: Setting, strategy: Strategy, settings: Mapping[str, Any], *, mesh: Any = None, form: Form = "shard_map"
) -> Any:
    """Returns the training step with ``settings`` on ``mesh`` (default: this process's devices), or a server's step if
    the job does not train. Raises InputError if a training batch does not divide over the devices."""
    job = setting.job
    if job.trains:
        from meshwright.train.settings import program_options, settings_from_table
        from meshwright.train.step import make_step, require_divides

        train_settings = settings_from_table(settings)
        options = program_options(train_settings, strategy, several_documents=False)
        step = make_step(setting.model, strategy, train_settings, options=options, mesh=mesh, form=form)
        require_divides(step, job)
        return step
    from meshwright.parallel.generation.packed_step import PackedStep

    storage = setting.step_storage
    return PackedStep(setting.model, strategy, max_len=setting.max_len, max_seqs=job.batch_seqs, storage=storage)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
