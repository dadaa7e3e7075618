"""Which kernel computes an attention: the platform's fused one where it takes the case, else the project's own forms."""

from dataclasses import dataclass
from typing import Literal

import jax

from meshwright.nn.attention_visibility import Order

Way = Literal["cudnn", "splash", "staircase", "blocks"]


@dataclass(frozen=True, kw_only=True)
class Case:
    dtype: str
    num_queries: int
    num_keys: int
    width: int
    value_width: int
    order: Order
    windowed: bool
    capped: bool
    sinks: bool
    documents: bool


def default_platform() -> str:
    name = jax.default_backend()
    return "cuda" if name == "gpu" else name


def attention_way(platform: str, case: Case) -> Way:
    return "staircase" if case.order == "rows" and case.num_queries <= 2048 else "blocks"
