"""Seconds of one kernel by itself on one device, from its shape: products, attention, losses, collectives of NVLink.

Sizes may be NumPy arrays. A kernel computes and reads its operands at the same time; what it moves besides, and its
start, add up. A plan prices the steps of a whole model (`kernels.local_cost`), which overlap and compete.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError
from meshwright.spec.calibration import datasheet_calibration, memory_rate
from meshwright.spec.chip import Chip, peak
from meshwright.spec.efficiency import fitted_calibration

NVIDIA_TILE = (128, 256)
"""Rows and columns of the tile that one SM makes at a time."""

NVIDIA_ROWS = 128
"""Rows of queries that a kernel of attention on GPUs takes at a time: twice as many keys are read at the diagonal."""

BLACKWELL_SMS = 148
"""SMs of a B200 in XLA's target for it (``xla_gpu.core_count``; a GB200's has 152). The catalogue's ``num_sms`` leaves
them out: plans are fitted without them."""

BLACKWELL = (1000.0, 2250e12)
"""A B200's watts and dense bf16 peak, FLOP/s: power limits the rate of Blackwell boards, whatever their peak."""

PASSES = {"forward": 1.0, "backward": 2.5}
"""Products of attention's pass, over those of its forward pass: scores are made again."""

TRAFFIC = {"forward": 1.0, "backward": 2.2}
"""Bytes of attention's pass, over those of its forward pass: gradients are written besides."""


class KernelRates(msgspec.Struct, frozen=True, kw_only=True):
    """A device's rates and the numbers that say how far its kernels stay behind its data sheet.

    ``flops_per_s`` and ``narrow_flops_per_s`` (fp8) are peaks, ``hbm_bytes_per_s`` what streams reach,
    ``link_bytes_per_s`` the data sheet's NVLink one way. ``width`` is the side of the matrix unit (0: a GPU),
    ``processors`` the SMs (0: a TPU), ``cores`` the cores that share the device, ``half`` the K at which filling the
    pipeline of a product takes as long as the product. ``numbers`` are fitted ones by name.
    """

    flops_per_s: float
    narrow_flops_per_s: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    width: int
    processors: int
    cores: int
    half: float
    numbers: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        if name not in self.numbers:
            raise InputError(
                f"the kernel numbers lack {name!r}. Fit them again: meshwright accuracy --kernels -o FILE."
            )
        return self.numbers[name]

    def product_s(self, flops: Number, contracted: Number) -> Number:
        """Returns the seconds of a product of these FLOPs over K terms: over peak x share, times 1 + half / K."""
        found: Number = flops / (self.flops_per_s * self["compute"]) * (1 + self.half / contracted)
        return found


def kernel_rates(chip: Chip, numbers: Mapping[str, float], *, cores: int | None = None) -> KernelRates:
    """Returns the rates of a chip, or of ``cores`` of its cores.

    A number is looked up for the chip by name, else its family, the side of its matrix unit, its kind of chip, or all.
    The share of the memory bandwidth and ``half`` are those of the training fit; Blackwell has no ``half``, since its
    accumulators are apart from the registers. Blackwell's rate grows with power ** ``power``, whatever its peak.
    """
    kind = "tpu" if chip.topology == "torus" else "gpu"
    blackwell = chip.family == "blackwell"
    of_chip = 1.0 if cores is None else cores / (chip.num_cores or cores)
    share = of_chip
    own = {key: value for key, value in numbers.items() if "." not in key}
    for suffix in (kind, f"{chip.mxu_dim}", chip.family, chip.name):
        own |= {key.removesuffix(f".{suffix}"): at for key, at in numbers.items() if key.endswith(f".{suffix}")}
    if "compute" in own:
        own.setdefault("attention", own["compute"])
    if blackwell and "power" in own:
        watts, flops_per_s = BLACKWELL
        share *= ((chip.power_w or watts) / watts) ** own["power"] * flops_per_s / peak(chip, "bf16")
    calibration = fitted_calibration(chip) or datasheet_calibration(chip)
    return KernelRates(
        flops_per_s=share * peak(chip, "bf16"),
        narrow_flops_per_s=share * chip.peak_flops.get("fp8", 0.0),
        hbm_bytes_per_s=of_chip * memory_rate(chip, calibration),
        link_bytes_per_s=chip.nvlink_bytes_per_s or 0.0,
        width=chip.mxu_dim or 0,
        processors=0 if kind == "tpu" else chip.num_sms or (BLACKWELL_SMS if blackwell else 0),
        cores=cores or chip.num_cores or 1,
        half=0.0 if blackwell or kind == "tpu" else calibration.efficiency.contraction_half,
        numbers=own,
    )


def padded(size: Number, unit: Number) -> Number:
    """Returns the size rounded up to a multiple of the unit; a unit of 0 rounds nothing."""
    return np.ceil(size / unit) * unit if unit else size


def product_s(shape: Mapping[str, Any], at: KernelRates, *, narrow: bool = False) -> Number:
    """Returns the seconds of [M, K] x [K, N] in bf16, or in fp8 (``narrow``) with the cast before it.

    The product or the operands' bytes, the longer, and the start. In fp8 the last wave of tiles takes as long as the
    others: ceil(waves) / waves. In bf16 split products fill it.
    """
    rows, contracted, columns = shape["M"], padded(shape["K"], at.width), padded(shape["N"], at.width)
    moved = (1 if narrow else 2) * (rows * contracted + contracted * columns) + 2 * rows * columns
    seconds, start = at.product_s(2 * rows * contracted * columns, contracted), at["start_s"]
    if narrow:
        waves = np.ceil(rows / NVIDIA_TILE[0]) * np.ceil(columns / NVIDIA_TILE[1]) / at.processors
        faster = at.narrow_flops_per_s / at.flops_per_s * at["narrow"]
        seconds, start = seconds / faster * np.ceil(waves) / waves, at["call_s"]
    found: Number = np.maximum(seconds, moved / at.hbm_bytes_per_s) + start
    return found


def attention_s(shape: Mapping[str, Any], at: KernelRates, *, phase: str = "forward", paged: bool = False) -> Number:
    """Returns the seconds of fused attention: B sequences of T positions, N heads and G kv heads of width H.

    A causal query sees (T + block) / 2 keys. Heads are padded to the side of the matrix unit; on GPUs the softmax adds
    ``head_half`` to their width. The operands' bytes count ``attention_bytes`` times.
    """
    length, width = shape["T"], shape["H"]
    block = at["block"] if at.width else 2.0 * NVIDIA_ROWS
    keys = np.where(shape["causal"] > 0, np.minimum(length, (length + block) / 2), length)
    half = at["head_half_backward" if phase == "backward" else "head_half"] if not at.width else 0.0
    flops = 4 * PASSES[phase] * shape["B"] * shape["N"] * length * keys * (padded(width, at.width) + half)
    moved = 4 * TRAFFIC[phase] * shape["B"] * length * width * (shape["N"] + shape["G"])
    bytes_s = moved / at.hbm_bytes_per_s * at["attention_bytes"]
    math_s = flops / (at.flops_per_s * at["attention"])
    found: Number = math_s + bytes_s + at["call_s" if paged else "start_s"]
    return found


def grouped_s(shape: Mapping[str, Any], at: KernelRates) -> Number:
    """Returns the seconds of G products [M_g, K] x [K, N] whose rows are M in all: every group adds ``tile`` rows.

    On a TPU the groups follow each other on one core.
    """
    rows = shape["M"] + shape["G"] * (at.width or NVIDIA_TILE[1])
    contracted, columns = padded(shape["K"], at.width), padded(shape["N"], at.width)
    moved = 2 * (rows * contracted + rows * columns + shape["G"] * contracted * columns)
    math_s = at.product_s(2 * rows * contracted * columns, contracted) * (at.cores if at.width else 1)
    found: Number = np.maximum(math_s, moved / at.hbm_bytes_per_s) + at["start_s"]
    return found


def gated_s(shape: Mapping[str, Any], at: KernelRates, *, fused: bool) -> Number:
    """Returns the seconds of two products [M, K] x [K, N] and the gate: unless ``fused`` both results are written in
    fp32 and read again."""
    rows, contracted, columns = shape["M"], padded(shape["K"], at.width), padded(shape["N"], at.width)
    moved = 2 * (rows * contracted + 2 * contracted * columns)
    math_s = at.product_s(4 * rows * contracted * columns, contracted)
    passes = (2 if fused else 2 + 16) * rows * columns
    found: Number = np.maximum(math_s, moved / at.hbm_bytes_per_s) + passes / at.hbm_bytes_per_s + at["start_s"]
    return found


def loss_s(shape: Mapping[str, Any], at: KernelRates, *, phase: str = "forward") -> Number:
    """Returns the seconds of the loss and its product [M, K] x [K, N]: bf16 logits are written and read for the
    forward pass; their gradient too, with two more products, for the backward pass."""
    rows, contracted, columns = shape["M"], shape["K"], shape["N"]
    times = 3 if phase == "backward" else 1
    math_s = at.product_s(2 * times * rows * contracted * columns, contracted)
    moved = 2 * times * (rows * contracted + contracted * columns)
    logits = 4 * rows * columns
    found: Number = np.maximum(math_s, moved / at.hbm_bytes_per_s) + logits / at.hbm_bytes_per_s + at["start_s"]
    return found


def collective_s(shape: Mapping[str, Any], at: KernelRates) -> Number:
    """Returns the seconds of a collective over n GPUs of one switch: V (n - 1)/n bytes, twice for AllReduce.

    V are the bytes of the full array, or of each device's for AllToAll. The start grows with n; the chunks of a message
    fill the links the better the more there are, which adds the root of ``ramp_s`` times the seconds of the bytes.
    """
    members, twice = shape["n"], np.where(shape["op"] == "all_reduce", 2, 1)
    sent = twice * shape["bytes"] * (members - 1) / members
    start = at["collective_s"] + at["member_s"] * (members - 1) * twice
    rate = at.link_bytes_per_s * at["link"]
    found: Number = start + sent / rate + np.sqrt(at["ramp_s"] * sent / rate)
    return found
