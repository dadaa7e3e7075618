"""The platform that programs are traced for."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_traced_for: ContextVar[str] = ContextVar("traced_for", default="")


def default_platform() -> str:
    """Returns the platform that a program is traced for: "cpu", "cuda", "rocm" or "tpu"; by default JAX's own."""
    return _traced_for.get() or platform_of(jax.devices()[0])


def platform_of(device: jax.Device) -> str:
    """Returns the platform of a device, also of one in a topology that describes absent hardware."""
    if device.platform != "gpu":
        return device.platform
    version = getattr(device.client, "platform_version", "") if hasattr(device, "client") else ""
    return "rocm" if "rocm" in version else "cuda"


@contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """Traces programs for a platform other than the one that JAX runs on."""
    token = _traced_for.set(platform)
    try:
        yield
    finally:
        _traced_for.reset(token)
