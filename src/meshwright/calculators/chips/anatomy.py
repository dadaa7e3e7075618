"""Inside a chip and across a pod: systolic arrays, SMs and the dies they are cut from, tiles, totals.

Sources: How to Scale Your Model, sections 2.1, 2.2, 2.5 and 9.2.2; NVIDIA's architecture papers for SM figures.
"""

import math
from collections.abc import Sequence

import msgspec

from meshwright.algebra.sizes import Number
from meshwright.core.errors import InputError
from meshwright.spec.chip import Chip, known, peak
from meshwright.spec.cluster import Cluster


class PodTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over a cluster; ``None`` where the chip's figure is not known."""

    num_chips: int
    num_hosts: int
    num_cores: int | None
    num_sms: int | None
    num_fp32_lanes: int | None
    num_tensor_cores: int | None
    hbm_bytes: float | None
    hbm_bytes_per_s: float | None
    peak_flops: float
    dcn_bytes_per_s: float | None
    power_w: float | None
    price_usd_per_hour: float | None


def product_flops_per_cycle(rows: Number, inner: Number, cols: Number, *, cycles: Number = 1) -> Number:
    """FLOPs per cycle of a unit that does [rows,inner] x [inner,cols] every ``cycles``: 2 m k n / cycles.

    A 128x128 MXU does [8,128] x [128,128] every 8 cycles; an H100 tensor core [16,4] x [4,8] every cycle.
    """
    return 2 * rows * inner * cols / cycles


def mxu_flops_per_cycle(mxu_dim: Number) -> Number:
    """FLOPs per cycle of a full systolic array: one multiply-add per ALU."""
    return 2 * mxu_alus(mxu_dim)


def mxu_alus(mxu_dim: Number) -> Number:
    """Multiply-add units of a square systolic array. Source: section 2.5.2."""
    return mxu_dim * mxu_dim


def units_flops_per_s(num_units: Number, flops_per_cycle: Number, clock_hz: Number) -> Number:
    """FLOP/s of equal units at one clock: MXUs of a TPU, tensor cores or lanes of a GPU."""
    return num_units * flops_per_cycle * clock_hz


def tpu_peak_from_anatomy(chip: Chip) -> float:
    """FLOP/s of a TPU from its MXUs, their size and the clock: a check of the table's peak."""
    num_mxus = known(chip, "num_cores") * known(chip, "mxus_per_core")
    return float(units_flops_per_s(num_mxus, mxu_flops_per_cycle(known(chip, "mxu_dim")), known(chip, "clock_hz")))


def gpu_peak_from_anatomy(chip: Chip) -> float:
    """Dense FLOP/s of a GPU from its SMs, tensor cores and clock: a check of the table's peak."""
    per_sm = known(chip, "tensor_cores_per_sm") * known(chip, "tensor_core_flops_per_cycle")
    return float(units_flops_per_s(known(chip, "num_sms"), per_sm, known(chip, "clock_hz")))


class GpuAnatomy(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU, or the whole die it is cut from, is made of; ``None`` where it is not known.

    An FP32 lane does one multiply-add a cycle, 2 FLOPs.
    """

    name: str
    num_tpcs: int | None
    num_sms: int
    fp32_lanes_per_sm: int
    tensor_cores_per_sm: int
    tensor_core_flops_per_cycle: int | None
    l2_bytes: float | None

    @property
    def num_fp32_lanes(self) -> int:
        """FP32 CUDA cores, as they are sold."""
        return self.num_sms * self.fp32_lanes_per_sm

    @property
    def num_tensor_cores(self) -> int:
        return self.num_sms * self.tensor_cores_per_sm

    @property
    def vector_flops_per_sm_cycle(self) -> int:
        """FP32 FLOPs of one SM in a cycle."""
        return 2 * self.fp32_lanes_per_sm

    @property
    def tensor_flops_per_sm_cycle(self) -> int | None:
        """Dense FLOPs of one SM's tensor cores in a cycle, at 16 bits."""
        each = self.tensor_core_flops_per_cycle
        return None if each is None else self.tensor_cores_per_sm * each


def gpu_anatomy(chip: Chip) -> GpuAnatomy | None:
    """The SMs, lanes and tensor cores of a GPU as it is sold; None for a chip without SMs in its table."""
    if chip.num_sms is None or chip.fp32_lanes_per_sm is None:
        return None
    return GpuAnatomy(
        name=chip.name,
        num_tpcs=chip.num_tpcs,
        num_sms=chip.num_sms,
        fp32_lanes_per_sm=chip.fp32_lanes_per_sm,
        tensor_cores_per_sm=chip.tensor_cores_per_sm or 0,
        tensor_core_flops_per_cycle=chip.tensor_core_flops_per_cycle,
        l2_bytes=chip.l2_bytes,
    )


def full_die(chip: Chip) -> GpuAnatomy | None:
    """The same of the whole die, of which makers switch off what is broken or draws too much (floor sweeping)."""
    sold = gpu_anatomy(chip)
    if sold is None or chip.die is None or chip.die_gpcs is None or chip.die_tpcs_per_gpc is None:
        return None
    tpcs = chip.die_gpcs * chip.die_tpcs_per_gpc
    return msgspec.structs.replace(
        sold,
        name=chip.die,
        num_tpcs=tpcs,
        num_sms=tpcs * int(known(chip, "sms_per_tpc")),
        l2_bytes=chip.die_l2_bytes,
    )


def share_after_speedup(share: Number, speedup: Number) -> Number:
    """The part of the time that some work takes once all the rest is ``speedup`` times faster: Amdahl's law.

    share / (share + (1 - share) / speedup). With ``share`` of the FLOPs on units that are so many times slower than
    the rest, it is their part of the time.
    """
    return share / (share + (1 - share) / speedup)


def bytes_per_s(gigabits_per_s: Number) -> Number:
    """Bytes/s of a link sold in Gb/s."""
    return gigabits_per_s * 1e9 / 8


def two_way(one_way_bytes_per_s: Number) -> Number:
    """Both directions of a link: the W of ring formulas. Source: section 2.3."""
    return 2 * one_way_bytes_per_s


def per_chip(host_bytes_per_s: Number, chips_per_host: Number) -> Number:
    """A chip's share of what its host has: DCN, or chips of a tray. Source: section 2.2."""
    return host_bytes_per_s / chips_per_host


def ratio(first: Number, second: Number) -> Number:
    """How many times ``first`` is ``second``, such as HBM over PCIe."""
    return first / second


def num_hosts(num_chips: int, chips_per_host: int) -> int:
    """CPU hosts of that many chips, rounded up."""
    return math.ceil(num_chips / chips_per_host)


def pod_totals(cluster: Cluster, *, dtype: str = "bf16") -> PodTotals:
    """Chips, hosts, cores, memory, FLOP/s, network, power and price of the whole cluster."""
    chip, count = cluster.chip, cluster.num_chips

    def total(figure: float | None, times: int = count) -> float | None:
        return None if figure is None else figure * times

    def units(figure: int | None) -> int | None:
        return None if figure is None else figure * count

    sold = gpu_anatomy(chip)
    return PodTotals(
        num_chips=count,
        num_hosts=cluster.num_hosts,
        num_cores=units(chip.num_cores),
        num_sms=units(chip.num_sms),
        num_fp32_lanes=units(sold.num_fp32_lanes) if sold else None,
        num_tensor_cores=units(sold.num_tensor_cores) if sold else None,
        hbm_bytes=total(chip.hbm_bytes),
        hbm_bytes_per_s=total(chip.hbm_bytes_per_s),
        peak_flops=peak(chip, dtype) * count,
        dcn_bytes_per_s=total(chip.dcn_bytes_per_s_per_host, cluster.num_hosts),
        power_w=total(chip.power_w),
        price_usd_per_hour=total(chip.price_usd_per_hour),
    )


def padded_shape(shape: Sequence[int], tile: Sequence[int]) -> tuple[int, ...]:
    """The shape in memory: the last dims rounded up to whole tiles."""
    if len(tile) > len(shape) or min(tile, default=1) < 1:
        raise InputError(f"tile {tuple(tile)} does not fit an array of shape {tuple(shape)}.")
    outer = len(shape) - len(tile)
    return (*shape[:outer], *(-(-size // t) * t for size, t in zip(shape[outer:], tile, strict=True)))


def tile_expansion(shape: Sequence[int], tile: Sequence[int]) -> float:
    """Memory of an array over what its elements need, once tiled: f32[3,5] in T(2,2) takes 1.6.

    Source: How to Scale Your Model, section 9.2.2.
    """
    return math.prod(padded_shape(shape, tile)) / math.prod(shape)
