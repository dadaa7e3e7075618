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

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from meshwright.algebra.notation import parse_array
from meshwright.algebra.ops.attention import Attention
from meshwright.algebra.sizes import OpSizes
from meshwright.algebra.steps import Step
from meshwright.bench.machine_step import REFERENCES, host_rates, measure_references
from meshwright.cost.network.collectives import received_share
from meshwright.cost.work.ops import op_flops
from meshwright.nn.activations import silu_mul
from meshwright.nn.attention.choice import attention, attention_backward
from meshwright.nn.attention.visibility import AttentionCall, Places
from meshwright.parallel.mesh import device_mesh
from meshwright.spec.calibration import Calibration, CollectiveKind, CollectiveRate

COLLECTIVES: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
SMALL_ELEMENTS, LARGE_ELEMENTS, MEMORY_ELEMENTS = 2**10, 2**18, 2**20
ROUNDS, SWEEPS = 10, 4
ATTENTION_SHAPE = (4, 128, 8, 4, 32)


def measure_machine(
    num_devices: int,
    *,
    matmul_shape: tuple[int, int, int] = (512, 256, 704),
    dtype: str = "fp32",
    seconds_per_figure: float = 0.3,
    in_step: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Matmul, memory and collective rates per device.

    Each figure is timed in several sweeps over all of them, so that a burst of other work on the machine hits
    few of its times, and is the median of the sweeps' medians. ``matmul_shape`` (m, k, n) should be like the
    products of the job: rates of small products are lower. Collectives are measured over groups of every power
    of two, all groups at the same time. ``in_step`` adds the rates inside a training step (`machine_step`), which takes
    some twenty seconds more; without, steps are priced by the others.
    """
    probes = _probes(num_devices, matmul_shape)
    seconds = _sweep(probes, budget_s=seconds_per_figure / SWEEPS)
    matmul = mlp_flops(matmul_shape) / seconds["matmul"]
    attended = attention_flops(ATTENTION_SHAPE) / seconds["attention"]
    memory = ROUNDS * 2 * 4 * MEMORY_ELEMENTS / seconds["memory"]
    rates = tuple(_collective_rate(kind, size, seconds) for size in _group_sizes(num_devices) for kind in COLLECTIVES)
    say(f"matmul {matmul / 1e9:.3g} GFLOP/s a device in {dtype}, {num_devices} at once")
    say(f"attention {attended / 1e9:.3g} GFLOP/s a device")
    say(f"memory {memory / 1e9:.3g} GB/s a device")
    for rate in rates:
        if rate.kind == "all_gather":
            each = f"{rate.latency_s * 1e6:.3g} us + bytes at {rate.bytes_per_s / 1e9:.3g} GB/s"
            say(f"AllGather over {rate.group_size}: {each}")
    how = f"measured with {num_devices} devices busy, median of {SWEEPS} sweeps"
    found = Calibration(
        name=f"this machine, {num_devices} devices",
        chip="cpu",
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        date=datetime.date.today().isoformat(),
        matmul_flops_per_s={dtype: matmul},
        attention_flops_per_s={dtype: attended},
        memory_bytes_per_s=memory,
        memory_bytes=_memory_bytes() / num_devices,
        collectives=rates,
        sources={
            "matmul_flops_per_s": f"{how}; gated MLP with gradients, m k n = {matmul_shape}",
            "attention_flops_per_s": f"{how}; forward and backward, B T N K H = {ATTENTION_SHAPE}",
            "memory_bytes_per_s": f"{how}; silu over {MEMORY_ELEMENTS * 4} bytes, read and written once",
            "memory_bytes": "physical memory of the machine, shared equally",
            "collectives": f"{how}; line through {SMALL_ELEMENTS * 4} and {LARGE_ELEMENTS * 4} bytes a device",
        },
    )
    return with_host_rates(found, num_devices, say) if in_step else found


def with_host_rates(found: Calibration, num_devices: int, say: Callable[[str], None]) -> Calibration:
    """A calibration of so many emulated devices with the rates inside a step added. Takes a minute or so.

    Raises InputError where it lacks a rate that the steps are priced by.
    """
    host = host_rates(measure_references(found, num_devices))
    say(f"products in a step {_rate(host.product.flop, 'GFLOP/s')} beside {_rate(host.product.byte, 'GB/s')}")
    say(f"elementwise ops in a step {_rate(host.stream.byte, 'GB/s')}, loops {_rate(host.loop_byte, 'GB/s')}")
    shapes = ", ".join(
        f"D {one.model.d_model} F {one.model.d_ff}, {one.job.batch_seqs} x {one.job.seq_len} tokens"
        for one in REFERENCES
    )
    source = f"steps of {shapes} under the profiler, seconds by derived step"
    return msgspec.structs.replace(found, host=host, sources={**found.sources, "host": source})


def _rate(seconds: float, unit: str) -> str:
    """A rate in billions a second, from the seconds of one; of some parts of a step no time is seen."""
    return f"{1e-9 / seconds:.3g} {unit}" if seconds > IN_NO_TIME else "no time seen"


IN_NO_TIME = 1e-13
"""Seconds of a unit below which the least squares found none for it."""


def _group_sizes(num_devices: int) -> list[int]:
    return [2**power for power in range(1, num_devices.bit_length()) if num_devices % 2**power == 0]


Probe = Callable[[], object]


def _probes(num_devices: int, matmul_shape: tuple[int, int, int]) -> dict[str, Probe]:
    """A call to be timed for each figure."""
    probes = {
        "matmul": _matmul(num_devices, matmul_shape),
        "attention": _attention(num_devices),
        "memory": _memory(num_devices),
    }
    for size in _group_sizes(num_devices):
        for kind in COLLECTIVES:
            for elements in (SMALL_ELEMENTS, LARGE_ELEMENTS):
                probes[f"{kind} {size} {elements}"] = _collective_probe(kind, size, num_devices, elements)
    return probes


def _sweep(probes: dict[str, Probe], *, budget_s: float) -> dict[str, float]:
    """Median seconds of a call of each probe."""
    for probe in probes.values():
        jax.block_until_ready(probe())
    medians: dict[str, list[float]] = {name: [] for name in probes}
    for _ in range(SWEEPS):
        for name, probe in probes.items():
            medians[name].append(_median_seconds(probe, budget_s=budget_s))
    return {name: statistics.median(times) for name, times in medians.items()}


def _memory_bytes() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _median_seconds(probe: Probe, *, budget_s: float) -> float:
    """Median wall time of a call, repeated for about ``budget_s`` (2 to 200 times)."""
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 2 or (time.perf_counter() - started < budget_s and len(times) < 200):
        begin = time.perf_counter()
        jax.block_until_ready(probe())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _on_every_device(
    body: Callable[..., jax.Array], num_devices: int, shapes: Sequence[tuple[int, ...]], axes: dict[str, int]
) -> Probe:
    """A call of ``body`` over a mesh, with one block of random numbers a device for each of its arguments."""
    mesh = device_mesh(axes)
    spec = PartitionSpec(tuple(axes))
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec,) * len(shapes), out_specs=spec, check_vma=False))
    rng = np.random.default_rng(0)
    sharding = jax.NamedSharding(mesh, spec)
    values = [jax.device_put(rng.standard_normal((num_devices * s[0], *s[1:]), np.float32), sharding) for s in shapes]
    return lambda: mapped(*values)


def mlp_flops(shape: tuple[int, int, int]) -> float:
    """FLOPs of a gated MLP of m tokens, k wide, n in between: three products forward, twice that backward."""
    m, k, n = shape
    return 3.0 * 3 * 2 * m * k * n


def _matmul(num_devices: int, shape: tuple[int, int, int]) -> Probe:
    """Products as a training step runs them: a gated MLP with its gradients, transposes and copies included."""
    m, k, n = shape

    def body(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        def total(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            hidden = silu_mul((x @ gate)[None], (x @ up)[None])[0]
            return jnp.sum((hidden @ down) ** 2)

        grads = jax.grad(total, argnums=(0, 1, 2, 3))(x * 0.1, gate, up, down)
        return sum((jnp.sum(g)[None] for g in grads), jnp.zeros(1))

    return _on_every_device(body, num_devices, [(m, k), (k, n), (k, n), (n, k)], {"device": num_devices})


def attention_flops(shape: tuple[int, int, int, int, int]) -> float:
    """FLOPs of attention forward and backward, as `cost` counts the two steps of a program."""
    sizes = OpSizes(dims=dict(zip("BTNKH", shape, strict=True)), mesh={}, state="fp32")
    q, k, positions = (parse_array(text) for text in ("q[B,T,N,H]", "k[B,T,K,H]", "positions[B,T]"))
    inputs = (q, k, k, positions, positions)
    forward = Step(op="attention", inputs=inputs, result=q, details=Attention())
    backward = Step(op="attention_backward", inputs=(q, q, q, *inputs), result=q, details=Attention())
    return float(op_flops(forward, sizes) + op_flops(backward, sizes))


def _attention(num_devices: int) -> Probe:
    """The attention that programs run, forward and backward."""
    batch, length, heads, kv_heads, width = ATTENTION_SHAPE

    def body(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        places = Places(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length)))
        call = AttentionCall(scale=width**-0.5, query=places, key=places, order="rows")
        o, lse = attention(call, q, k, v)
        grads = attention_backward(call, (2 * o, o, lse), q, k, v)
        return sum((jnp.sum(g, axis=(1, 2, 3)) for g in grads), jnp.zeros(batch))

    key = (batch, length, kv_heads, width)
    return _on_every_device(body, num_devices, [(batch, length, heads, width), key, key], {"device": num_devices})


def _memory(num_devices: int) -> Probe:
    """An array read and written once with an exponential on the way, as softmax and silu have, again and again."""

    def body(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, ROUNDS, lambda _, y: jax.nn.silu(y) + 0.5, x)

    return _on_every_device(body, num_devices, [(MEMORY_ELEMENTS,)], {"device": num_devices})


def run_collective(kind: CollectiveKind, x: jax.Array, axis: str) -> jax.Array:
    """One collective over a mesh axis, along the only dim of an array."""
    if kind == "all_gather":
        return lax.all_gather(x, axis, tiled=True)
    if kind == "reduce_scatter":
        return lax.psum_scatter(x, axis, tiled=True)
    if kind == "all_reduce":
        return lax.psum(x, axis)
    if kind == "permute":
        size = lax.axis_size(axis)
        return lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])
    return lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)


def _collective_probe(kind: CollectiveKind, size: int, num_devices: int, elements: int) -> Probe:
    """Collectives in a row whose whole array on the group has ``elements`` elements per device."""
    local = elements if kind in ("reduce_scatter", "all_reduce", "permute") else elements // size

    def body(x: jax.Array) -> jax.Array:
        # The first entry of the result feeds the next round, so that none is dropped or reordered.
        return lax.fori_loop(0, ROUNDS, lambda _, y: y + run_collective(kind, y, "group")[:1] * 1e-6, x)

    axes = {"others": num_devices // size, "group": size}
    return _on_every_device(body, num_devices, [(local,)], axes)


def _collective_rate(kind: CollectiveKind, size: int, seconds: dict[str, float]) -> CollectiveRate:
    """Latency and rate from a small and a large array."""
    small, large = (seconds[f"{kind} {size} {elements}"] / ROUNDS for elements in (SMALL_ELEMENTS, LARGE_ELEMENTS))
    slope = max((large - small) / ((LARGE_ELEMENTS - SMALL_ELEMENTS) * 4), 1e-15)
    return CollectiveRate(
        kind=kind,
        group_size=size,
        latency_s=max(small - slope * SMALL_ELEMENTS * 4, 1e-7),
        bytes_per_s=received_share(kind, size) / slope,
    )
