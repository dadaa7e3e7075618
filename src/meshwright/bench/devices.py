"""The devices that are measured, all of them busy at once, the data they are given, and the seconds of a part."""

import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.bench.results import Contents, MatmulPart, Timing
from meshwright.bench.timing import MAX_REPEATS, Budget, Call, time_together
from meshwright.core.errors import InputError
from meshwright.nn.attention.platform import platform_of
from meshwright.parallel.mesh import device_mesh
from meshwright.spec.chip import Chip, chips

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
"""Random numbers that are drawn for one block, which repeats them: those of a large one took seconds."""


MlpShape = tuple[int, int, int]
"""Tokens, model width and feed-forward width."""
AttentionShape = tuple[int, int, int, int, int]
"""B, T, N, K, H of a device."""
Item = TypeVar("Item")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured on a kind of device: sizes, counts of rounds, and how many element types."""

    feeler_rounds: int
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


EMULATED = Sizes(
    feeler_rounds=2,
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
ACCELERATOR = Sizes(
    feeler_rounds=64,
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
"""Sequences of all lengths have as many tokens together. The largest copy is that part of the memory. Collectives have
more large sizes than small ones: they settle the rate, which is what most of a step's collectives wait for."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an array that one device has."""

    shape: tuple[int, ...]
    dtype: str = "fp32"
    contents: Contents = "normal"
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program of every device: what it does to its blocks, and the FLOPs or bytes that one of its rounds counts.

    ``arrays`` are the same in each repeat, or new ones, or the first of them takes the result in its own memory: a
    machine that hands out fresh pages needs longer for them than for a little arithmetic. Then the program is launched
    ``launches`` times, each on the result of the one before.
    """

    body: Callable[..., Any]
    blocks: tuple[Block, ...]
    work: float
    rounds: int = 1
    axes: Mapping[str, int] | None = None
    arrays: Literal["same", "new", "in place"] = "same"
    launches: int = 1


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured: devices of one kind, their data sheet, and element types, that of the main figures first."""

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
        """Whether the devices share the cores and the memory of this machine."""
        return self.platform == "cpu"

    @property
    def sizes(self) -> Sizes:
        """What is measured on such devices."""
        return EMULATED if self.emulated else ACCELERATOR

    @property
    def main_dtype(self) -> str:
        return self.dtypes[0]

    @property
    def name(self) -> str:
        """``"8 cpu devices emulated on x86_64, 2 cores"`` or ``"1 NVIDIA H200"``."""
        if self.emulated:
            several = "device" if len(self.devices) == 1 else "devices"
            return f"{len(self.devices)} cpu {several} emulated on {platform.machine()}, {os.cpu_count()} cores"
        return f"{len(self.devices)} {self.devices[0].device_kind}"

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
        if not self.emulated:
            return self.chip.l2_bytes or 0.0
        texts = (path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
        return max((float(text[:-1]) * 1024 for text in texts if text.endswith("K")), default=0.0) / len(self.devices)

    def share_of_peak(self, flops_per_s: float, dtype: str) -> float | None:
        """A rate over the data sheet's of an element type; None where it has none."""
        peak = self.chip.peak_flops.get(dtype)
        return flops_per_s / peak if peak else None

    def mesh(self, axes: Mapping[str, int] | None) -> Mesh:
        """The devices as a mesh of those axes, or of one."""
        return device_mesh(axes or {"device": len(self.devices)}, self.devices)

    def program(self, case: Case) -> Callable[..., Any]:
        """The body on every device at once, each with its own blocks; results are split along their first dim."""
        mesh = self.mesh(case.axes)
        spec = PartitionSpec(mesh.axis_names)
        mapped = jax.shard_map(case.body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped, donate_argnums=(0,) if case.arrays == "in place" else ())

    def data(self, case: Case, number: int) -> tuple[jax.Array, ...]:
        """The blocks of a case, all devices' alike and others for each number."""
        mesh, rng = self.mesh(case.axes), np.random.default_rng(number)
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        made = []
        for block in case.blocks:
            values = _numbers(block, rng)
            if self.emulated:
                # A program that repeats them takes longer to compile than most of those that are measured.
                values = _repeated(values, block.shape)
            # Emulated devices would share the memory of one array otherwise, and its place in the cache.
            parts = [jax.device_put(values, device, may_alias=False) for device in mesh.devices.flat]
            if not self.emulated:
                parts = [_repeated_there(part, block.shape) for part in parts]
            shape = (len(parts) * block.shape[0], *block.shape[1:])
            made.append(jax.make_array_from_single_device_arrays(shape, sharding, parts))
        return tuple(made)

    def call(self, case: Case, kept: list[jax.Array] | None = None) -> Call:
        """The case as it is timed. ``kept`` are arrays that several cases in place work on, made by the first."""
        run, held = self.program(case), [] if kept is None else kept

        def arguments(repeat: int) -> tuple[jax.Array, ...]:
            if case.arrays == "new":
                return self.data(case, repeat)
            # A program that failed may have taken the memory with it.
            if not held or held[0].is_deleted():
                held[:] = self.data(case, 0)
            return tuple(held)

        def in_place(first: jax.Array, *others: jax.Array) -> jax.Array:
            for _ in range(case.launches):
                first = run(first, *others)
            held[0] = first
            return first

        return Call(run=in_place if case.arrays == "in place" else run, arguments=arguments, rounds=case.rounds)


def _numbers(block: Block, rng: np.random.Generator) -> np.ndarray:
    """The numbers of a block, a few of them: it repeats what is missing."""
    dtype, drawn = JAX_DTYPES[block.dtype], min(DRAWN, math.prod(block.shape))
    if block.contents in ("zeros", "ones"):
        return np.full(drawn, block.contents == "ones", dtype)
    if block.dtype == "int8":
        return rng.integers(0 if block.contents == "uniform" else -127, 127, drawn, np.int8)
    draw = rng.random if block.contents == "uniform" else rng.standard_normal
    return (draw(drawn, np.float32) * np.float32(block.scale)).astype(dtype)


def _repeated(values: Any, shape: tuple[int, ...]) -> Any:
    """NumPy's or JAX's numbers repeated until they fill a shape."""
    size = math.prod(shape)
    xp = np if isinstance(values, np.ndarray) else jnp
    return xp.broadcast_to(values, (-(-size // len(values)), len(values))).ravel()[:size].reshape(shape)


_repeated_there = jax.jit(_repeated, static_argnums=1)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """What a part is measured with: devices, seconds, and the parts before it; what cannot be is in ``left_out``."""

    bench: Bench
    budget: Budget
    found: Mapping[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.budget.left_s

    def share(self, part: float) -> "Runner":
        """The same within a part of the seconds that are left."""
        return replace(self, budget=self.budget.share(part))

    def each(self, items: Sequence[Item]) -> Iterator[tuple[Item, "Runner"]]:
        """Every item with an equal share of what the ones before it left."""
        for number, item in enumerate(items):
            yield item, self.share(1 / (len(items) - number))

    def time(
        self, calls: Mapping[Any, Case | Call], left_out: str = "{}", *, max_repeats: int = MAX_REPEATS
    ) -> dict[Any, Timing]:
        """Cases in turns. ``left_out`` is what is said of one that could not be measured, with its name filled in."""
        ready = {key: self.bench.call(one) if isinstance(one, Case) else one for key, one in calls.items()}
        times = time_together(ready, self.budget, max_repeats=max_repeats)
        reasons: dict[str, str] = {}
        for key, why in times.why_not.items():
            reasons.setdefault(left_out.format(key), why)
        self.left_out.extend(f"{what}: {why}" for what, why in reasons.items())
        return times.found

    def time_one(self, call: Case | Call, left_out: str, *, max_repeats: int = MAX_REPEATS) -> Timing | None:
        """One case; None where it could not be measured."""
        return self.time({"": call}, left_out, max_repeats=max_repeats).get("")

    def product_rate(self, dtype: str) -> float | None:
        """FLOP/s of the fastest product, or the data sheet's; None where neither is known."""
        part: MatmulPart | None = self.found.get("matmul")
        best = part.best(dtype) if part else None
        return best.flops_per_s if best else self.bench.chip.peak_flops.get(dtype)


def chip_of_kind(device_kind: str) -> Chip:
    """The chip whose ``device_kind`` matches most of the text; an InputError for a device of none."""
    # "A100-SXM4-80GB": what stands between the words does not matter.
    words = device_kind.strip().lower().replace("-", " ").replace("_", " ")
    known = (one for one in chips().values() if one.device_kind)
    found = [(match[0], one) for one in known if (match := re.search(one.device_kind, words))]
    if found:
        # "h100 pcie" is longer than "h100", which matches too
        return max(found, key=lambda pair: len(pair[0]))[1]
    raise InputError(
        f"the devices call themselves {device_kind!r}, which is no chip of the catalogue. Name the chip that they are "
        f"like: --chip h200 (see meshwright show chips)."
    )
