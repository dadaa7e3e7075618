"""What is said about each step: the record in metrics.jsonl and the live line."""

import statistics
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from meshwright.core.units import format_count, format_seconds

WARMUP_STEPS_UNTIMED = 2
"""The first steps also fill caches and allocate, so they are left out of the median."""


class Predicted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan expects of each step; None for what it does not know.

    ``model_flops`` is the work of one step that MFU counts and ``peak_flops_per_s`` what all devices together
    could do, so that MFU = model_flops / (step_s * peak_flops_per_s).
    """

    step_s: float | None = None
    step_s_lower: float | None = None
    step_s_upper: float | None = None
    model_flops: float | None = None
    peak_flops_per_s: float | None = None
    hbm_bytes_per_chip: float | None = None

    def mfu(self, step_s: float) -> float | None:
        """Model FLOPs utilisation of a measured step; None without FLOPs or a peak."""
        if self.model_flops is None or self.peak_flops_per_s is None:
            return None
        return self.model_flops / (step_s * self.peak_flops_per_s)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of metrics.jsonl: steps count from 1, loss is the mean per token of the global batch."""

    step: int
    tokens: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    tokens_per_s: float
    mfu: float | None
    predicted_step_s: float | None


def typical_step_s(step_s: Sequence[float]) -> float | None:
    """The median after the first two steps, of all steps when there are no more, None without any."""
    timed = step_s[WARMUP_STEPS_UNTIMED:] or step_s
    return statistics.median(timed) if timed else None


class LiveLine:
    """One line on stderr that is rewritten on a terminal, else a plain line every ``every`` steps."""

    def __init__(self, *, steps: int, every: int) -> None:
        self.steps, self.every = steps, every
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False) if sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A message of its own line, above the live line."""
        if self._live:
            self._live.console.print(Text(text))
        else:
            print(text, file=sys.stderr, flush=True)

    def show(self, record: StepRecord) -> None:
        """The newest step."""
        line = describe(record, self.steps)
        if self._live:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif record.step in (1, self.steps) or record.step % self.every == 0:
            print(line, file=sys.stderr, flush=True)


def describe(record: StepRecord, steps: int) -> str:
    """``step 20/100  loss 4.812  6.1 k tokens/s  step 336 ms (predicted 310 ms)  MFU 41%``."""
    parts = [
        f"step {record.step}/{steps}",
        f"loss {record.loss:.3f}",
        f"{format_count(round(record.tokens_per_s, 1))} tokens/s",
        f"step {format_seconds(record.step_s)}",
    ]
    if record.predicted_step_s is not None:
        parts[-1] += f" (predicted {format_seconds(record.predicted_step_s)})"
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    return "  ".join(parts)
