"""The platform that programs are traced for."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_traced_for: ContextVar[str] = ContextVar("traced_for", default="")


def default_platform() -> str:
    """That of the devices that JAX uses, or that a program is being traced for: "cpu", "cuda", "rocm" or "tpu"."""
    return _traced_for.get() or platform_of(jax.devices()[0])


def platform_of(device: jax.Device) -> str:
    """That of a device, which may be of a topology that is not there."""
    if device.platform != "gpu":
        return device.platform
    version = getattr(device.client, "platform_version", "") if hasattr(device, "client") else ""
    return "rocm" if "rocm" in version else "cuda"


@contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """Within it, programs are traced as the platform wants them, whatever JAX runs on."""
    token = _traced_for.set(platform)
    try:
        yield
    finally:
        _traced_for.reset(token)
