"""Which form computes an attention: the platform's fused kernel where it takes the case, else the project's own.

| way       | platform | takes                                                                   |
|-----------|----------|-------------------------------------------------------------------------|
| cudnn     | cuda     | bf16 or fp16, rows in order or all keys seen, H = Hv <= 128, 8 divides H, |
|           |          | no soft cap, no sinks, no documents                                     |
| splash    | tpu      | rows in order, their number a multiple of 128                           |
| staircase | any      | rows in order, no more than fit in cache                                |
| blocks    | any      | everything                                                              |
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import jax

from meshwright.nn.attention.staircase import LONGEST
from meshwright.nn.attention.visibility import Order

Way = Literal["cudnn", "splash", "staircase", "blocks"]

SPLASH_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class Case:
    """What decides the way: the element type, sizes, and what the rule of sight consists of."""

    dtype: str
    num_queries: int
    num_keys: int
    width: int
    value_width: int
    order: Order
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    documents: bool = False


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


def attention_way(platform: str, case: Case) -> Way:
    """The first way of the table that takes the case."""
    if platform == "cuda" and _cudnn_takes(case):
        return "cudnn"
    if platform == "tpu" and case.order == "rows" and case.num_queries % SPLASH_ROWS == 0:
        return "splash"
    return "staircase" if case.order == "rows" and case.num_queries <= LONGEST else "blocks"


def _cudnn_takes(case: Case) -> bool:
    """Hopper's limit of 256 for the width of a head is not used: the program may be compiled for another GPU."""
    plain = not (case.softcap or case.sinks or case.documents)
    known = case.order == "all" or case.order == "rows"
    narrow = case.width == case.value_width and case.width <= 128 and case.width % 8 == 0
    return plain and known and narrow and case.dtype in ("bfloat16", "float16")
