"""Rates of the devices at hand, measured with every device busy at once, as a training step keeps them.

Emulated devices share the cores and the memory of one machine, so a rate measured on one of them alone
would be one that a step never sees.
"""

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshwright.cost.network import received_share
from meshwright.parallel.mesh import device_mesh
from meshwright.spec.calibration import Calibration, CollectiveKind, CollectiveRate

COLLECTIVES: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SMALL_ELEMENTS, LARGE_ELEMENTS = 2**10, 2**18


def measure_machine(
    num_devices: int,
    *,
    matmul_shape: tuple[int, int, int] = (512, 256, 1024),
    dtype: str = "fp32",
    seconds_per_figure: float = 0.3,
    say: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Matmul, memory and collective rates per device, medians of repeated runs.

    ``matmul_shape`` (m, k, n) should be like the products of the job: rates of small products are lower.
    Collectives are measured over groups of every power of two, all groups at the same time.
    """
    repeat = partial(_median_seconds, budget_s=seconds_per_figure)
    matmul = _matmul_flops_per_s(num_devices, matmul_shape, repeat)
    say(f"matmul {matmul / 1e9:.3g} GFLOP/s a device in {dtype}, {num_devices} at once")
    memory = _memory_bytes_per_s(num_devices, repeat)
    say(f"memory {memory / 1e9:.3g} GB/s a device")
    rates: list[CollectiveRate] = []
    size = 2
    while size <= num_devices:
        for kind in COLLECTIVES:
            rates.append(_collective_rate(kind, size, num_devices, repeat))
        gather = rates[-len(COLLECTIVES)]
        say(f"AllGather over {size}: {gather.latency_s * 1e6:.3g} us + bytes at {gather.bytes_per_s / 1e9:.3g} GB/s")
        size *= 2
    how = f"measured with {num_devices} devices busy, median"
    return Calibration(
        name=f"this machine, {num_devices} devices",
        chip="cpu",
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        date=datetime.date.today().isoformat(),
        matmul_flops_per_s={dtype: matmul},
        memory_bytes_per_s=memory,
        memory_bytes=_memory_bytes() / num_devices,
        collectives=tuple(rates),
        sources={
            "matmul_flops_per_s": f"{how}; product of {' x '.join(map(str, matmul_shape))}",
            "memory_bytes_per_s": f"{how}; x * a + b over 4 MiB, read and written once",
            "memory_bytes": "physical memory of the machine, shared equally",
            "collectives": f"{how}; line through {SMALL_ELEMENTS * 4} and {LARGE_ELEMENTS * 4} bytes a device",
        },
    )


def _memory_bytes() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _median_seconds(function: Callable[..., Any], *args: Any, budget_s: float) -> float:
    """Median wall time of a call after one warm-up, repeated for about ``budget_s`` (3 to 200 times)."""
    jax.block_until_ready(function(*args))
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - started < budget_s and len(times) < 200):
        begin = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _on_every_device(
    body: Callable[..., jax.Array], num_devices: int, shapes: Sequence[tuple[int, ...]], axes: dict[str, int]
) -> tuple[Callable[..., jax.Array], list[jax.Array]]:
    """``body`` jitted over a mesh, and one block of random numbers a device for each of its arguments."""
    mesh = device_mesh(axes)
    spec = PartitionSpec(tuple(axes))
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec,) * len(shapes), out_specs=spec, check_vma=False))
    rng = np.random.default_rng(0)
    sharding = jax.NamedSharding(mesh, spec)
    values = [jax.device_put(rng.standard_normal((num_devices * s[0], *s[1:]), np.float32), sharding) for s in shapes]
    return mapped, values


Repeat = Callable[..., float]


def _matmul_flops_per_s(num_devices: int, shape: tuple[int, int, int], repeat: Repeat) -> float:
    """Rate per device of ten dependent products in a row, so that starting a call costs little."""
    m, k, n = shape
    rounds = 10

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        def one(_: int, y: jax.Array) -> jax.Array:
            return (y @ w) @ w.T * 1e-3

        return lax.fori_loop(0, rounds, one, x)

    function, values = _on_every_device(body, num_devices, [(m, k), (k, n)], {"device": num_devices})
    return rounds * 2 * 2 * m * k * n / repeat(function, *values)


def _memory_bytes_per_s(num_devices: int, repeat: Repeat) -> float:
    """Rate per device of reading and writing a 4 MiB array once."""
    elements = 2**20

    def body(x: jax.Array) -> jax.Array:
        return x * 1.5 + 0.5

    function, values = _on_every_device(body, num_devices, [(elements,)], {"device": num_devices})
    return 2 * 4 * elements / repeat(function, *values)


def _collective(kind: CollectiveKind, x: jax.Array) -> jax.Array:
    if kind == "all_gather":
        return lax.all_gather(x, "group", tiled=True)
    if kind == "reduce_scatter":
        return lax.psum_scatter(x, "group", tiled=True)
    if kind == "all_reduce":
        return lax.psum(x, "group")
    return lax.all_to_all(x, "group", split_axis=0, concat_axis=0, tiled=True)


def _collective_rate(kind: CollectiveKind, size: int, num_devices: int, repeat: Repeat) -> CollectiveRate:
    """Latency and rate from a small and a large array, ten collectives in a row each."""
    rounds = 10
    times = []
    for elements in (SMALL_ELEMENTS, LARGE_ELEMENTS):
        local = elements // size if kind == "all_gather" else elements

        def body(x: jax.Array) -> jax.Array:
            def one(_: int, y: jax.Array) -> jax.Array:
                # The first entry of the result feeds the next round, so that none is dropped or reordered.
                return y + _collective(kind, y)[:1] * 1e-6

            return lax.fori_loop(0, rounds, one, x)

        function, values = _on_every_device(
            body, num_devices, [(local,)], {"others": num_devices // size, "group": size}
        )
        times.append(repeat(function, *values) / rounds)
    full_bytes = (SMALL_ELEMENTS * 4, LARGE_ELEMENTS * 4)
    slope = max((times[1] - times[0]) / (full_bytes[1] - full_bytes[0]), 1e-15)
    latency = max(times[0] - slope * full_bytes[0], 1e-7)
    return CollectiveRate(
        kind=kind,
        group_size=size,
        latency_s=latency,
        bytes_per_s=received_share(kind, size) / slope,
    )
