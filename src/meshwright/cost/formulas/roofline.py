"""The roofline of one local operation: FLOPs against bytes, on any channel of a chip.

Times are bounds: with perfect overlap the larger of compute and transfer, without overlap their sum. Source: How to
Scale Your Model, section 1. Sizes may be NumPy arrays.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from meshwright.algebra.sizes import Number
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.errors import InputError, nearest
from meshwright.spec.chip import Chip, known, peak

Channel = Literal["hbm", "vmem", "pcie", "ici", "dcn", "nvlink"]

_CHANNEL_FIGURES: dict[str, str] = {
    "hbm": "hbm_bytes_per_s",
    "vmem": "vmem_bytes_per_s",
    "pcie": "pcie_bytes_per_s",
    "ici": "ici_axis_bytes_per_s",
    "dcn": "dcn_bytes_per_s",
    "nvlink": "nvlink_bytes_per_s",
}


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The FLOPs and bytes of an operation. A multiplication with an addition is 2 FLOPs."""

    flops: Number
    num_bytes: Number

    @property
    def intensity(self) -> Number:
        """FLOPs per byte."""
        return self.flops / self.num_bytes


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds on the seconds of an operation on one channel of a chip; ``padding`` multiplies those of compute."""

    work: Work
    peak_flops: Number
    bytes_per_s: Number
    channel: str = "hbm"
    padding: Number = 1.0

    @property
    def math_s(self) -> Number:
        """Seconds of the FLOPs at peak, times ``padding``."""
        return self.work.flops * self.padding / self.peak_flops

    @property
    def transfer_s(self) -> Number:
        """Seconds of the bytes on the channel."""
        return self.work.num_bytes / self.bytes_per_s

    @property
    def lower_s(self) -> Number:
        """Seconds with perfect overlap: the larger of `math_s` and `transfer_s`."""
        is_array = isinstance(self.math_s, np.ndarray) or isinstance(self.transfer_s, np.ndarray)
        return (np.maximum if is_array else max)(self.math_s, self.transfer_s)

    @property
    def upper_s(self) -> Number:
        """Seconds without overlap: `math_s` + `transfer_s`, at most twice the lower bound."""
        return self.math_s + self.transfer_s

    @property
    def critical_intensity(self) -> Number:
        """FLOPs per byte at which compute and this channel take equally long."""
        return critical_intensity(self.peak_flops, self.bytes_per_s)

    @property
    def bound_by(self) -> str | np.ndarray:
        """What binds: "compute", or the channel's name; an array of these strings for array sizes."""
        bound_names = np.where(self.math_s >= self.transfer_s, "compute", self.channel)
        return bound_names if bound_names.ndim else str(bound_names)

    @property
    def reached_flops_per_s(self) -> Number:
        """FLOP/s under perfect overlap: peak, or intensity x bandwidth below the critical intensity."""
        return self.work.flops / self.lower_s


class Operand(msgspec.Struct, frozen=True):
    """One array of an einsum: its dims and the dtype it is stored in."""

    dims: tuple[str, ...]
    dtype: str


def critical_intensity(peak_flops: Number, bytes_per_s: Number) -> Number:
    """Returns the FLOPs per byte above which compute binds: peak / bandwidth. Source: section 1.1."""
    return peak_flops / bytes_per_s


def channel_rate(chip: Chip, channel: Channel) -> float:
    """Returns the bytes/s of one channel of a chip: "ici" counts both directions of one torus axis, "nvlink" one way,
    "dcn" a chip's share. Raises InputError if the chip has none."""
    if channel not in _CHANNEL_FIGURES:
        raise InputError(f"unknown channel {channel!r}.{nearest(channel, _CHANNEL_FIGURES)}")
    link_by_channel = {"ici": ("torus", "ICI"), "nvlink": ("switched", "NVLink")}
    if channel in link_by_channel and chip.topology != link_by_channel[channel][0]:
        usable_channel = next((name for name, (wiring, _) in link_by_channel.items() if wiring == chip.topology), "hbm")
        raise InputError(f"{chip.name} has no {link_by_channel[channel][1]}. Use --channel {usable_channel}.")
    return known(chip, _CHANNEL_FIGURES[channel])


def vector_peak(chip: Chip) -> float | None:
    """Returns FP32 FLOP/s of the vector units: the chip table's, else 1 FLOP per cycle for each ALU of a TPU, or 2 for
    each lane of a GPU (multiply and add). None if a figure is not known."""
    vpu_names = ("num_cores", "vpu_lanes_per_core", "vpu_alus_per_lane", "clock_hz")
    for factor, names in ((1, ("vector_flops",)), (1, vpu_names), (2, ("num_sms", "fp32_lanes_per_sm", "clock_hz"))):
        figures = [getattr(chip, name) for name in names]
        if None not in figures:
            return float(factor * math.prod(figures))
    return None


def dtype_bytes(dtype: str) -> float:
    """Returns the bytes of one stored element. Raises InputError for an unknown dtype."""
    if dtype not in DTYPE_BYTES:
        raise InputError(f"unknown dtype {dtype!r}.{nearest(dtype, DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def einsum_work(operands: Sequence[Operand], out: Operand, sizes: Mapping[str, Number]) -> Work:
    """Returns FLOPs and bytes of one local einsum: FLOPs are 2 x the product of all dims (1 x for a single operand).

    Every array moves once. A dim of all arrays (one matrix per batch element) counts once in the FLOPs and
    in each array's bytes, so that batched matrices have no reuse. Source: section 1.1, exercise 1.4.
    """
    arrays = (*operands, out)
    _check_sizes(arrays, sizes)
    all_dims = dict.fromkeys(dim for array in arrays for dim in array.dims)
    flops = (2 if len(operands) > 1 else 1) * _size(all_dims, sizes)
    return Work(flops=flops, num_bytes=sum(_size(a.dims, sizes) * dtype_bytes(a.dtype) for a in arrays))


def chip_roofline(work: Work, chip: Chip, *, dtype: str, channel: Channel = "hbm") -> Roofline:
    """Returns the bounds of ``work`` on a chip that multiplies in ``dtype``, with bytes on ``channel``."""
    return Roofline(work=work, peak_flops=peak(chip, dtype), bytes_per_s=channel_rate(chip, channel), channel=channel)


def critical_size(
    operands: Sequence[Operand],
    out: Operand,
    sizes: Mapping[str, Number],
    *,
    dim: str,
    peak_flops: Number,
    bytes_per_s: Number,
) -> Number:
    """Returns the size of ``dim`` from which the einsum is compute-bound, every byte counted; infinity if it never is.

    Time is linear in one dim: B = (bytes without B) / (FLOPs per B / critical intensity - bytes per B). Raises
    InputError if no array has the dim. Source: How to Scale Your Model, exercise 2.4 (exactly 262.7 there).
    """
    arrays = (*operands, out)
    unit_sizes = {**sizes, dim: 1}
    if not any(dim in array.dims for array in arrays):
        known_dims = dict.fromkeys(d for array in arrays for d in array.dims)
        raise InputError(f"no array has the dim {dim!r}. Choose one of {', '.join(known_dims)}.")
    _check_sizes(arrays, unit_sizes)
    growing_bytes: Number = sum(_size(a.dims, unit_sizes) * dtype_bytes(a.dtype) for a in arrays if dim in a.dims)
    fixed_bytes: Number = sum(_size(a.dims, unit_sizes) * dtype_bytes(a.dtype) for a in arrays if dim not in a.dims)
    hidden_bytes = einsum_work(operands, out, unit_sizes).flops / critical_intensity(peak_flops, bytes_per_s)
    return fixed_bytes / (hidden_bytes - growing_bytes) if hidden_bytes > growing_bytes else math.inf


def critical_batch(
    peak_flops: Number,
    bytes_per_s: Number,
    *,
    weight_bytes: Number = 2,
    num_experts: Number = 1,
    active_experts: Number = 1,
) -> Number:
    """Returns the tokens from which [B,D] x [D,F] is compute-bound if B is far below D and F.

    B = critical intensity x weight bytes / 2, times E/k if each token uses k of E experts; only bytes of weights count.
    Source: How to Scale Your Model, section 1.1.2, exercises 1.1, 1.2 and 4.8.
    """
    dense_tokens = critical_intensity(peak_flops, bytes_per_s) * weight_bytes / 2
    return dense_tokens * num_experts / active_experts


def critical_split_dim(
    peak_flops: Number, link_bytes_per_s: Number, *, num_chips: Number = 2, result_bytes: Number = 2
) -> Number:
    """Returns the contracting size D from which a matmul split along D is compute-bound on the link between chips.

    Each chip computes 2BDF/n FLOPs and sends its partial [B,F] once: D > n x bytes / 2 x peak / link; B and F
    cancel. Source: How to Scale Your Model, section 1.1.3.
    """
    return num_chips * result_bytes / 2 * critical_intensity(peak_flops, link_bytes_per_s)


def critical_repeats(ops_per_s: Number, bytes_per_s: Number, *, bytes_per_element: Number) -> Number:
    """Returns the fused operations per element that take as long as its transfer of ``bytes_per_element``."""
    return ops_per_s * bytes_per_element / bytes_per_s


def _size(dims: Sequence[str] | Mapping[str, None], size_by_dim: Mapping[str, Number]) -> Number:
    num_elements: Number = 1.0
    for dim in dims:
        num_elements = num_elements * size_by_dim[dim]
    return num_elements


def _check_sizes(arrays: Sequence[Operand], size_by_dim: Mapping[str, Number]) -> None:
    missing_dims = dict.fromkeys(dim for array in arrays for dim in array.dims if dim not in size_by_dim)
    if missing_dims:
        dims_text = ",".join(f"{dim}=..." for dim in missing_dims)
        raise InputError(f"no size for {', '.join(missing_dims)}. Give every dim: --dims {dims_text}.")
