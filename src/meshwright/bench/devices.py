"""The devices that are measured, all of them busy at once, and the data they are given."""

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.bench.timing import Call
from meshwright.nn.attention.platform import platform_of
from meshwright.parallel.mesh import device_mesh
from meshwright.spec.chip import Chip

Contents = Literal["zeros", "ones", "uniform", "normal"]
CONTENTS: tuple[Contents, ...] = ("zeros", "ones", "uniform", "normal")

JAX_DTYPES: dict[str, Any] = {
    "fp32": jnp.float32,
    "tf32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "int8": jnp.int8,
    "fp8": jnp.float8_e4m3fn,
}
"""Element types of the products that are measured; tf32 is float32 at the precision that JAX takes by itself."""

DEFAULT_DTYPES: dict[str, tuple[str, ...]] = {
    "cpu": ("fp32", "bf16", "int8", "fp8"),
    "cuda": ("bf16", "tf32", "fp8", "int8", "fp32"),
    "rocm": ("bf16", "fp8", "int8", "fp32"),
    "tpu": ("bf16", "int8", "fp8", "fp32"),
}


DRAWN = 2**20
"""Random numbers that the host draws for one block."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an array that one device has."""

    shape: tuple[int, ...]
    dtype: str = "fp32"
    contents: Contents = "normal"
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured: devices of one kind, their data sheet, and element types, that of the main figures first."""

    devices: tuple[jax.Device, ...]
    chip: Chip
    dtypes: tuple[str, ...]
    seed: int = 0
    axes: Mapping[str, int] = field(default_factory=dict)

    @property
    def platform(self) -> str:
        """ "cpu", "cuda", "rocm" or "tpu"."""
        return platform_of(self.devices[0])

    @property
    def emulated(self) -> bool:
        """Whether the devices share the cores and the memory of this machine."""
        return self.platform == "cpu"

    @property
    def main_dtype(self) -> str:
        return self.dtypes[0]

    @property
    def memory_bytes(self) -> float:
        """Bytes that a device may fill: its share of the machine's, or what the backend offers."""
        if self.emulated:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(self.devices)
        offered = (self.devices[0].memory_stats() or {}).get("bytes_limit")
        return float(offered or self.chip.memory_bytes or 8e9)

    @property
    def cache_bytes(self) -> float:
        """Bytes of the last cache before memory, a device's share of it; 0 where it is not known."""
        if self.emulated:
            return _last_cache_bytes() / len(self.devices)
        return self.chip.l2_bytes or 0.0

    def mesh(self, axes: Mapping[str, int] | None = None) -> Mesh:
        return device_mesh(axes or {"device": len(self.devices)}, self.devices)

    def program(
        self, body: Callable[..., Any], axes: Mapping[str, int] | None = None, *, in_place: bool = False
    ) -> Callable[..., Any]:
        """A body run on every device at once, each with its own blocks; results are split along their first dim.

        ``in_place`` gives the memory of the first array to the result.
        """
        mesh = self.mesh(axes)
        spec = PartitionSpec(mesh.axis_names)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped, donate_argnums=(0,) if in_place else ())

    def data(
        self, blocks: Sequence[Block], axes: Mapping[str, int] | None = None
    ) -> Callable[[int], tuple[jax.Array, ...]]:
        """A function of a number that makes those blocks on every device, others for each number.

        Emulated devices get one block from the host, all the same: a program that draws numbers takes longer to
        compile than most of those that are measured.
        """
        mesh = self.mesh(axes)
        if self.emulated:
            return lambda number: _drawn_by_host(blocks, mesh, seed=(self.seed, number))
        spec = PartitionSpec(mesh.axis_names)

        def make(seed: jax.Array) -> tuple[jax.Array, ...]:
            key = jax.random.fold_in(jax.random.key(self.seed, impl="rbg"), seed)
            for axis in mesh.axis_names:
                key = jax.random.fold_in(key, lax.axis_index(axis))
            keys = jax.random.split(key, len(blocks))
            return tuple(_filled(block, one) for block, one in zip(blocks, keys, strict=True))

        made = jax.jit(jax.shard_map(make, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False))
        return lambda number: made(jnp.int32(number))

    def call(
        self,
        body: Callable[..., Any],
        blocks: Sequence[Block],
        *,
        axes: Mapping[str, int] | None = None,
        fresh: bool = False,
    ) -> Call:
        """The body on random blocks of every device, the same in each repeat unless they are to be ``fresh``."""
        make = self.data(blocks, axes)
        kept: list[tuple[jax.Array, ...]] = []

        def arguments(repeat: int) -> tuple[jax.Array, ...]:
            if fresh:
                return make(repeat)
            if not kept:
                kept.append(make(0))
            return kept[0]

        return Call(run=self.program(body, axes), arguments=arguments)


class KeptArrays:
    """Arrays of every device that several programs work on, the first of which is replaced by each result in its own
    memory: a machine that hands out fresh pages needs longer for them than for a little arithmetic."""

    def __init__(self, bench: Bench, blocks: Sequence[Block]) -> None:
        self._bench = bench
        self._make = bench.data(blocks)
        self._kept: list[jax.Array] = []

    def call(self, body: Callable[..., Any], *, launches: int = 1) -> Call:
        """A body launched so many times, each on the result of the one before."""
        run = self._bench.program(body, in_place=True)

        def arguments(repeat: int) -> tuple[jax.Array, ...]:
            # A program that failed may have taken the memory with it.
            if not self._kept or self._kept[0].is_deleted():
                self._kept = list(self._make(0))
            return tuple(self._kept)

        def launch(first: jax.Array, *others: jax.Array) -> jax.Array:
            for _ in range(launches):
                first = run(first, *others)
            self._kept[0] = first
            return first

        return Call(run=launch, arguments=arguments)


def _filled(block: Block, key: jax.Array) -> jax.Array:
    dtype = JAX_DTYPES[block.dtype]
    if block.contents == "zeros":
        return jnp.zeros(block.shape, dtype)
    if block.contents == "ones":
        return jnp.ones(block.shape, dtype)
    if block.dtype == "int8":
        low = 0 if block.contents == "uniform" else -127
        return jax.random.randint(key, block.shape, low, 127, dtype)
    draw = jax.random.uniform if block.contents == "uniform" else jax.random.normal
    wide = jnp.bfloat16 if block.dtype == "fp8" else dtype
    return (draw(key, block.shape, wide) * jnp.asarray(block.scale, wide)).astype(dtype)


def _drawn_by_host(blocks: Sequence[Block], mesh: Mesh, *, seed: tuple[int, int]) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    made = []
    for block in blocks:
        values = _numbers(block, rng)
        parts = [jax.device_put(values, device) for device in mesh.devices.flat]
        shape = (len(parts) * block.shape[0], *block.shape[1:])
        made.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
    return tuple(made)


def _numbers(block: Block, rng: np.random.Generator) -> np.ndarray:
    """The block, of which the first ``DRAWN`` numbers are drawn and then repeated: a large one took seconds."""
    dtype = JAX_DTYPES[block.dtype]
    if block.contents in ("zeros", "ones"):
        return np.full(block.shape, block.contents == "ones", dtype)
    drawn = min(DRAWN, math.prod(block.shape))
    if block.dtype == "int8":
        return np.resize(rng.integers(0 if block.contents == "uniform" else -127, 127, drawn, np.int8), block.shape)
    draw = rng.random if block.contents == "uniform" else rng.standard_normal
    return np.resize((draw(drawn, np.float32) * np.float32(block.scale)).astype(dtype), block.shape)


def machine_name(bench: Bench) -> str:
    """``"8 cpu devices emulated on x86_64, 2 cores"`` or ``"1 NVIDIA H200"``."""
    if bench.emulated:
        several = "device" if len(bench.devices) == 1 else "devices"
        return f"{len(bench.devices)} cpu {several} emulated on {platform.machine()}, {os.cpu_count()} cores"
    return f"{len(bench.devices)} {bench.devices[0].device_kind}"


def _last_cache_bytes() -> float:
    """Of this machine's processors, as the kernel lists it; 0 where it does not."""
    sizes = [0.0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(float(text.removesuffix("K")) * 1024 if text.endswith("K") else 0.0)
    return max(sizes)
