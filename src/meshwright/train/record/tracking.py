"""Sends metrics to TensorBoard or Weights & Biases, besides the files of the run."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.core.extras import EXTRAS, require
from meshwright.core.files import write_text_whole
from meshwright.train.record.metrics import EvaluationRecord, StepRecord

WANDB_ID = Path("wandb", "id")
SHOWN = ("loss", "grad_norm", "learning_rate", "step_s", "tokens_per_s", "mfu", "hfu")


Tracker = tuple[Callable[[Mapping[str, float], int], None], Callable[[], None]]
"""(function that logs the numbers of a step by name, function that closes the tracker)."""


def _tensorboard(run: Path) -> Tracker:
    """Returns a tracker that writes event files in the folder ``tensorboard`` of a run."""
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(logdir=str(run / "tensorboard"))

    def log(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _weights_and_biases(run: Path, config: Mapping[str, Any]) -> Tracker:
    """Returns a tracker of a W&B run in the project ``meshwright``, named like the run's folder; resuming continues it.

    Its id is random, and kept in the run's folder: names such as tiny-001 occur in every folder of runs, and one id for
    two runs would join them.
    """
    import wandb

    id_file = run / WANDB_ID
    if not id_file.is_file():
        id_file.parent.mkdir(parents=True, exist_ok=True)
        write_text_whole(id_file, f"{run.name}-{secrets.token_hex(4)}\n")
    wandb_run = wandb.init(
        project="meshwright",
        name=run.name,
        id=id_file.read_text(encoding="utf-8").strip(),
        resume="allow",
        dir=str(run),
        config=dict(config),
    )
    return lambda numbers, step: wandb_run.log(dict(numbers), step=step), wandb_run.finish


class Tracking:
    """All trackers that ``train.track`` names."""

    def __init__(self, names: Sequence[str], run: Path, config: Mapping[str, Any]) -> None:
        self._trackers: list[Tracker] = [
            _tensorboard(run) if name == "tensorboard" else _weights_and_biases(run, config) for name in names
        ]

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *error: object) -> None:
        for _, close in self._trackers:
            close()

    def record(self, record: StepRecord) -> None:
        """Logs the numbers of a step that are not None."""
        number_by_name = {name: value for name in SHOWN if (value := getattr(record, name)) is not None}
        self._log({**number_by_name, **record.extras}, record.step)

    def evaluated(self, record: EvaluationRecord) -> None:
        """Logs the loss on held-out text."""
        self._log({"evaluation_loss": record.loss}, record.step)

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        for log, _ in self._trackers:
            log(numbers, step)


def require_trackers(names: Sequence[str]) -> None:
    """Raises InputError for a tracker whose package is not installed, before anything is written."""
    for name in names:
        if name in EXTRAS:
            require(name, f"train.track={name}")
