"""The folder of a run. A new run never overwrites another one; a resumed run continues in its folder."""

import contextlib
import fcntl
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec

from meshwright.core.digests import SUMS, read_line, require_intact, summed_line, write_sums
from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.files import DAMAGED_JSON, write_json_whole, write_text_whole
from meshwright.core.toml_file import dump_toml, read_toml
from meshwright.core.units import plural
from meshwright.nn.hf.beside import files_beside
from meshwright.spec.model import Model
from meshwright.train.record.metrics import EvaluationRecord, StepRecord

METRICS, EVALUATIONS, SUMMARY = "metrics.jsonl", "evaluations.jsonl", "summary.json"
RESOLVED, PLAN = "resolved.toml", "plan.toml"
POSITIONS = {"name", "max_positions", "rope_theta", "rope_scaling"}
"""Fields of a model that do not change its weights, unless it learns positions: then the checkpoint differs."""


def create_run_folder(root: Path, name: str) -> Path:
    """Creates ``root/name-001``, or the next free number.

    Raises CannotRunError when the folder cannot be made.
    """
    stem = _stem(name)
    try:
        root.mkdir(parents=True, exist_ok=True)
        run_number = 1 + max((_number(path.name, stem) for path in root.iterdir()), default=0)
        while True:
            folder = root / f"{stem}-{run_number:03d}"
            try:
                folder.mkdir()
            except FileExistsError:  # another run took the number meanwhile
                run_number += 1
            else:
                return folder
    except OSError as error:
        raise CannotRunError(f"no run folder can be made in {root}: {error.strerror}. Give another folder.") from None


@contextmanager
def held_alone(run: Path) -> Iterator[None]:
    """Locks a run's folder for this process: two processes that resume one run would overwrite each other's files.

    The lock is released when its process ends; on file systems without locks there is none. Raises CannotRunError if
    another process has the lock.
    """
    folder_fd = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder_fd)
        raise CannotRunError(
            f"{run} is in use: another process trains in it. Wait for its end, or leave --resume out for a new run."
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(folder_fd)


def newest_run(root: Path, name: str) -> Path:
    """Returns the run of this name with the highest number. Raises InputError when there is none.

    A run that ended before it wrote its settings does not count.
    """
    stem = _stem(name)
    run_folders = [path for path in root.iterdir() if (path / RESOLVED).is_file()] if root.is_dir() else []
    run_by_number = {run_number: path for path in run_folders if (run_number := _number(path.name, stem))}
    if not run_by_number:
        raise InputError(f"there is no run of {stem} in {root} to resume. Leave --resume out, or give its folder.")
    return run_by_number[max(run_by_number)]


def _stem(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


def _number(name: str, stem: str) -> int:
    match = re.fullmatch(re.escape(stem) + r"-(\d+)", name)
    return int(match[1]) if match else 0


def read_resolved(run: Path) -> dict[str, Any]:
    """Reads the tables model, strategy, job and train of the last start of a run.

    Raises InputError when the folder is not a run's, or the file was edited.
    """
    try:
        toml = read_toml(run / RESOLVED)
    except InputError:
        raise InputError(f"{run} is not the folder of a run: it has no readable {RESOLVED}. Give another.") from None
    if toml.is_changed:
        raise InputError(
            f"{toml.path} was edited after it was written. Restore it, or remove its first line to accept the edit."
        )
    return toml.data


def require_same_model(run: Path, model: Model) -> None:
    """Raises InputError that names the first field in which the run's model differs.

    A field that is newer than the run has its default; fields of `POSITIONS` may differ, for longer sequences.
    """
    own_fields = _table_of(model)
    run_fields = read_resolved(run).get("model", {})
    with contextlib.suppress(msgspec.ValidationError):
        run_fields = _table_of(msgspec.convert(run_fields, Model))
    for field in sorted((own_fields.keys() | run_fields.keys()) - POSITIONS):
        if own_fields.get(field) != run_fields.get(field):
            raise InputError(
                f"{run} trains a model with {field}={run_fields.get(field)} and this one has "
                f"{field}={own_fields.get(field)}. Give the plan of that run, or leave --resume out for a new run."
            )


def _table_of(model: Model) -> dict[str, Any]:
    return dict(tomllib.loads(dump_toml({"model": model}))["model"])


def read_summary(run: Path) -> dict[str, Any]:
    """Reads the summary of a run, {} if the run has not ended. Raises CannotRunError if the file is damaged."""
    require_intact(run, [SUMMARY])
    try:
        return msgspec.json.decode((run / SUMMARY).read_bytes(), type=dict[str, Any])
    except (OSError, *DAMAGED_JSON):
        return {}


def finished_steps(run: Path) -> int | None:
    """Returns the steps of a complete run; None for one that stopped or failed."""
    summary = read_summary(run)
    return summary["steps"] if summary and not summary["stopped"] and not summary["diverged"] else None


class RunFolder:
    """Files of one run: texts at its start, a line of metrics each step, a summary at its end.

    ``step`` is where a resumed run continues; lines of later steps, which it repeats, are removed, and so are the files
    of an earlier end: its weights would be older than the newest checkpoint. ``losses`` are of steps up to ``step``,
    ``lost_s`` the seconds of later steps, and ``notes`` name lines that are damaged or missing. With ``writes`` False
    no file is touched: only one process writes.
    """

    def __init__(self, path: Path, texts: Mapping[str, str], *, step: int | None = None, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        self.losses: list[float] = []
        self.lost_s: list[float] = []
        self.notes: list[str] = []
        self._unwritten = b""
        if not writes:
            return
        for name, text in texts.items():
            write_text_whole(path / name, text)
        if step is not None:
            records, faults = _cut(path / METRICS, step, "loss", "step_s")
            self.lost_s = [record["step_s"] for record in records if record["step"] > step]
            loss_by_step = {record["step"]: record["loss"] for record in records}
            missing_steps = [past_step for past_step in range(1, step + 1) if past_step not in loss_by_step]
            if missing_steps:
                steps_text = ", ".join(map(str, missing_steps[:3])) + ", ..." * (len(missing_steps) > 3)
                faults.append(f"{METRICS} has no line of {plural('step', len(missing_steps))} {steps_text}")
            self.losses = [loss_by_step.get(past_step, math.nan) for past_step in range(1, step + 1)]
            self.notes = [*faults, *_cut(path / EVALUATIONS, step, "loss")[1]]
            # The summary first: without it the run does not count as ended. Then the digests, which list the others.
            for pattern in (SUMMARY, SUMS, "config.json", "*.safetensors", "*.safetensors.index.json"):
                for file in path.glob(pattern):
                    file.unlink()
        # Unbuffered, so that a killed run leaves the lines of all finished steps.
        self._metrics = (path / METRICS).open("xb" if step is None else "ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.writes:
            self._metrics.close()

    def go_back(self, step: int) -> None:
        """Removes the lines of steps after ``step``, which are run again."""
        if self.writes:
            self._metrics.close()
            for name in (METRICS, EVALUATIONS):
                _cut(self.path / name, step, "loss")
            self._metrics = (self.path / METRICS).open("ab", buffering=0)

    def record(self, record: StepRecord) -> None:
        """Writes a line of metrics; a loss that is not finite becomes null, since JSON has no NaN.

        Bytes that do not fit on a full disk are written with a later line.
        """
        if self.writes:
            self._unwritten += summed_line(record)
            with contextlib.suppress(OSError):
                self._unwritten = self._unwritten[self._metrics.write(self._unwritten) :]

    def evaluated(self, record: EvaluationRecord) -> None:
        """Writes a line of evaluations, and removes an earlier one of the same step."""
        if self.writes:
            _cut(self.path / EVALUATIONS, record.step - 1, "loss")
            with (self.path / EVALUATIONS).open("ab", buffering=0) as file:
                file.write(summed_line(record))

    def summarise(self, summary: Any) -> None:
        """Writes ``summary.json``, whole or absent, and its digest."""
        if self.writes:
            write_json_whole(self.path / SUMMARY, summary)
            write_sums(self.path, [self.path / SUMMARY, *files_beside(self.path)])


def _cut(path: Path, step: int, *fields: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns all records of a file by step, and cuts the file after ``step``.

    Lines that are not as they were written, or lack one of the ``fields``, are left out; the second list says which. A
    last line without an end, which a killed process leaves, is not counted among them.
    """
    if not path.exists():
        return [], []
    entry_by_step, bad_lines = {}, []
    for line_number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        record = read_line(line)
        is_valid = record is not None and all(isinstance(record.get(name, ""), int | float | None) for name in fields)
        if record is not None and is_valid and isinstance(record.get("step"), int):
            entry_by_step[record["step"]] = (line, record)
        else:
            bad_lines.append(line_number)
    entry_by_step = dict(sorted(entry_by_step.items()))
    kept_bytes = b"".join(line + b"\n" for record_step, (line, _) in entry_by_step.items() if record_step <= step)
    write_text_whole(path, kept_bytes.decode())
    faults = [f"{path.name}: line {line_number} is not as it was written and left out" for line_number in bad_lines]
    return [record for _, record in entry_by_step.values()], faults
