"""Which kernel runs an attention, and a CPU's tiles: one rule for plans, which name and price it, and for programs."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

HALVES = ("bfloat16", "float16")
LATENT_WIDTHS = 192, 128
"""Widths H and Hv of latent attention's heads. Source: jax-ml/jax, pull request 28872."""

LEAST = 128
"""Rows that a block of our kernels is a multiple of, and fewest positions of a sequence."""


TILE_ROWS = 128
"""Rows of a tile of attention on a CPU, of up to 8 of these; twice as many in longer sequences."""


def tile_rows(length: int | np.ndarray) -> np.ndarray:
    """Returns the rows of a tile on a CPU, for one length or an array of lengths."""
    return TILE_ROWS * np.where(length <= 8 * TILE_ROWS, 1, 2)


class AttentionCase(NamedTuple):
    """An attention as kernels tell cases apart.

    ``platform`` is "cpu", "cuda", "rocm", "tpu" or another, ``capability`` that of an NVIDIA GPU, 0 if unknown.
    ``widths`` are H and Hv, ``positions`` the fewer of those of queries and keys. ``terms`` are the masks that together
    are the mask, "" for one of another kind. ``in_order``: queries and keys are the same rows, as is known while
    tracing. ``scored``: there is a score rule; ``looks_up``: a rule looks up a table by queries and keys together.
    """

    platform: str
    capability: float
    dtype: str
    widths: tuple[int, int]
    positions: int
    terms: Collection[str] = ()
    in_order: bool = True
    scored: bool = False
    looks_up: bool = False


def _cudnn(case: AttentionCase) -> bool:
    """cuDNN has bf16 and fp16, H = Hv up to 128 that 8 divides, no score rule, and all keys or a causal mask, with or
    without a window, of rows in order; from Hopper on also the widths of latent attention.

    Hopper takes heads up to 256 wide, but the program may be compiled for another GPU.
    """
    width, value_width = case.widths
    fits_widths = width == value_width and width <= 128 and width % 8 == 0
    fits_widths |= case.widths == LATENT_WIDTHS and case.capability >= 9
    fits_mask = not case.terms or (case.in_order and {*case.terms} <= {"causal", "window"} and "causal" in case.terms)
    return case.platform == "cuda" and not case.scored and fits_widths and fits_mask and case.dtype in HALVES


def _mosaic(case: AttentionCase) -> bool:
    """Our kernels for Hopper have heads of 64 or 128 in bf16 and fp16. Blackwell's matrix units need others."""
    width, value_width = case.widths
    fits_platform = case.platform == "cuda" and int(case.capability) == 9 and case.dtype in HALVES
    return fits_platform and width == value_width and width in (64, 128) and _elementwise(case)


def _pallas(case: AttentionCase) -> bool:
    """Our kernels for TPUs have heads of a multiple of 8 in bf16 and float32."""
    fits_platform = case.platform == "tpu" and case.dtype in ("bfloat16", "float32")
    return fits_platform and not any(width % 8 for width in case.widths) and _elementwise(case)


def _elementwise(case: AttentionCase) -> bool:
    return case.positions >= LEAST and not case.looks_up


TAKES: dict[str, Callable[[AttentionCase], bool]] = {
    "cudnn": _cudnn,
    "mosaic": _mosaic,
    "pallas": _pallas,
    "xla": lambda case: True,
}
"""Kernels by name, in the order in which they are asked -> whether one takes a case."""


def kernel_named(case: AttentionCase) -> str:
    """Returns the name of the kernel that runs an attention."""
    return next(name for name, takes in TAKES.items() if takes(case))
