"""The description of a GPU that XLA compiles for without having one."""

from meshwright.spec.chip import XlaGpuTarget

SHARED = """\
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
"""
"""What every NVIDIA GPU since Ampere has alike."""

_COUNTED = (
    "core_count",
    "fpus_per_core",
    "shared_memory_per_core",
    "shared_memory_per_block_optin",
    "device_memory_size",
    "l2_cache_size",
    "clock_rate_ghz",
    "memory_bandwidth",
)


def target_config(gpu: XlaGpuTarget) -> str:
    """XLA's GpuTargetConfigProto as text for a GPU."""
    capability, dnn = gpu.capability, gpu.dnn.split(".")
    major, minor = capability.rstrip("a").split(".")
    feature = " feature_extension: ACCELERATED_FEATURES" if capability.endswith("a") else ""
    counted = " ".join(f"{name}: {getattr(gpu, name)}" for name in _COUNTED)
    return (
        f"gpu_device_info {{\n{SHARED}  {counted}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}\n"
        f'  dnn_version: "{".".join(dnn)}"\n}}\n'
        f'platform_name: "CUDA"\n'
        f"dnn_version_info {{ major: {dnn[0]} minor: {dnn[1]} patch: {dnn[2]} }}\n"
        f'device_description_str: "{gpu.description}"\n'
    )
