"""The platform that programs are traced for."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import jax

_traced_for: ContextVar[str] = ContextVar("traced_for", default="")
_device: ContextVar[jax.Device | None] = ContextVar("device", default=None)


def default_platform() -> str:
    """Returns the platform that a program is traced for: "cpu", "cuda", "rocm" or "tpu"; by default JAX's own."""
    return _traced_for.get() or platform_of(jax.devices()[0])


def default_device() -> jax.Device:
    """Returns the device that a program is traced for, which may be absent; JAX's first device if only the platform is
    known."""
    return _device.get() or jax.devices()[0]


def compute_capability() -> float:
    """Returns the compute capability of the NVIDIA GPU that a program is traced for; 0 for other devices."""
    return float(getattr(default_device(), "compute_capability", None) or 0)


@cache
def processor() -> str:
    """Returns the feature flags of the CPU, as one line of text; only its architecture if Linux does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def platform_of(device: jax.Device) -> str:
    """Returns the platform of a device, also if the device is in a topology that describes absent hardware."""
    if device.platform != "gpu":
        return device.platform
    # JAX says "gpu" for NVIDIA's and for AMD's
    version = getattr(device.client, "platform_version", "") if hasattr(device, "client") else ""
    return "rocm" if "rocm" in version else "cuda"


@contextmanager
def traced_for(platform: str, device: jax.Device | None = None) -> Iterator[None]:
    """Within the context, programs are traced for this platform and device instead of JAX's own."""
    reset_tokens = _traced_for.set(platform), _device.set(device)
    try:
        yield
    finally:
        _traced_for.reset(reset_tokens[0])
        _device.reset(reset_tokens[1])
