"""Metrics sent to TensorBoard or Weights & Biases, besides the files of the run."""

import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.errors import InputError
from meshwright.core.files import write_text_whole
from meshwright.train.record.metrics import EvaluationRecord, StepRecord

WANDB_ID = Path("wandb", "id")
SHOWN = ("loss", "grad_norm", "learning_rate", "step_s", "tokens_per_s", "mfu", "hfu")


class Tracker(Protocol):
    """Where numbers of a step go; ``close`` writes what is still held back."""

    def log(self, numbers: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in the folder ``tensorboard`` of a run."""

    def __init__(self, run: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(logdir=str(run / "tensorboard"))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project ``meshwright``, named as its folder; a resumed run goes on in it.

    Its id is made up at the first start and kept in the run's folder: names such as tiny-001 come again in every
    folder of runs, and one id for two runs would join them.
    """

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        import wandb

        file = run / WANDB_ID
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text_whole(file, f"{run.name}-{secrets.token_hex(4)}\n")
        self._run = wandb.init(
            project="meshwright",
            name=run.name,
            id=file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(run),
            config=dict(config),
        )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class Tracking:
    """All trackers that ``train.track`` names, opened when it is made. None of them is needed by the run."""

    def __init__(self, names: Sequence[str], run: Path, config: Mapping[str, Any]) -> None:
        self._trackers: list[Tracker] = [
            TensorBoard(run) if name == "tensorboard" else WeightsAndBiases(run, config) for name in names
        ]

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, *error: object) -> None:
        for tracker in self._trackers:
            tracker.close()

    def record(self, record: StepRecord) -> None:
        """The numbers of a step, those that are known."""
        known = {name: value for name in SHOWN if (value := getattr(record, name)) is not None}
        self._log({**known, **record.extras}, record.step)

    def evaluated(self, record: EvaluationRecord) -> None:
        """The loss on held-out text."""
        self._log({"evaluation_loss": record.loss}, record.step)

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(numbers, step)


def require_trackers(names: Sequence[str]) -> None:
    """Raise InputError in one line for a tracker whose package is not installed, before anything is written."""
    for name, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        if name in names and find_spec(package) is None:
            raise InputError(
                f"train.track={name} needs the package {package}, which is not installed. "
                f"Install it with: pip install 'meshwright[{name}]', or leave {name} out."
            )
