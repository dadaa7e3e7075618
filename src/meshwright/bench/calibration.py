"""Converts the report of a benchmark to a calibration, with which `plan` prices."""

import msgspec

from meshwright.bench.results import BenchReport, Collective, Mlp, Product
from meshwright.spec.calibration import Calibration, CollectiveRate, Efficiency
from meshwright.spec.chip import Chip, chip
from meshwright.spec.efficiency import fitted_calibration

SHORTEST_HOP_S = 1e-8


def calibration_of(report: BenchReport) -> Calibration:
    """Returns rates per device with sources: measured, else the chip's fitted numbers, else its data sheet."""
    benched_chip = chip(report.chip)
    base_calibration = fitted_calibration(benched_chip) or Calibration(name="", chip=benched_chip.name)
    collectives = report.collectives.collectives if report.collectives else ()
    efficiency, hop_s_by_level = _links(collectives, benched_chip, base_calibration)
    matmul_rate_by_dtype, matmul_source = matmul_rates(report, base_calibration.efficiency)
    attention_rate_by_dtype, attention_source = attention_rates(report, base_calibration.efficiency)
    # Layers on emulated devices read and write a few MiB with a silu; elsewhere the largest copy shows the rate.
    copy = report.copy.largest("silu" if report.platform == "cpu" else "copy") if report.copy else None
    sizes_bytes = [collective_time.array_bytes for collective_time in collectives[0].times] if collectives else []
    text_by_figure = {
        "matmul_flops_per_s": matmul_source,
        "attention_flops_per_s": attention_source,
        "memory_bytes_per_s": f"{copy.kind} of {copy.array_bytes} bytes, read and written once" if copy else "",
        "memory_bytes": "the machine's, shared equally" if report.platform == "cpu" else "the backend's limit",
    }
    if sizes_bytes:
        sizes_text = f"{len(sizes_bytes)} sizes of {min(sizes_bytes)} to {max(sizes_bytes)} bytes"
        text_by_figure["collectives"] = f"lines through {sizes_text}, least relative deviation"
    # the highest rate of a product by element type, for machines without a data sheet
    peak_by_dtype: dict[str, float] = {}
    products: list[Product | Mlp] = [*(report.matmul.sweep if report.matmul else ())]
    products += report.mlp.mlps if report.mlp else ()
    for product in products:
        peak_by_dtype[product.dtype] = max(peak_by_dtype.get(product.dtype, 0.0), product.flops_per_s)
    origin = f"meshwright bench, {report.date}"
    return Calibration(
        name=report.machine,
        chip=benched_chip.name,
        machine=report.machine,
        date=report.date[:10],
        devices=report.num_devices if report.platform == "cpu" else None,
        matmul_flops_per_s=matmul_rate_by_dtype,
        peak_flops_per_s=peak_by_dtype,
        attention_flops_per_s=attention_rate_by_dtype,
        memory_bytes_per_s=copy.bytes_per_s if copy else None,
        memory_bytes=report.memory_bytes,
        collectives=_slowest(collectives),
        hop_s=hop_s_by_level,
        efficiency=efficiency,
        sources=base_calibration.sources | {name: f"{origin}; {text}" for name, text in text_by_figure.items() if text},
    )


def matmul_rates(report: BenchReport, efficiency: Efficiency) -> tuple[dict[str, float], str]:
    """Returns FLOP/s by element type, and a text of their sources: the fastest square product, or an MLP if measured.

    Emulated devices use the smallest MLP, whose sizes are typical of their jobs. float32 on NVIDIA GPUs means tf32, the
    default there. Rates are extrapolated to infinite contractions.
    """
    rate_by_dtype, text_by_dtype = {}, {}
    half = efficiency.contraction_half
    if report.matmul:
        for dtype in dict.fromkeys(product.dtype for product in report.matmul.sweep):
            best_product = report.matmul.best(dtype)
            if best_product and not (report.platform == "tpu" and dtype == "fp32"):
                rate_by_dtype[dtype] = best_product.flops_per_s * (1 + half / best_product.k)
                text_by_dtype[dtype] = f"square product of side {best_product.m}"
    mlps = report.mlp.mlps if report.mlp else ()
    if mlps:
        mlp = mlps[0] if report.platform == "cpu" else max(mlps, key=lambda mlp: mlp.flops_per_s)
        # The mean of 1 + half / K over nine products of equal FLOPs: K is the model width in three of them, the
        # feed-forward width in three, and the number of tokens in three.
        rate_by_dtype[mlp.dtype] = mlp.flops_per_s * (1 + half * (1 / mlp.d_model + 1 / mlp.d_ff + 1 / mlp.tokens) / 3)
        text_by_dtype[mlp.dtype] = f"gated MLP with gradients, {mlp.tokens} x {mlp.d_model} x {mlp.d_ff}"
    if "tf32" in rate_by_dtype:
        rate_by_dtype["fp32"] = rate_by_dtype["tf32"]
        text_by_dtype["fp32"] = "as tf32, which programs use by default"
    return rate_by_dtype, "; ".join(f"{dtype}: {text}" for dtype, text in text_by_dtype.items())


def attention_rates(report: BenchReport, efficiency: Efficiency) -> tuple[dict[str, float], str]:
    """Returns the FLOP/s of attention, forward plus backward, by element type, and a text of the source: the shortest
    sequences on emulated devices, else the fastest length. Overheads that `cost` adds for narrow heads and short
    sequences are removed."""
    part = report.attention
    if part is None or not part.times:
        return {}, ""
    best_time = part.times[0] if report.platform == "cpu" else max(part.times, key=lambda t: t.both_flops_per_s)
    flops_per_s = best_time.both_flops_per_s * (1 + efficiency.head_half / best_time.head_dim)
    if report.platform != "cpu":
        flops_per_s *= 1 + efficiency.rows_half / best_time.length
    shape = (best_time.batch, best_time.length, best_time.num_heads, best_time.num_kv_heads, best_time.head_dim)
    return {part.dtype: flops_per_s}, f"forward and backward, B T N K H = {shape}"


def _slowest(collectives: tuple[Collective, ...]) -> tuple[CollectiveRate, ...]:
    """Returns one rate for every kind and group size: the slowest of all axes of that size."""
    rate_by_group: dict[tuple[str, int], CollectiveRate] = {}
    for move in collectives:
        slowest_rate = rate_by_group.setdefault((move.kind, move.group.size), move.rate)
        rate_by_group[move.kind, move.group.size] = min(slowest_rate, move.rate, key=lambda rate: rate.bytes_per_s)
    return tuple(rate_by_group.values())


def _links(collectives: tuple[Collective, ...], chip: Chip, base: Calibration) -> tuple[Efficiency, dict[str, float]]:
    """Returns ``base``'s efficiencies and seconds per hop, with NVLink's from the AllGather over the largest group.

    `cost` prices links of accelerators by these two, not by the rates of collectives.
    """
    gather_rates = [collective.rate for collective in collectives if collective.kind == "all_gather"]
    if not gather_rates or chip.topology != "switched" or chip.nvlink_bytes_per_s is None:
        return base.efficiency, base.hop_s
    widest_rate = max(gather_rates, key=lambda rate: rate.group_size)
    nvlink_share = min(1.0, widest_rate.bytes_per_s / chip.nvlink_bytes_per_s)
    efficiency = msgspec.structs.replace(base.efficiency, nvlink=nvlink_share)
    return efficiency, {**base.hop_s, "nvlink": max(widest_rate.latency_s, SHORTEST_HOP_S)}
