"""The folder of a run. A new run never overwrites another; a resumed one continues in its own."""

import contextlib
import fcntl
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec

from meshwright.core.errors import CannotRunError, InputError
from meshwright.core.files import write_json_whole, write_text_whole
from meshwright.core.toml_file import dump_toml
from meshwright.spec.model import Model
from meshwright.train.record.metrics import EvaluationRecord, StepRecord

METRICS, EVALUATIONS, SUMMARY = "metrics.jsonl", "evaluations.jsonl", "summary.json"
RESOLVED, PLAN = "resolved.toml", "plan.toml"


def create_run_folder(root: Path, name: str) -> Path:
    """Creates ``root/name-001``, or the next free number.

    Raises CannotRunError when the folder cannot be made.
    """
    stem = _stem(name)
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


@contextmanager
def held_alone(run: Path) -> Iterator[None]:
    """Locks a run's folder for this process: two that resume one run would overwrite each other's files.

    The lock ends with its process; on a file system without locks there is none. Raises CannotRunError when another
    process has the lock.
    """
    handle = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise CannotRunError(
            f"{run} is in use: another process trains in it. Wait for its end, or leave --resume out for a new run."
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(handle)


def newest_run(root: Path, name: str) -> Path:
    """Returns the run of this name with the highest number. Raises InputError when there is none.

    A run that ended before it wrote its settings does not count.
    """
    stem = _stem(name)
    folders = [path for path in root.iterdir() if (path / RESOLVED).is_file()] if root.is_dir() else []
    runs = {number: path for path in folders if (number := _number(path.name, stem))}
    if not runs:
        raise InputError(f"there is no run of {stem} in {root} to resume. Leave --resume out, or give its folder.")
    return runs[max(runs)]


def _stem(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


def _number(name: str, stem: str) -> int:
    match = re.fullmatch(re.escape(stem) + r"-(\d+)", name)
    return int(match[1]) if match else 0


def read_resolved(run: Path) -> dict[str, Any]:
    """Reads the tables model, strategy, job and train of the last start of a run.

    Raises InputError when the folder is not that of a run.
    """
    try:
        return tomllib.loads((run / RESOLVED).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        raise InputError(f"{run} is not the folder of a run: it has no readable {RESOLVED}.") from None


def require_same_model(run: Path, model: Model) -> None:
    """Raises InputError that names the first field in which the run's model differs.

    A field that is newer than the run counts as its default.
    """
    ours = _table_of(model)
    theirs = read_resolved(run).get("model", {})
    with contextlib.suppress(msgspec.ValidationError):
        theirs = _table_of(msgspec.convert(theirs, Model))
    for field in sorted(ours.keys() | theirs.keys()):
        if ours.get(field) != theirs.get(field):
            raise InputError(
                f"{run} trains a model with {field}={theirs.get(field)} and this one has {field}={ours.get(field)}. "
                f"Give the plan of that run, or leave --resume out for a new run."
            )


def _table_of(model: Model) -> dict[str, Any]:
    return dict(tomllib.loads(dump_toml({"model": model}))["model"])


def read_summary(run: Path) -> dict[str, Any]:
    """Reads the summary of a run; empty for one without an end."""
    try:
        return msgspec.json.decode((run / SUMMARY).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}


def finished_steps(run: Path) -> int | None:
    """Returns the steps of a complete run; None for one that stopped or failed."""
    summary = read_summary(run)
    return summary["steps"] if summary and not summary["stopped"] and not summary["diverged"] else None


class Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Earlier steps of a resumed run: the losses that it keeps, and the steps that it repeats."""

    losses: list[float] = []
    lost_steps: int = 0
    lost_s: float = 0.0


class RunFolder:
    """Files of one run: texts at its start, a line of metrics each step, a summary at its end.

    ``step`` is where a resumed run continues; lines of later steps, which it repeats, are removed, and so are the files
    of an earlier end: its weights would be older than the newest checkpoint. With ``writes`` False no file is touched:
    only one process writes.
    """

    def __init__(self, path: Path, texts: Mapping[str, str], *, step: int | None = None, writes: bool = True) -> None:
        self.path, self.writes, self.kept = path, writes, Kept()
        if not writes:
            return
        for name, text in texts.items():
            write_text_whole(path / name, text)
        if step is not None:
            records = _cut(path / METRICS, step)
            again = [record["step_s"] for record in records if record["step"] > step]
            losses = [record["loss"] for record in records if record["step"] <= step]
            self.kept = Kept(losses=losses, lost_steps=len(again), lost_s=float(sum(again)))
            _cut(path / EVALUATIONS, step)
            # The summary first: without it the run does not count as ended.
            for pattern in (SUMMARY, "config.json", "*.safetensors", "*.safetensors.index.json"):
                for file in path.glob(pattern):
                    file.unlink()
        # Unbuffered: a killed run leaves every finished step.
        self._metrics = (path / METRICS).open("xb" if step is None else "ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.writes:
            self._metrics.close()

    def record(self, record: StepRecord) -> None:
        """Writes a line of metrics; a loss that is not finite becomes null, since JSON has no NaN."""
        if self.writes:
            self._metrics.write(msgspec.json.encode(record) + b"\n")

    def evaluated(self, record: EvaluationRecord) -> None:
        """Writes a line of evaluations, and removes an earlier one of the same step."""
        if self.writes:
            _cut(self.path / EVALUATIONS, record.step - 1)
            with (self.path / EVALUATIONS).open("ab", buffering=0) as file:
                file.write(msgspec.json.encode(record) + b"\n")

    def summarise(self, summary: Any) -> None:
        """Writes ``summary.json``, whole or absent."""
        if self.writes:
            write_json_whole(self.path / SUMMARY, summary)


def _cut(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns all records of a file, and cuts the file after ``step``. Drops a broken last line."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            lines.append((line, msgspec.json.decode(line, type=dict[str, Any])))
        except msgspec.DecodeError:  # the process was killed while it wrote
            break
    text = b"".join(line + b"\n" for line, record in lines if record["step"] <= step)
    write_text_whole(path, text.decode())
    return [record for _, record in lines]
