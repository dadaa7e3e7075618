"""Compile targets of plans: a cluster's own hardware, which need not be present, or emulated CPU devices."""

import importlib.util
from typing import Any, Literal

import msgspec

from meshwright.core.errors import CannotRunError
from meshwright.core.units import format_bytes
from meshwright.spec.chip import LibtpuTarget, XlaGpuTarget, catalogued, chips, compiled_as
from meshwright.spec.cluster import Cluster, compiles, slice_note
from meshwright.spec.cluster_shapes import times

CompilerPlatform = Literal["tpu", "cuda", "cpu"]

MAX_CPU_DEVICES = 2048
"""Most devices in one process that XLA's CPU compiler accepts; it refuses 4096 (measured, jax 0.10.2)."""

WITHOUT_COMPILER = "Without a compiler, use verify --for cpu (no memory) or --depth lower, and plan without --verify."

PLUGINS = {"tpu": ("libtpu", "tpu"), "cuda": ("jax_cuda13_plugin", "gpu")}
"""For each platform the module that compiles for it, and the extra of this package that installs the module."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The topology that a program is compiled for.

    ``topology`` and ``options`` are arguments of JAX's `get_topology_desc`; if that lists a chip as two devices, a mesh
    of chips uses the first device of each. ``note`` says what this target cannot show.
    """

    platform: CompilerPlatform
    topology: str = ""
    options: dict[str, Any] = {}
    num_devices: int
    note: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the compiling process, which suppress logs and the search for hardware."""
        log_variables = {"TF_CPP_MIN_LOG_LEVEL": "2"}
        if self.platform == "tpu":
            return {
                **log_variables,
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_ACCELERATOR_TYPE": "v5litepod-4",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_WORKER_ID": "0",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            }
        if self.platform == "cuda":
            return {**log_variables, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
        # the code that a CPU would run is not read: level 0 compiles faster, with the same HLO and buffers
        flags = f"--xla_force_host_platform_device_count={self.num_devices} --xla_backend_optimization_level=0"
        return {**log_variables, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def is_installed(platform: CompilerPlatform) -> bool:
    """True if the compiler for a platform is installed; the one for the CPU is part of JAX."""
    return platform == "cpu" or importlib.util.find_spec(PLUGINS[platform][0]) is not None


def target_of(cluster: Cluster, *, only_lower: bool = False) -> Target:
    """Returns the target for a cluster's own hardware.

    With ``only_lower`` nothing is compiled: TPUs need no compiler, and GPUs or other chips without an installed
    compiler are lowered for CPUs. Otherwise raises CannotRunError if no compiler is known for the chip or the slice.
    """
    real, chip = cluster.chip, compiled_as(cluster.chip)
    note = "" if chip is real else f"compiled as for {chip.full_name or chip.name}: programs for both are equal"
    if libtpu := catalogued(chip, "libtpu"):
        if real.memory_bytes != chip.memory_bytes and chip.memory_bytes:
            note += f", except that libtpu plans with {format_bytes(chip.memory_bytes)} of memory"
        if not (only_lower or compiles(cluster.shape)):
            shape_text = "; ".join(slice_note(cluster)) or cluster.short_name
            raise CannotRunError(f"{shape_text}. Name another slice. {WITHOUT_COMPILER}")
        target = _tpu(cluster, libtpu)
        return msgspec.structs.replace(target, note="; ".join(filter(None, (target.note, note))))
    gpu = catalogued(chip, "xla_gpu")
    if gpu and not (only_lower and not is_installed("cuda")):
        if real.hbm_bytes and chip.hbm_bytes:  # the scheduler keeps within this capacity
            memory_size = round(gpu.device_memory_size * real.hbm_bytes / chip.hbm_bytes)
            gpu = msgspec.structs.replace(gpu, device_memory_size=memory_size)
        options = {"topology": f"1x{cluster.nodes}x{cluster.domain}", "target_config": target_config(gpu)}
        return Target(platform="cuda", options=options, num_devices=cluster.num_chips, note=note)
    if cluster.kind == "host":
        return Target(platform="cpu", num_devices=cluster.num_chips)
    if only_lower:
        reason = f"the compiler for cuda is not installed ({_how('cuda')})" if gpu else "no compiler is known"
        return Target(platform="cpu", num_devices=cluster.num_chips, note=f"lowered for CPUs: {reason}")
    chip_names = ", ".join(name for name, chip_entry in chips().items() if chip_entry.libtpu or chip_entry.xla_gpu)
    raise CannotRunError(
        f"no compiler is known for {real.full_name or real.name}. Programs are compiled for {chip_names} "
        f"and cpu. {WITHOUT_COMPILER}"
    )


def usable_target(cluster: Cluster, *, wanted: CompilerPlatform | None = None) -> Target:
    """Returns the cluster's own target if its compiler is installed, else emulated CPU devices, with a note.

    Raises CannotRunError if the compiler ``wanted`` is not installed or not the cluster's, or if a CPU cannot emulate
    all devices."""
    if wanted == "cpu":
        return _stand_in(cluster, "as requested")
    target = target_of(cluster)
    if wanted is not None and target.platform != wanted:
        raise CannotRunError(f"{cluster.short_name} is compiled for {target.platform}, not {wanted}. Omit --for.")
    if is_installed(target.platform):
        return target
    install_hint = _how(target.platform)
    if wanted is not None:
        raise CannotRunError(f"the compiler for {target.platform} is not installed. Install it: {install_hint}.")
    return _stand_in(cluster, f"the compiler for {target.platform} is not installed ({install_hint})")


def _how(platform: str) -> str:
    return f'pip install "meshwright[{PLUGINS[platform][1]}]"'


def _stand_in(cluster: Cluster, why: str) -> Target:
    if cluster.num_chips > MAX_CPU_DEVICES:
        raise CannotRunError(
            f"a CPU emulates at most {MAX_CPU_DEVICES} devices, and this cluster has {cluster.num_chips}; {why}. "
            f"Install the compiler, name fewer chips, or use verify --depth lower."
        )
    note = (
        f"compiled for emulated CPU devices: {why}. That shows which collectives run, how often and over which axes; "
        f"it does not show memory, bytes of bf16 (widened to float32) or what the accelerator's compiler changes."
    )
    return Target(platform="cpu", num_devices=cluster.num_chips, note=note)


def _tpu(cluster: Cluster, libtpu: LibtpuTarget) -> Target:
    notes = slice_note(cluster)
    shape_text = times(cluster.shape)
    host_bounds = tuple(2 - size % 2 for size in cluster.shape[:2])  # of 2x2 chips where they divide the slice
    options: dict[str, Any] = {} if host_bounds == (2, 2) else {"chips_per_host_bounds": (*host_bounds, 1)}
    if cluster.num_slices > 1:
        options["num_slices"] = cluster.num_slices
    if libtpu.chip_config_name:
        options["chip_config_name"] = libtpu.chip_config_name
    if cluster.twisted:
        shape_text, options["wrap"] = f"{shape_text}_twisted", (True, True, True)
    elif any(cluster.wraps):
        # libtpu takes three axes, also for chips with a two-dimensional torus
        options["wrap"] = (*cluster.wraps, *(False,) * (3 - len(cluster.wraps)))
    return Target(
        platform="tpu",
        topology=f"{libtpu.name}:{shape_text}",
        options=options,
        num_devices=cluster.num_chips,
        note="; ".join(filter(None, (libtpu.note, *notes))),
    )


# -- GPUs ---------------------------------------------------------------------------------------------

SHARED = """\
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
"""
"""Limits of a device that all NVIDIA GPUs since Ampere share."""


def target_config(gpu: XlaGpuTarget) -> str:
    """Writes XLA's GpuTargetConfigProto for a GPU as text."""
    capability, dnn_parts = gpu.capability, gpu.dnn.split(".")
    major, minor = capability.rstrip("a").split(".")
    feature = " feature_extension: ACCELERATED_FEATURES" if capability.endswith("a") else ""
    quoted = ("description", "capability", "dnn")
    figures = " ".join(f"{name}: {value}" for name, value in msgspec.structs.asdict(gpu).items() if name not in quoted)
    return (
        f"gpu_device_info {{\n{SHARED}  {figures}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}\n"
        f'  dnn_version: "{".".join(dnn_parts)}"\n}}\n'
        f'platform_name: "CUDA"\n'
        f"dnn_version_info {{ major: {dnn_parts[0]} minor: {dnn_parts[1]} patch: {dnn_parts[2]} }}\n"
        f'device_description_str: "{gpu.description}"\n'
    )
