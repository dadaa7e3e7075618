"""The record of each step in metrics.jsonl, and the live line."""

import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.core.units import format_count, format_seconds
from meshwright.islands.ledger import SampleBlock
from meshwright.spec.prediction import unmasked

WARMUP_STEPS = 2
"""The first steps also fill caches and allocate memory, so the median excludes them."""
BAR_WIDTH = 12


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of metrics.jsonl: steps count from 1, loss is the mean over the global batch's labels that have a loss.

    ``tokens`` counts the tokens of all steps so far. ``extras`` are further numbers, `over_layers` of `Metrics.extras`;
    ``islands`` are the samples that each island took, if there are several.
    """

    step: int
    tokens: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    tokens_per_s: float
    mfu: float | None = None
    hfu: float | None = None
    mfu_causal: float | None = None
    predicted_step_s: float | None
    extras: dict[str, float] = {}
    islands: dict[int, SampleBlock] = {}


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of evaluations.jsonl: the loss on held-out text after ``step`` steps, which had ``tokens`` in all."""

    step: int
    tokens: int
    loss: float


def on_host(tree: Any) -> Any:
    """Returns a tree as NumPy arrays on every process; fetches the shards of other processes."""

    def reachable(array: Array | np.generic) -> Any:
        is_reachable = isinstance(array, np.generic) or array.is_fully_addressable or array.is_fully_replicated
        return array if is_reachable else multihost_utils.process_allgather(array, tiled=True)

    return jax.device_get(jax.tree.map(reachable, tree))


def over_layers(extras: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Reduces metrics over layers with experts: the maximum of load_max_over_mean, the mean of other metrics."""
    return {name: float(np.max(a) if name == "load_max_over_mean" else np.mean(a)) for name, a in extras.items()}


def typical_step_s(step_s: Sequence[float]) -> float | None:
    """Returns the median of the steps after the first two, or of all steps if there are no more; None without steps."""
    timed_s = step_s[WARMUP_STEPS:] or step_s
    return statistics.median(timed_s) if timed_s else None


class LiveLine:
    """One line on stderr, rewritten on a terminal; else a plain line at the first, the last and each ``every``-th step.

    With ``shown`` False it prints nothing: only one process prints.
    """

    def __init__(self, *, steps: int, every: int, shown: bool = True) -> None:
        self.steps, self.every, self.shown = steps, every, shown
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False) if shown and sys.stderr.isatty() else None
        self._recent_s: deque[float] = deque(maxlen=50)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Prints a message above the live line."""
        if self._live:
            self._live.console.print(Text(text))
        elif self.shown:
            print(text, file=sys.stderr, flush=True)

    def show(self, record: StepRecord) -> None:
        """Shows the newest step."""
        self._recent_s.append(record.step_s)
        if self._live:
            self._live.update(self._bar(record), refresh=True)
        elif self.shown and (record.step in (1, self.steps) or record.step % self.every == 0):
            print(describe(record, self.steps), file=sys.stderr, flush=True)

    def _bar(self, record: StepRecord) -> RenderableType:
        left_s = (self.steps - record.step) * statistics.median(self._recent_s)
        line_text = describe(record, self.steps) + (f"  {format_seconds(left_s)} left" if left_s else "")
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=BAR_WIDTH)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_row(ProgressBar(total=self.steps, completed=record.step, width=BAR_WIDTH), Text(line_text))
        return grid


def describe(record: StepRecord, steps: int) -> str:
    """Returns ``step 20/100  loss 4.812  6.1 k tokens/s  step 336 ms (predicted 310 ms)  MFU 41.0%``; with experts
    also the largest load over the mean, and the share of choices without a slot; and the loss of the token after the
    next, if a layer predicts it."""
    phrases = [
        f"step {record.step}/{steps}",
        f"loss {record.loss:.3f}",
        f"{format_count(round(record.tokens_per_s, 1))} tokens/s",
        f"step {format_seconds(record.step_s)}",
    ]
    if record.predicted_step_s is not None:
        phrases[-1] += f" (predicted {format_seconds(record.predicted_step_s)})"
    if record.mfu is not None:
        causal_mfu = unmasked(record)
        phrases.append(f"MFU {record.mfu:.1%}" + (f" ({causal_mfu:.1%} without masked scores)" if causal_mfu else ""))
    if "load_max_over_mean" in record.extras:
        phrases.append(f"busiest expert {record.extras['load_max_over_mean']:.2f}x")
    if record.extras.get("dropped_share"):
        phrases.append(f"dropped {record.extras['dropped_share']:.1%}")
    if "mtp_loss" in record.extras:
        phrases.insert(2, f"second token {record.extras['mtp_loss']:.3f}")
    return "  ".join(phrases)
