"""Chooses the kernel of an attention, and the tile size on CPUs, for plans and for programs alike."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

HALVES = ("bfloat16", "float16")
LATENT_WIDTHS = 192, 128
"""Widths H and Hv of latent attention's heads. Source: jax-ml/jax, pull request 28872."""

LEAST = 128
"""Block rows of meshwright's kernels are a multiple of this; shorter sequences do not use them."""


TILE_ROWS = 128
"""Rows of a CPU tile of attention for lengths up to 8 tiles; longer ones have twice as many."""


def tile_rows(length: int | np.ndarray) -> np.ndarray:
    """Returns the rows of a CPU tile of attention, for one sequence length or an array of lengths."""
    return TILE_ROWS * np.where(length <= 8 * TILE_ROWS, 1, 2)


class AttentionCase(NamedTuple):
    """The properties of an attention that decide its kernel.

    ``platform`` is "cpu", "cuda", "rocm", "tpu" or another, ``capability`` an NVIDIA GPU's compute capability, 0 if
    unknown. ``widths`` are H and Hv, ``positions`` is the smaller of query and key positions. ``terms`` are names of
    masks whose conjunction is the mask, "" for any other mask. ``in_order``: tracing shows that queries and keys have
    the same rows. ``scored``: there is a score rule; ``looks_up``: a rule indexes a table by query and key together.
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
    """True if cuDNN runs a case: bf16 or fp16; H = Hv up to 128 that 8 divides, or from Hopper on latent attention's
    widths; no score rule; no mask, or a causal one (with or without a window) of rows in order.

    Hopper takes heads up to 256 wide, but the program may be compiled for another GPU.
    """
    width, value_width = case.widths
    fits_widths = width == value_width and width <= 128 and width % 8 == 0
    fits_widths |= case.widths == LATENT_WIDTHS and case.capability >= 9
    fits_mask = not case.terms or (case.in_order and {*case.terms} <= {"causal", "window"} and "causal" in case.terms)
    return case.platform == "cuda" and not case.scored and fits_widths and fits_mask and case.dtype in HALVES


def _mosaic(case: AttentionCase) -> bool:
    """True if meshwright's Hopper kernels run a case: bf16 or fp16, H = Hv of 64 or 128. Not Blackwell."""
    width, value_width = case.widths
    fits_platform = case.platform == "cuda" and int(case.capability) == 9 and case.dtype in HALVES
    return fits_platform and width == value_width and width in (64, 128) and _elementwise(case)


def _pallas(case: AttentionCase) -> bool:
    """True if meshwright's TPU kernels run a case: bf16 or float32, head widths that 8 divides."""
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
"""Kernel name -> function that is True if the kernel runs a case; the first in this order is used."""


def kernel_named(case: AttentionCase) -> str:
    """Returns the name of the first kernel that runs an attention: "cudnn", "mosaic", "pallas" or "xla"."""
    return next(name for name, takes in TAKES.items() if takes(case))
