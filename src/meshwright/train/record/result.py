"""What a run came to: losses, times, memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec

from meshwright.spec.plan_file import Prediction
from meshwright.train.record.goodput import Goodput
from meshwright.train.record.metrics import EvaluationRecord, typical_step_s


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes on one device: shards of what the step is given, and what the compiler adds while it runs.

    ``temporaries_bytes`` are activations, gathered weights, gradients and buffers of collectives; None where
    the backend does not say. ``peak_bytes`` is the most that the device ever held, where it counts that.
    """

    weights_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    temporaries_bytes: int | None
    peak_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """All of it; what the compiler did not say counts nothing."""
        return self.weights_bytes + self.optimizer_bytes + self.batch_bytes + (self.temporaries_bytes or 0)


class TrainResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run came to. ``step_s`` is the median after the first two steps; compiling is in ``compile_s``.

    ``steps`` and ``losses`` are of the whole run, ``resumed_from`` the step at which this start took over (None for
    the first); times and ``goodput`` are of this start.
    """

    run: str
    steps: int
    stopped: bool
    losses: list[float]
    validation_loss: float | None
    step_s: float | None
    step_s_predicted: float | None
    tokens_per_s: float | None
    mfu: float | None
    hfu: float | None = None
    compile_s: float
    memory: MemoryUse | None
    goodput: Goodput | None = None
    evaluations: list[EvaluationRecord] = []
    resumed_from: int | None = None
    processes: int = 1


def measured_memory(state: Any, batch: Any, compiled: Any) -> MemoryUse:
    """What the first device of this process holds for a compiled step."""
    device = jax.local_devices()[0]

    def held(tree: Any) -> int:
        shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    analysis = compiled.memory_analysis()
    return MemoryUse(
        weights_bytes=held(state.params),
        optimizer_bytes=held(state.opt_state),
        batch_bytes=held(batch),
        temporaries_bytes=int(analysis.temp_size_in_bytes) if analysis is not None else None,
    )


def with_peak(memory: MemoryUse | None) -> MemoryUse | None:
    """The same with the most that the device held until now, where it counts that."""
    counted = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return msgspec.structs.replace(memory, peak_bytes=int(counted)) if memory and counted else memory


def make_result(
    run: Path,
    *,
    done: int,
    wanted: int,
    tokens_per_step: int,
    losses: Sequence[float],
    step_s: Sequence[float],
    predicted: Prediction[float] | None,
    goodput: Goodput,
    memory: MemoryUse | None,
    evaluations: Sequence[EvaluationRecord],
    resumed_from: int | None,
) -> TrainResult:
    """The result after ``done`` of ``wanted`` steps: ``losses`` of all of them, ``step_s`` of those of this start."""
    typical = typical_step_s(step_s)
    mfu, hfu = predicted.measured(typical) if predicted and typical else (None, None)
    return TrainResult(
        run=str(run),
        steps=done,
        stopped=done < wanted,
        losses=list(losses),
        validation_loss=evaluations[-1].loss if evaluations and evaluations[-1].step == done else None,
        step_s=typical,
        step_s_predicted=predicted.step_s if predicted else None,
        tokens_per_s=tokens_per_step / typical if typical else None,
        mfu=mfu,
        hfu=hfu,
        compile_s=goodput.compile_s,
        memory=with_peak(memory),
        goodput=goodput,
        evaluations=list(evaluations),
        resumed_from=resumed_from,
        processes=jax.process_count(),
    )
