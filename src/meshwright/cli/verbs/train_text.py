"""The text of a run in `train` and `demo`: losses, each prediction beside its measurement, where the time went."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.cli.output import or_dash
from meshwright.core.files import cache_folder
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.answer import Paragraph, Piece, Table, utilisation_rows
from meshwright.spec.plan_file import Plan

if TYPE_CHECKING:
    from meshwright.train.record.result import Goodput, TrainResult


def result_text(chosen: Plan, result: "TrainResult") -> Iterator[Piece]:
    """Yields losses, and each prediction beside its measurement."""
    if not result.losses:
        yield f"stopped before the first step; {result.run} holds the plan"
        return
    stopped = " (stopped)" if result.stopped else ""
    held_out = or_dash(result.validation_loss, lambda loss: f"{loss:.3f}")
    known = [loss for loss in result.losses if math.isfinite(loss)]  # damaged lines of metrics have none
    losses = f"loss {known[0]:.3f} -> {known[-1]:.3f}" if known else "loss -"
    yield f"{result.steps} steps{stopped}: {losses}, held out {held_out}"
    predicted = chosen.predicted
    memory = result.memory.total_bytes if result.memory else None
    yield Table.compared(
        [
            ("step", predicted.step_s, result.step_s, format_seconds),
            *utilisation_rows(predicted, result),
            ("memory of a device", predicted.hbm_bytes_per_chip, memory, format_bytes),
        ]
    )
    if (result.mfu_causal or result.mfu or 0) > 1:
        calibration = chosen.calibration.name if chosen.calibration else "the data sheet"
        yield (
            f"an MFU above 100%: the machine is faster than the plan's rates ({calibration}); it may have been busy "
            f"when they were measured. Remove them from {cache_folder()} and plan again to measure again."
        )
    rate = or_dash(result.tokens_per_s, lambda tokens: f"{tokens:,.0f}")
    yield Paragraph(
        f"{rate} tokens/s; compiling took {format_seconds(result.compile_s)}; everything is in {result.run}", None
    )
    if result.skipped_records:
        yield f"left out {result.skipped_records} bad records of the data"
    if result.goodput:
        yield goodput_words(result.goodput)


def goodput_words(goodput: "Goodput") -> str:
    """Returns ``goodput 83%: 12 s of 14.5 s in steps, compiling 1.2 s, ...``: the parts of a hundredth or more."""
    parts = {
        "compiling": goodput.compile_s,
        "evaluation": goodput.evaluation_s,
        "waiting for checkpoints": goodput.checkpoint_s,
        "waiting for data": goodput.data_s,
        "start and files": goodput.other_s,
        f"{goodput.lost_steps} steps done again": goodput.lost_s,
    }
    rest = [f"{name} {format_seconds(s)}" for name, s in parts.items() if s >= goodput.wall_s / 100]
    in_steps = f"{format_seconds(goodput.steps_s)} of {format_seconds(goodput.wall_s)} in steps"
    return f"goodput {goodput.share:.0%}: " + ", ".join([in_steps, *rest])
