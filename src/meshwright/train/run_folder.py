"""The folder a run leaves behind. An existing run is never written over."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from meshwright.core.errors import CannotRunError
from meshwright.core.files import write_text_whole
from meshwright.train.metrics import StepRecord

METRICS, SUMMARY, RESOLVED, PLAN = "metrics.jsonl", "summary.json", "resolved.toml", "plan.toml"


def create_run_folder(root: Path, name: str) -> Path:
    """``root/name-001``, or the next free number, made here and empty.

    Raises CannotRunError when the folder cannot be made.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    try:
        root.mkdir(parents=True, exist_ok=True)
        number = 1 + max((_number(path.name, stem) for path in root.iterdir()), default=0)
        while True:
            folder = root / f"{stem}-{number:03d}"
            try:
                folder.mkdir()
            except FileExistsError:  # another run took the number meanwhile
                number += 1
            else:
                return folder
    except OSError as error:
        raise CannotRunError(f"no run folder can be made in {root}: {error.strerror}. Give another folder.") from None


def _number(name: str, stem: str) -> int:
    match = re.fullmatch(re.escape(stem) + r"-(\d+)", name)
    return int(match[1]) if match else 0


class RunFolder:
    """Files of one run: texts at its start, a line of metrics each step, a summary at its end."""

    def __init__(self, path: Path, texts: Mapping[str, str]) -> None:
        self.path = path
        for name, text in texts.items():
            write_text_whole(path / name, text)
        # Unbuffered: a run that dies leaves every finished step behind.
        self._metrics = (path / METRICS).open("xb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._metrics.close()

    def record(self, record: StepRecord) -> None:
        """One line of metrics; a loss that is not finite becomes null, since JSON has no NaN."""
        self._metrics.write(msgspec.json.encode(record) + b"\n")

    def summarise(self, summary: Any) -> None:
        """``summary.json``, whole or absent."""
        write_text_whole(self.path / SUMMARY, msgspec.json.format(msgspec.json.encode(summary)).decode() + "\n")
