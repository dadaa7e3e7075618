"""Device meshes, PartitionSpecs of sharded arrays, compiler options, and the cache of compiled programs."""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from meshwright.algebra.notation import ShardedArray
from meshwright.algebra.rewrites.torus import mesh_order
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.host_memory import keep_freed_memory
from meshwright.nn.attention.platform import platform_of, traced_for
from meshwright.parallel.held import Tree
from meshwright.spec.chip import GivenOptions, OptionValue, chip_of_kind, options_of
from meshwright.spec.strategy import Strategy

_DEVICES_FLAG = "--xla_force_host_platform_device_count"
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds"
"""XLA aborts the process when emulated devices wait 40 s for each other, which a busy machine can make them do."""


def emulate_devices(count: int) -> None:
    """Makes JAX emulate ``count`` CPU devices. Works only before JAX has made its first array.

    Raises CannotRunError if JAX has fewer devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICES_FLAG not in flags:
        patience_flag = f" {_PATIENCE}=600" * (_PATIENCE not in flags)
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICES_FLAG}={count}{patience_flag}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else JAX uses an accelerator if there is one
    # Before JAX starts its threads, which else get separate heaps that return freed blocks.
    keep_freed_memory()
    if len(jax.devices()) < count:
        raise CannotRunError(
            f"{count} devices are needed and JAX has {len(jax.devices())}. Set XLA_FLAGS={_DEVICES_FLAG}={count}."
        )


def keep_compiled_programs(folder: Path) -> None:
    """Sets JAX's cache of compiled programs to ``folder/xla``, unless a cache is set already.

    Programs on several CPU devices are not kept, see `device_mesh`. If the folder cannot be written, programs are
    compiled again in every process.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    target_folder = folder / "xla"
    try:
        target_folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(target_folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def device_mesh(axes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh of the given axes, major to minor, over the first devices. Axes of size 1 are kept.

    Raises CannotRunError if there are too few devices.
    """
    usable = list(devices) if devices is not None else jax.devices()
    count = int(np.prod(list(axes.values()), dtype=int))
    if len(usable) < count:
        phrase = " x ".join(f"{a}={n}" for a, n in axes.items())
        raise CannotRunError(f"the mesh {phrase} needs {count} devices and there are {len(usable)}. Use smaller axes.")
    if count > 1 and usable[0].platform == "cpu" and jax.config.values["jax_enable_compilation_cache"]:
        # XLA's CPU programs lose the order of their collectives when they are read from a cache. With jaxlib 0.10.2 a
        # pipeline aborted, hung or gave another loss, so programs on several CPU devices are always compiled.
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()  # JAX checks for a cache only once, at its first program
    device_grid = np.array(usable[:count]).reshape(tuple(axes.values()))
    return Mesh(device_grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def strategy_mesh(strategy: Strategy) -> Mesh:
    """Returns the mesh of a strategy on the devices of all processes; on TPUs in the order of the strategy's placement,
    if it has one."""
    devices = jax.devices()
    chip_devices = in_order(devices)
    if chip_devices and len(chip_devices) == strategy.num_chips and any(strategy.placement.values()):
        devices = [chip_devices[chip_index] for chip_index in mesh_order(strategy.mesh, strategy.placement).ravel()]
    return device_mesh(strategy.mesh, devices)


def in_order(devices: Sequence[Any]) -> list[Any]:
    """Returns one device per TPU chip, sorted by slice, then coordinates with the last axis major; [] for non-TPUs."""
    tpu_devices = [device for device in devices if device.platform == "tpu" and device.core_on_chip == 0]
    return sorted(tpu_devices, key=lambda device: (getattr(device, "slice_index", 0) or 0, *reversed(device.coords)))


def abstract_mesh(axes: Mapping[str, int]) -> AbstractMesh:
    """Returns a mesh of the given axes without devices: programs on it can be lowered, not compiled."""
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def compiler_options(mesh: Mesh | AbstractMesh) -> GivenOptions:
    """Returns the compiler options recommended for the chips of a mesh (`spec.chip.options_of`).

    Leaves out options that the user sets in LIBTPU_INIT_ARGS or XLA_FLAGS, or that the installed compiler refuses.
    """
    if isinstance(mesh, AbstractMesh):
        return GivenOptions()
    device = next(iter(mesh.local_devices), mesh.devices.flat[0])
    try:
        options = options_of(chip_of_kind(device.device_kind).name)
    except InputError:  # a chip that is not in the catalogue
        options = {}
    flag_lists = (os.environ.get(name, "").split() for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS"))
    user_flags = {flag.removeprefix("--").split("=")[0] for flag_words in flag_lists for flag in flag_words}
    return _accepted(device, tuple((name, value) for name, value in options.items() if name not in user_flags))


@cache
def _accepted(device: jax.Device, choices: tuple[tuple[str, OptionValue], ...]) -> GivenOptions:
    """Returns the options that the compiler accepts for a scalar program, and the names of refused ones."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))

    def takes(options: Mapping[str, Any]) -> bool:
        try:
            # not dumped: `verify` waits for the dump of its step
            jax.jit(jnp.negative).lower(scalar).compile(compiler_options={**options, "xla_dump_hlo_module_re": "^$"})
        except jax.errors.JaxRuntimeError:
            return False
        return True

    if not choices or takes(dict(choices)):
        return GivenOptions(dict(choices))
    accepted_options = {name: value for name, value in choices if takes({name: value})}  # one bad option fails all
    return GivenOptions(accepted_options, tuple(name for name, _ in choices if name not in accepted_options))


def lower(program: Any, mesh: Mesh | AbstractMesh, *arguments: Tree, platform: str = "") -> jax.stages.Lowered:
    """Lowers a jitted program for ``platform``; "" means the platform of ``mesh``, which then needs devices."""
    device = None if platform else mesh.devices.flat[0]
    target_platform = platform or platform_of(device)
    with traced_for(target_platform, device):
        return program.trace(*arguments).lower(lowering_platforms=(target_platform,) if platform else None)


def partition_spec(array: ShardedArray, *, stacked: bool = False, layers: str | None = None) -> PartitionSpec:
    """Returns the sharding of an array as a PartitionSpec. A ``stacked`` array has a first dim of layers, sharded over
    the axis ``layers`` if given."""
    dim_axes = [axes[0] if len(axes) == 1 else axes or None for axes in array.axes]
    return PartitionSpec(*([layers] if stacked else []), *dim_axes)


def named_sharding(mesh: Mesh | AbstractMesh, array: ShardedArray) -> NamedSharding:
    """Returns the `partition_spec` of an array on a mesh."""
    return NamedSharding(mesh, partition_spec(array))


def shardings(mesh: Mesh | AbstractMesh, specs: Tree) -> Tree:
    """Returns a tree of NamedShardings on a mesh from a tree of PartitionSpecs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
