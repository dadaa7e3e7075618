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


def mxu_flops_per_cycle(mxu_dim: Number) -> Number:
    """Returns FLOPs per cycle of a full systolic array: one multiply-add per ALU. Source: section 2.5.2."""
    return 2 * mxu_dim * mxu_dim


def tpu_peak_from_anatomy(chip: Chip) -> float:
    """Returns FLOP/s of a TPU from its MXUs, their size and the clock: a check of the table's peak."""
    num_mxus = known(chip, "num_cores") * known(chip, "mxus_per_core")
    return float(num_mxus * mxu_flops_per_cycle(known(chip, "mxu_dim")) * known(chip, "clock_hz"))


def mxu_padding(chip: Chip, rows: int, inner: int, columns: int) -> float:
    """Returns the FLOPs of a product in whole MXU tiles over the product's FLOPs; 1 for a chip without ``mxu_dim``.

    An MXU holds mxu_dim x mxu_dim elements of one factor; 8 rows of the other pass at a time, the sublanes of a
    register."""
    if chip.mxu_dim is None:
        return 1.0
    tile_shapes = ((8, chip.mxu_dim, chip.mxu_dim), (chip.mxu_dim, chip.mxu_dim, 8))
    return min(tile_expansion((rows, inner, columns), tile) for tile in tile_shapes)


def gpu_peak_from_anatomy(chip: Chip) -> float:
    """Returns dense FLOP/s of a GPU from its SMs, tensor cores and clock: a check of the table's peak."""
    flops_per_sm_cycle = known(chip, "tensor_cores_per_sm") * known(chip, "tensor_core_flops_per_cycle")
    return known(chip, "num_sms") * flops_per_sm_cycle * known(chip, "clock_hz")


class GpuAnatomy(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a GPU, or of the whole die that it is cut from; ``None`` for an unknown number.

    An FP32 lane (CUDA core) does one multiply-add a cycle, 2 FLOPs; FLOPs of tensor cores are dense ones at 16 bits.
    """

    name: str
    tpcs: int | None
    sms: int
    fp32_lanes: int
    tensor_cores: int
    fp32_flops_per_sm_cycle: int
    tensor_flops_per_sm_cycle: int | None
    l2_bytes: float | None


def gpu_anatomy(chip: Chip) -> GpuAnatomy | None:
    """Returns the SMs, lanes and tensor cores of a GPU as it is sold; None for a chip whose table has no SMs."""
    if chip.num_sms is None or chip.fp32_lanes_per_sm is None:
        return None
    cores_per_sm, flops_per_core_cycle = chip.tensor_cores_per_sm or 0, chip.tensor_core_flops_per_cycle
    return GpuAnatomy(
        name=chip.name,
        tpcs=chip.num_tpcs,
        sms=chip.num_sms,
        fp32_lanes=chip.num_sms * chip.fp32_lanes_per_sm,
        tensor_cores=chip.num_sms * cores_per_sm,
        fp32_flops_per_sm_cycle=2 * chip.fp32_lanes_per_sm,
        tensor_flops_per_sm_cycle=None if flops_per_core_cycle is None else cores_per_sm * flops_per_core_cycle,
        l2_bytes=chip.l2_bytes,
    )


def full_die(chip: Chip) -> GpuAnatomy | None:
    """Returns the anatomy of the whole die, with parts that are switched off in the GPU as sold; None if unknown."""
    if chip.die is None or chip.die_gpcs is None or chip.die_tpcs_per_gpc is None:
        return None
    tpcs = chip.die_gpcs * chip.die_tpcs_per_gpc
    die_values = {"num_tpcs": tpcs, "num_sms": tpcs * int(known(chip, "sms_per_tpc")), "l2_bytes": chip.die_l2_bytes}
    return gpu_anatomy(msgspec.structs.replace(chip, name=chip.die, **die_values))


def share_after_speedup(share: Number, speedup: Number) -> Number:
    """Returns the share of time of some work after all other work gets ``speedup`` times faster: Amdahl's law.

    share / (share + (1 - share) / speedup). If units that are ``speedup`` times slower than the rest do ``share`` of
    the FLOPs, it is their share of the time.
    """
    return share / (share + (1 - share) / speedup)


def ratio(first: Number, second: Number) -> Number:
    """Returns first / second."""
    return first / second


def pod_totals(cluster: Cluster, *, dtype: str = "bf16") -> dict[str, float | None]:
    """Returns chips, hosts, cores, memory, FLOP/s, network, watts and price of a cluster by name; None if unknown."""
    chip, anatomy = cluster.chip, gpu_anatomy(cluster.chip)
    figures_per_chip = {
        "num_cores": chip.num_cores,
        "num_sms": chip.num_sms,
        "num_fp32_lanes": anatomy.fp32_lanes if anatomy else None,
        "num_tensor_cores": anatomy.tensor_cores if anatomy else None,
        "hbm_bytes": chip.hbm_bytes,
        "hbm_bytes_per_s": chip.hbm_bytes_per_s,
        "peak_flops": peak(chip, dtype),
        "dcn_bytes_per_s": chip.dcn_bytes_per_s_per_host,
        "power_w": chip.power_w,
        "price_usd_per_hour": chip.price_usd_per_hour,
    }
    factor_of = dict.fromkeys(figures_per_chip, cluster.num_chips) | {"dcn_bytes_per_s": cluster.num_hosts}
    totals = {name: None if figure is None else figure * factor_of[name] for name, figure in figures_per_chip.items()}
    return {"num_chips": cluster.num_chips, "num_hosts": cluster.num_hosts, **totals}


def padded_shape(shape: Sequence[int], tile: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape with its last dims rounded up to whole tiles. Raises InputError if the tile has more dims."""
    if len(tile) > len(shape) or min(tile, default=1) < 1:
        raise InputError(f"tile {tuple(tile)} needs sizes of 1 or more, and at most the dims of {tuple(shape)}.")
    num_untiled = len(shape) - len(tile)
    return (*shape[:num_untiled], *(-(-size // t) * t for size, t in zip(shape[num_untiled:], tile, strict=True)))


def tile_expansion(shape: Sequence[int], tile: Sequence[int]) -> float:
    """Returns the bytes of an array in whole tiles over the bytes of its elements: f32[3,5] in T(2,2) takes 1.6.

    Source: How to Scale Your Model, section 9.2.2.
    """
    return math.prod(padded_shape(shape, tile)) / math.prod(shape)
