"""The result of a run: losses, times, memory, and the parts of its wall time."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import jax
import msgspec

from meshwright.core.digests import digest_seconds
from meshwright.train.record.metrics import EvaluationRecord


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes on one device: shards of the step's arguments, and the compiler's temporaries.

    ``temporaries_bytes`` are activations, gathered weights, gradients and buffers of collectives; None if the backend
    does not report them. ``peak_bytes`` is the device's peak memory, if it reports that.
    """

    weights_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    temporaries_bytes: int | None
    peak_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, optimizer, batch and temporaries together; unreported temporaries count 0."""
        return self.weights_bytes + self.optimizer_bytes + self.batch_bytes + (self.temporaries_bytes or 0)


class Goodput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one start of a run, from its beginning to its summary.

    ``steps_s`` is the time in training steps; ``checkpoint_s`` the time that the loop waited for checkpoints and
    weights, without writing in the background, and ``digest_s`` the part of it in which digests were made; ``data_s``
    the time that steps waited for batches. ``lost_s`` is the time of the ``lost_steps`` of an earlier start that this
    start repeats, since no checkpoint has them. The rest of ``wall_s`` is start-up, logging and files.
    """

    wall_s: float
    steps_s: float
    compile_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluation_s: float = 0.0
    data_s: float = 0.0
    lost_steps: int = 0
    lost_s: float = 0.0
    digest_s: float = 0.0

    @property
    def share(self) -> float:
        """Goodput: the time in steps over the wall time."""
        return self.steps_s / self.wall_s

    @property
    def other_s(self) -> float:
        """Wall time outside of the counted parts."""
        counted_s = self.steps_s + self.compile_s + self.checkpoint_s + self.evaluation_s + self.data_s
        return max(0.0, self.wall_s - counted_s)


class TrainResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of a run. ``step_s`` is the median after the first two steps; compiling is in ``compile_s``.

    ``steps`` and ``losses`` are of the whole run, ``resumed_from`` the step at which this start took over (None for
    the first); times and ``goodput`` are of this start. ``epochs`` says how often each source of the data was seen,
    ``skipped_records`` how many records could not be read. ``load_max_over_mean`` is the median over steps of the load
    of the busiest expert over the mean, None without experts.
    """

    run: str
    steps: int
    stopped: bool
    losses: list[float]
    validation_loss: float | None
    step_s: float | None
    step_s_predicted: float | None
    tokens_per_s: float | None
    mfu: float | None = None
    hfu: float | None = None
    mfu_causal: float | None = None
    compile_s: float
    memory: MemoryUse | None
    goodput: Goodput | None = None
    evaluations: list[EvaluationRecord] = []
    resumed_from: int | None = None
    processes: int = 1
    epochs: dict[str, float] = {}
    skipped_records: int = 0
    load_max_over_mean: float | None = None


def measured_memory(state: Any, batch: Any, compiled: Any) -> MemoryUse:
    """Measures the memory of a compiled step on the first device of this process."""
    device = jax.local_devices()[0]

    def held(tree: Any) -> int:
        shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    memory_analysis = compiled.memory_analysis()
    return MemoryUse(
        weights_bytes=held(state.params),
        optimizer_bytes=held(state.opt_state),
        batch_bytes=held(batch),
        temporaries_bytes=int(memory_analysis.temp_size_in_bytes) if memory_analysis is not None else None,
    )


def peak_bytes() -> int | None:
    """Returns the peak memory of the first device of this process; None if it does not report that."""
    num_bytes = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return int(num_bytes) if num_bytes else None


GoodputPart = Literal["compile", "checkpoint", "evaluation", "data"]


class Stopwatch:
    """Adds up the seconds of each part; the wall time counts from the creation of the stopwatch."""

    def __init__(self) -> None:
        self._start, self._digest_s = time.perf_counter(), 0.0
        self._spent: Counter[GoodputPart] = Counter()

    @contextmanager
    def timed(self, part: GoodputPart) -> Iterator[None]:
        """Counts the time of its context as ``part``; for "checkpoint" also the part for digests."""
        start_s, digest_start_s = time.perf_counter(), digest_seconds()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - start_s)
            if part == "checkpoint":
                self._digest_s += digest_seconds() - digest_start_s

    def add(self, part: GoodputPart, seconds: float) -> None:
        """Counts these seconds as ``part``."""
        self._spent[part] += seconds  # type: ignore[assignment]

    def seconds(self, part: GoodputPart) -> float:
        """Returns the seconds of ``part`` so far."""
        return self._spent[part]

    def goodput(self, *, steps_s: float, lost_steps: int = 0, lost_s: float = 0.0) -> Goodput:
        """Returns all parts so far, and the wall time."""
        parts = {f"{part}_s": float(seconds) for part, seconds in self._spent.items()}
        wall_s = time.perf_counter() - self._start
        return Goodput(
            wall_s=wall_s, steps_s=steps_s, lost_steps=lost_steps, lost_s=lost_s, digest_s=self._digest_s, **parts
        )
