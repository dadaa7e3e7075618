"""The devices under test, all busy at once: their workloads, their input data, and the runner that times them."""

import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from meshwright.bench.results import Contents, MatmulPart, Timing
from meshwright.bench.timing import MAX_REPEATS, Budget, Call, Name, time_together
from meshwright.nn.attention.platform import platform_of
from meshwright.parallel.mesh import device_mesh
from meshwright.spec.chip import Chip

JAX_DTYPES: dict[str, DTypeLike] = {
    "fp32": jnp.float32,
    "tf32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "int8": jnp.int8,
    "fp8": jnp.float8_e4m3fn,
}
"""Element types of the products that are measured; tf32 is float32 at JAX's default precision."""

DEFAULT_DTYPES: dict[str, tuple[str, ...]] = {
    "cpu": ("fp32", "bf16", "int8", "fp8"),
    "cuda": ("bf16", "tf32", "fp8", "int8", "fp32"),
    "rocm": ("bf16", "fp8", "int8", "fp32"),
    "tpu": ("bf16", "int8", "fp8", "fp32"),
}

DRAWN = 2**20
"""Most random numbers drawn for one shard, which repeats them: drawing all of a large shard takes seconds."""

MlpShape = tuple[int, int, int]
"""Tokens, model width and feed-forward width."""
AttentionShape = tuple[int, int, int, int, int]
"""B, T, N, K, H of a device."""
Item = TypeVar("Item")
Values = TypeVar("Values", np.ndarray, Array)


class BenchSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the measurements on one kind of device. A small first product has ``probe_rounds``. Products of about
    ``edge_sides`` show the cost of partial ``tiles``; products of side ``contents`` compare zeros, ones and random
    numbers in the first ``contents_dtypes`` element types. ``batches`` of tokens run through a layer of dims ``layer``.
    ``distance`` is the side of a `Distance`. Chains of multiply-adds have arrays of ``chain_bytes`` or more, if they
    fit; lengths ``eager`` run op by op. The largest copy takes at most 1 / ``largest_copy`` of the memory."""

    probe_rounds: int
    edge_sides: tuple[int, ...]
    tiles: tuple[int, ...]
    contents: int
    contents_dtypes: int
    mlps: tuple[MlpShape, ...]
    attention: tuple[AttentionShape, ...]
    layer: dict[str, int]
    batches: tuple[int, ...]
    distance: int
    chain_bytes: int
    eager: tuple[int, ...]
    largest_copy: int
    collective_bytes: tuple[int, ...]


EMULATED = BenchSizes(
    probe_rounds=2,
    edge_sides=(512, 1024),
    # A processor's tiles are small: one multiple shows as much as two.
    tiles=(256,),
    contents=512,
    contents_dtypes=1,
    mlps=((512, 256, 704), (1024, 512, 1408)),
    attention=tuple((512 // length, length, 8, 4, 32) for length in (128, 256, 512)),
    layer={"D": 512, "F": 1408, "N": 8, "K": 4, "H": 64},
    batches=tuple(2**power for power in range(11)),
    distance=128,
    chain_bytes=2**24,
    eager=(1, 2, 4),
    largest_copy=64,
    collective_bytes=tuple(2**power for power in (12, 15, 18, 19, 20)),
)
ACCELERATOR = BenchSizes(
    probe_rounds=64,
    edge_sides=(1024, 2048, 4096),
    tiles=(256, 128),
    contents=8192,
    contents_dtypes=2,
    mlps=((4096, 4096, 14336), (16384, 4096, 14336)),
    attention=tuple((16384 // length, length, 32, 8, 128) for length in (1024, 2048, 4096, 8192, 16384)),
    layer={"D": 4096, "F": 14336, "N": 32, "K": 8, "H": 128},
    batches=tuple(2**power for power in range(14)),
    distance=1024,
    chain_bytes=2**28,
    eager=(1, 2, 4, 8),
    largest_copy=8,
    collective_bytes=tuple(2**power for power in (14, 18, 22, 25, 27, 29)),
)
"""Every sequence length has the same number of tokens. Most sizes of collectives are large: they determine the rate, on
which most collectives of a step depend."""


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an array on one device: shape, element type, and the numbers that fill it."""

    shape: tuple[int, ...]
    dtype: str = "fp32"
    contents: Contents = "normal"
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A program that every device runs on its shards, ``rounds`` times a call; ``work``: FLOPs or bytes of one round.

    ``arrays`` says whether repeats get the same inputs or new ones, or whether the result overwrites the first input
    ("in place"): allocating fresh pages takes longer than a little arithmetic. In place, a call launches the program
    ``launches`` times, each on the result of the launch before.
    """

    body: Callable[..., object]
    shards: tuple[Shard, ...]
    work: float
    rounds: int = 1
    axes: Mapping[str, int] | None = None
    arrays: Literal["same", "new", "in place"] = "same"
    launches: int = 1


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The devices under test, all of one kind, their data sheet, and the element types to measure, main type first."""

    devices: tuple[jax.Device, ...]
    chip: Chip
    dtypes: tuple[str, ...]
    axes: Mapping[str, int] = field(default_factory=dict)

    @property
    def platform(self) -> str:
        """ "cpu", "cuda", "rocm" or "tpu"."""
        return platform_of(self.devices[0])

    @property
    def emulated(self) -> bool:
        """True if the devices are emulated: they share the cores and the memory of this machine."""
        return self.platform == "cpu"

    @property
    def sizes(self) -> BenchSizes:
        """The sizes that these devices are measured with."""
        return EMULATED if self.emulated else ACCELERATOR

    @property
    def main_dtype(self) -> str:
        return self.dtypes[0]

    @property
    def name(self) -> str:
        """``"8 cpu devices emulated on x86_64, 2 cores"`` or ``"1 NVIDIA H200"``."""
        if self.emulated:
            noun = "device" if len(self.devices) == 1 else "devices"
            return f"{len(self.devices)} cpu {noun} emulated on {platform.machine()}, {os.cpu_count()} cores"
        return f"{len(self.devices)} {self.devices[0].device_kind}"

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory per device: an equal part of the machine's if emulated, else the backend's or chip's."""
        if self.emulated:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(self.devices)
        bytes_limit = (self.devices[0].memory_stats() or {}).get("bytes_limit")
        return float(bytes_limit or self.chip.memory_bytes or 8e9)

    @property
    def cache_bytes(self) -> float:
        """One device's share of the last-level cache in bytes; 0 if unknown."""
        if not self.emulated:
            return self.chip.l2_bytes or 0.0
        texts = (path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
        return max((float(text[:-1]) * 1024 for text in texts if text.endswith("K")), default=0.0) / len(self.devices)

    def share_of_peak(self, flops_per_s: float, dtype: str) -> float | None:
        """Returns a rate as a share of the data sheet's peak for an element type; None without such a peak."""
        peak_flops_per_s = self.chip.peak_flops.get(dtype)
        return flops_per_s / peak_flops_per_s if peak_flops_per_s else None

    def mesh(self, axes: Mapping[str, int] | None) -> Mesh:
        """Returns a mesh of the devices with the given axes, or with one axis."""
        return device_mesh(axes or {"device": len(self.devices)}, self.devices)

    def program(self, workload: Workload) -> Callable[..., Array]:
        """Returns a function that runs the body on all devices' shards; results are sharded along their first dim."""
        mesh = self.mesh(workload.axes)
        spec = PartitionSpec(mesh.axis_names)
        mapped_body = jax.shard_map(workload.body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped_body, donate_argnums=(0,) if workload.arrays == "in place" else ())

    def data(self, workload: Workload, number: int) -> tuple[Array, ...]:
        """Returns the inputs of a workload: equal shards on all devices, different for each ``number``."""
        mesh, rng = self.mesh(workload.axes), np.random.default_rng(number)
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        global_arrays = []
        for shard in workload.shards:
            shard_values = _numbers(shard, rng)
            if self.emulated:
                # On the host: compiling a program that repeats the numbers takes longer than most measurements.
                shard_values = _repeated(shard_values, shard.shape)
            # Copied, because emulated devices would otherwise read one array, which then stays in the shared cache.
            device_arrays = [jax.device_put(shard_values, device, may_alias=False) for device in mesh.devices.flat]
            if not self.emulated:
                device_arrays = [_repeated_on_device(device_array, shard.shape) for device_array in device_arrays]
            global_shape = (len(device_arrays) * shard.shape[0], *shard.shape[1:])
            global_arrays.append(jax.make_array_from_single_device_arrays(global_shape, sharding, device_arrays))
        return tuple(global_arrays)

    def call(self, workload: Workload, kept: list[Array] | None = None) -> Call:
        """Returns a workload as a call to time. In-place workloads that get one list ``kept`` share their inputs."""
        run, held_arrays = self.program(workload), [] if kept is None else kept

        def arguments(repeat: int) -> tuple[Array, ...]:
            if workload.arrays == "new":
                return self.data(workload, repeat)
            # A program that failed may have deleted its donated input.
            if not held_arrays or held_arrays[0].is_deleted():
                held_arrays[:] = self.data(workload, 0)
            return tuple(held_arrays)

        def in_place(array: Array, *others: Array) -> Array:
            for _ in range(workload.launches):
                array = run(array, *others)
            held_arrays[0] = array
            return array

        return Call(run=in_place if workload.arrays == "in place" else run, arguments=arguments, rounds=workload.rounds)


def _numbers(shard: Shard, rng: np.random.Generator) -> np.ndarray:
    """Draws at most `DRAWN` numbers of a shard; int8 uniformly, from -127 for "normal" and from 0 for "uniform"."""
    dtype, num_drawn = JAX_DTYPES[shard.dtype], min(DRAWN, math.prod(shard.shape))
    if shard.contents in ("zeros", "ones"):
        return np.full(num_drawn, shard.contents == "ones", dtype)
    if shard.dtype == "int8":
        return rng.integers(0 if shard.contents == "uniform" else -127, 127, num_drawn, np.int8)
    draw = rng.random if shard.contents == "uniform" else rng.standard_normal
    return (draw(num_drawn, np.float32) * np.float32(shard.scale)).astype(dtype)


def _repeated(values: Values, shape: tuple[int, ...]) -> Values:
    """Repeats NumPy's or JAX's numbers until they fill a shape."""
    num_values = math.prod(shape)
    xp = np if isinstance(values, np.ndarray) else jnp
    return xp.broadcast_to(values, (-(-num_values // len(values)), len(values))).ravel()[:num_values].reshape(shape)


_repeated_on_device = jax.jit(_repeated, static_argnums=1)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Times the workloads of a part within a budget. ``found`` has earlier parts, ``left_out`` a line per failure."""

    bench: Bench
    budget: Budget
    found: Mapping[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds left of the budget."""
        return self.budget.left_s

    def share(self, part: float) -> "Runner":
        """Returns a runner whose budget is this share of the seconds left."""
        return replace(self, budget=self.budget.share(part))

    def each(self, items: Sequence[Item]) -> Iterator[tuple[Item, "Runner"]]:
        """Yields every item with a runner that may use an equal share of the seconds left at that moment."""
        for item_index, item in enumerate(items):
            yield item, self.share(1 / (len(items) - item_index))

    def time(
        self, calls: Mapping[Name, Workload | Call], left_out: str = "{}", *, max_repeats: int = MAX_REPEATS
    ) -> dict[Name, Timing]:
        """Returns timings by key, measured in alternation; each failure adds ``left_out.format(key)`` to `left_out`."""
        call_map = {key: self.bench.call(call) if isinstance(call, Workload) else call for key, call in calls.items()}
        timing_by_key, reason_by_key = time_together(call_map, self.budget, max_repeats=max_repeats)
        reason_by_text: dict[str, str] = {}
        for key, reason in reason_by_key.items():
            reason_by_text.setdefault(left_out.format(key), reason)
        self.left_out.extend(f"{text}: {reason}" for text, reason in reason_by_text.items())
        return timing_by_key

    def time_one(self, call: Workload | Call, left_out: str, *, max_repeats: int = MAX_REPEATS) -> Timing | None:
        """Returns the timing of one workload; None if it failed or time ran out."""
        return self.time({"": call}, left_out, max_repeats=max_repeats).get("")

    def product_rate(self, dtype: str) -> float | None:
        """Returns FLOP/s of the fastest product measured, else of the data sheet; None if neither is known."""
        matmul_part: MatmulPart | None = self.found.get("matmul")
        best_product = matmul_part.best(dtype) if matmul_part else None
        return best_product.flops_per_s if best_product else self.bench.chip.peak_flops.get(dtype)
