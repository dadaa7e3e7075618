"""Memory of the first steps: the bytes in use over time, and the arrays that make up the peak.

Accelerators report the bytes of their allocator. On CPU the devices share the memory of the process, whose resident
size is sampled instead; it includes the runtime and the compiler.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Self

import jax
import msgspec

from meshwright.hlo.module import CONTAINERS, Instruction, Module
from meshwright.profile.hlo import TracedProgram, result_bytes

EVERY_S = 0.01
MAX_OWNERS = 12
_ALIASES = ("get-tuple-element", "bitcast", "tuple", "while", "optimization-barrier", "copy-done")
"""Opcodes whose result aliases their operands."""


class Sample(NamedTuple):
    """Bytes in use at a time after the first sample."""

    at_s: float
    num_bytes: int


class MemoryMark(NamedTuple):
    """Time at which a part of the run starts, and its name: ``start``, ``compile``, ``after step 1``."""

    at_s: float
    text: str


OwnerKind = Literal["weights", "optimizer", "cache", "batch", "temporary"]


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device of an array of the state or the batch, or of the temporaries of one derived step."""

    name: str
    kind: OwnerKind
    num_bytes: float


class MemoryProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline, and the owners of the peak on one device, largest first.

    ``counted`` says what is sampled: bytes of the first device, or the resident memory of the process.
    ``arguments_bytes`` and ``temporaries_bytes`` are the compiler's, per device; None if it does not say.
    ``live_bytes`` is the largest sum of live temporaries according to the program's schedule. It is close to the
    compiler's figure, which reuses more operand buffers, rounds sizes, and leaves gaps.
    """

    counted: Literal["device", "process"]
    samples: tuple[Sample, ...] = ()
    marks: tuple[MemoryMark, ...] = ()
    owners: tuple[Owner, ...] = ()
    arguments_bytes: float | None = None
    temporaries_bytes: float | None = None
    live_bytes: float = 0.0

    @property
    def peak(self) -> Sample | None:
        """The first sample with the most bytes; None without samples."""
        return max(self.samples, key=lambda sample: sample.num_bytes, default=None)


class Sampler:
    """Samples memory in a background thread until it is closed."""

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        self.every_s = every_s
        self.samples: list[Sample] = []
        self.marks: list[MemoryMark] = []
        self._device = jax.local_devices()[0]
        self.counted: Literal["device", "process"] = "device" if self._device.memory_stats() else "process"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._start_s = time.perf_counter()
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stops sampling."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def mark(self, text: str) -> None:
        """Records that a part of the run, named ``text``, starts now."""
        self.marks.append(MemoryMark(time.perf_counter() - self._start_s, text))

    def _run(self) -> None:
        while not self._stop.wait(self.every_s):
            self._sample()

    def _sample(self) -> None:
        num_bytes = self._device.memory_stats()["bytes_in_use"] if self.counted == "device" else resident_bytes()
        if num_bytes is not None:
            self.samples.append(Sample(time.perf_counter() - self._start_s, int(num_bytes)))


def resident_bytes() -> int | None:
    """Returns the resident bytes of this process; None if the system does not say (not Linux)."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            line = next((line for line in status if line.startswith("VmRSS:")), None)
    except OSError:
        return None
    return int(line.split()[1]) * 1024 if line else None


# -- the peak's owners ------------------------------------------------------------------------------------


def state_owners(shapes: object, shardings: object, kind: OwnerKind) -> list[Owner]:
    """Returns each array of a tree of shapes, with the bytes of its shard on one device."""
    path_leaves = jax.tree_util.tree_leaves_with_path(shapes)
    leaf_shardings = jax.tree.leaves(shardings, is_leaf=lambda leaf: isinstance(leaf, jax.sharding.Sharding))
    owners = []
    for (path, leaf), sharding in zip(path_leaves, leaf_shardings, strict=True):
        shard_bytes = math.prod((leaf.dtype.itemsize, *sharding.shard_shape(leaf.shape)))
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        owners.append(Owner(name=name, kind=kind, num_bytes=float(shard_bytes)))
    return owners


def temporary_owners(program: TracedProgram) -> tuple[list[Owner], float]:
    """Returns the temporaries that are live at the schedule's peak, summed by derived step, and their total.

    An array is live from the instruction that makes it to the last that reads it or an alias of it. A loop adds its
    body's peak. Parameters are the state and do not count.
    """
    bytes_by_name = _peak(program, program.module.entry, {})
    bytes_by_label: dict[str, float] = defaultdict(float)
    for name, num_bytes in bytes_by_name.items():
        # arrays without a label are mostly carried by the loop over layers
        shapes, label = program.instructions[name].shapes, program.label(name)
        bytes_by_label[str(label) if label else f"{name} {shapes[0]}" if shapes else name] += num_bytes
    owners = [Owner(name=name, kind="temporary", num_bytes=num_bytes) for name, num_bytes in bytes_by_label.items()]
    return sorted(owners, key=lambda owner: -owner.num_bytes), sum(bytes_by_name.values())


def _peak(program: TracedProgram, computation: str, known_peaks: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns the live results at a computation's peak, in the compiler's schedule: instruction -> bytes.

    ``known_peaks`` caches the result of each computation.
    """
    if computation in known_peaks:
        return known_peaks[computation]
    body = program.module.computations[computation].instructions
    roots_by_name = _roots(program.module, body)
    last_use_by_name: dict[str, int] = {}
    for index, instruction in enumerate(body):
        end_index = len(body) if instruction.is_root else index
        for name in (*instruction.operands, instruction.name):
            for root in roots_by_name.get(name, ()):
                last_use_by_name[root] = max(last_use_by_name.get(root, 0), end_index)
    live_bytes_by_name: dict[str, float] = {}
    peak_bytes_by_name: dict[str, float] = {}
    for index, instruction in enumerate(body):
        if roots_by_name[instruction.name] == {instruction.name}:
            live_bytes_by_name[instruction.name] = result_bytes(instruction)
        called_names = [name for _, name in instruction.called if name in program.module.computations]
        peaks = (_peak(program, name, known_peaks) for name in called_names) if instruction.opcode in CONTAINERS else ()
        inner_bytes_by_name = max(peaks, key=lambda peak: sum(peak.values()), default={})
        if sum(live_bytes_by_name.values()) + sum(inner_bytes_by_name.values()) > sum(peak_bytes_by_name.values()):
            peak_bytes_by_name = {**live_bytes_by_name, **inner_bytes_by_name}
        for name in [name for name in live_bytes_by_name if last_use_by_name[name] <= index]:
            del live_bytes_by_name[name]
    known_peaks[computation] = peak_bytes_by_name
    return peak_bytes_by_name


def _roots(module: Module, body: Sequence[Instruction]) -> dict[str, set[str]]:
    """Maps each instruction to the instructions whose arrays its result has; to none for parameters and constants."""
    roots_of: dict[str, set[str]] = {}
    for instruction in body:
        # an update of a slice, and a fusion that ends in one, overwrites an operand
        inners = (i for i in module.inside(instruction) if i.is_root) if instruction.opcode == "fusion" else ()
        if instruction.opcode in ("parameter", "constant"):
            roots_of[instruction.name] = set()
        elif instruction.opcode in _ALIASES or any(i.opcode == "dynamic-update-slice" for i in (instruction, *inners)):
            roots_of[instruction.name] = set().union(*(roots_of.get(name, set()) for name in instruction.operands))
        else:
            roots_of[instruction.name] = {instruction.name}
    return roots_of
