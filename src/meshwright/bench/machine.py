"""Measures the rates of this machine with all its emulated devices busy, as in a training step.

Emulated devices share the cores and the memory of one machine, so a step never reaches the rates of a single busy
device.
"""

import datetime
import os
import platform
from collections.abc import Callable, Mapping

import jax
import msgspec

from meshwright.bench.devices import EMULATED, Bench, MlpShape, Workload
from meshwright.bench.fit import FittedLine
from meshwright.bench.links import rate_of
from meshwright.bench.machine_step import REFERENCES, host_rates, measure_references
from meshwright.bench.timing import SWEEPS, sweep_medians
from meshwright.bench.workloads import (
    COLLECTIVE_FUNCTIONS,
    ROUNDS,
    SILU_BYTES,
    attention_workload,
    collective_workload,
    copy_workload,
    groups_of,
    mlp_workload,
    product_workload,
    weight_workload,
)
from meshwright.core.dims import CollectiveKind
from meshwright.core.units import counted
from meshwright.spec.calibration import Calibration, CollectiveRate
from meshwright.spec.chip import chip

SMALL_BYTES, LARGE_BYTES = 2**12, 2**20
PEAK_SIDES = (256, 512, 1024)
"""Sides of square products. The fastest of these and the MLP is the peak: this machine has no data sheet."""
DTYPE = "fp32"
DTYPES = (DTYPE, "bf16")
"""Dtypes of products that are measured; `machine_speed` uses the first."""


def measure_machine(
    num_devices: int,
    *,
    matmul_shape: MlpShape = EMULATED.mlps[0],
    seconds_per_figure: float = 0.3,
    say: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Returns measured matmul, attention, memory and collective rates per device; ``say`` gets a line for each.

    ``matmul_shape`` (m, k, n) should be like the products of the job: rates of small products are lower. Collectives
    run over groups of every power of two, all groups of a size at once. `with_host_rates` adds rates measured inside a
    training step; without them, steps are priced by the rates of this function.
    """
    bench = Bench(devices=tuple(jax.devices()[:num_devices]), chip=chip("cpu"), dtypes=(DTYPE,))
    workload_by_name: dict[str, Workload] = {"memory": copy_workload("silu", SILU_BYTES, ROUNDS)}
    for dtype in DTYPES:
        workload_by_name[f"matmul {dtype}"] = mlp_workload(matmul_shape, dtype)
        workload_by_name[f"attention {dtype}"] = attention_workload(EMULATED.attention[0], dtype, both=True)
        workload_by_name[f"weight {dtype}"] = weight_workload(dtype)
        workload_by_name |= {f"square {s} {dtype}": product_workload(bench, dtype, s, rounds=1) for s in PEAK_SIDES}
    moves = [(kind, group) for group in reversed(groups_of(num_devices, {})) for kind in COLLECTIVE_FUNCTIONS]
    for kind, group in moves:
        for num_bytes in (SMALL_BYTES, LARGE_BYTES):
            workload_by_name[f"{kind} {group.size} {num_bytes}"] = collective_workload(kind, group, num_bytes)
    seconds_of = sweep_medians(
        {name: bench.call(workload) for name, workload in workload_by_name.items()}, seconds_each=seconds_per_figure
    )
    work_rate = {name: workload.work / seconds_of[name] for name, workload in workload_by_name.items()}
    matmul_rate_of, attention, weights = (
        {dtype: work_rate[f"{work} {dtype}"] for dtype in DTYPES} for work in ("matmul", "attention", "weight")
    )
    peaks = {d: max(matmul_rate_of[d], *(work_rate[f"square {side} {d}"] for side in PEAK_SIDES)) for d in DTYPES}
    memory_rate, rates = work_rate["memory"], [_collective_rate(kind, group.size, seconds_of) for kind, group in moves]
    for dtype in DTYPES:
        say(
            f"{dtype}: matmul {matmul_rate_of[dtype] / 1e9:.3g} GFLOP/s a device, {num_devices} at once, at most "
            f"{peaks[dtype] / 1e9:.3g}; attention {attention[dtype] / 1e9:.3g}; weights {weights[dtype] / 1e9:.3g} GB/s"
        )
    say(f"memory {memory_rate / 1e9:.3g} GB/s a device")
    for rate in rates:
        if rate.kind == "all_gather":
            rate_text = f"{rate.latency_s * 1e6:.3g} us + bytes at {rate.bytes_per_s / 1e9:.3g} GB/s"
            say(f"AllGather over {rate.group_size}: {rate_text}")
    devices_text = counted(num_devices, "device")
    return Calibration(
        name=f"this machine, {devices_text}",
        chip="cpu",
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        date=datetime.date.today().isoformat(),
        devices=num_devices,
        matmul_flops_per_s=matmul_rate_of,
        peak_flops_per_s=peaks,
        attention_flops_per_s=attention,
        weight_bytes_per_s=weights,
        memory_bytes_per_s=memory_rate,
        memory_bytes=bench.memory_bytes,
        collectives=tuple(rates),
        sources=_sources(f"measured with {devices_text} busy, median of {SWEEPS} sweeps", matmul_shape),
    )


def _sources(method: str, matmul_shape: MlpShape) -> dict[str, str]:
    return {
        "matmul_flops_per_s": f"{method}; gated MLP with gradients, m k n = {matmul_shape}",
        "peak_flops_per_s": f"{method}; the fastest of the gated MLP and square products of sides {PEAK_SIDES}",
        "attention_flops_per_s": f"{method}; forward and backward, B T N K H = {EMULATED.attention[0]}",
        "weight_bytes_per_s": f"{method}; a product of 8 rows with a weight of 16384 x 1024, read once",
        "memory_bytes_per_s": f"{method}; silu over {SILU_BYTES} bytes, read and written once",
        "memory_bytes": "physical memory of the machine, shared equally",
        "collectives": f"{method}; line through {SMALL_BYTES} and {LARGE_BYTES} bytes a device",
    }


def machine_speed(calibration: Calibration | None, *, seconds: float = 0.3) -> float | None:
    """Returns the rate of products now over the calibration's; None unless it was measured on this machine's CPU."""
    machine_name = f"{platform.machine()}, {os.cpu_count()} cores"
    if calibration is None or calibration.machine != machine_name or not calibration.devices or jax.process_count() > 1:
        return None
    num_devices, known_flops_per_s = calibration.devices, calibration.matmul_flops_per_s.get(DTYPE)
    if known_flops_per_s is None or jax.default_backend() != "cpu" or len(jax.devices()) < num_devices:
        return None
    bench = Bench(devices=tuple(jax.devices()[:num_devices]), chip=chip("cpu"), dtypes=(DTYPE,))
    workload = mlp_workload(EMULATED.mlps[0], DTYPE)
    seconds_by_name = sweep_medians({"matmul": bench.call(workload)}, seconds_each=seconds)
    return workload.work / seconds_by_name["matmul"] / known_flops_per_s


def _collective_rate(kind: CollectiveKind, group_size: int, seconds_by_name: Mapping[str, float]) -> CollectiveRate:
    """Returns the rate of a collective, from the line through the seconds of a small and of a large array."""
    small_s, large_s = (seconds_by_name[f"{kind} {group_size} {num_bytes}"] for num_bytes in (SMALL_BYTES, LARGE_BYTES))
    slope = max(0.0, (large_s - small_s) / (LARGE_BYTES - SMALL_BYTES))
    return rate_of(kind, group_size, FittedLine(start=small_s - slope * SMALL_BYTES, slope=slope, error=0.0))


def with_host_rates(found: Calibration, say: Callable[[str], None] = lambda line: None) -> Calibration:
    """Returns the calibration with rates inside a step added, from reference steps that are run on its devices."""
    host = host_rates(measure_references(found, found.devices or 1))
    say(f"products in a step {_rate(host.product.flop, 'GFLOP/s')} and {_rate(host.product.byte, 'GB/s')}")
    say(f"elementwise ops in a step {_rate(host.stream.byte, 'GB/s')}, loops {_rate(host.loop_byte, 'GB/s')}")
    shapes_text = ", ".join(
        f"D {step.model.d_model} F {step.model.d_ff}, {step.job.batch_seqs} x {step.job.seq_len} tokens"
        for step in REFERENCES
    )
    source_text = f"steps of {shapes_text} under the profiler, seconds by derived step"
    return msgspec.structs.replace(found, host=host, sources={**found.sources, "host": source_text})


def _rate(s_per_unit: float, unit: str) -> str:
    """Formats seconds per unit as billions of units a second; "no time seen" if the fit found about 0 seconds."""
    return f"{1e-9 / s_per_unit:.3g} {unit}" if s_per_unit > IN_NO_TIME else "no time seen"


IN_NO_TIME = 1e-13
"""Seconds per unit below which the fit found no time."""
