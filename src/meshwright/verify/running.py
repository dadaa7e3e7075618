"""Compiles a request in a process of its own: with a time limit, quietly, and surviving whatever becomes of it."""

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.core.errors import InputError
from meshwright.verify.dumps import BUFFERS_END, FLAGS, MODULE_END, dump_files, read_memory, read_program
from meshwright.verify.request import COMPILED, ERROR, LOWERED, MODULE, REQUEST, Compiled, Lowered, Request

DUMP = "dump"
POLL_S = 0.05
_STABLE_POLLS = 3

Ended = Literal["done", "stopped", "error", "crash", "timeout"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a compilation.

    ``ended``: "done"; "stopped" once buffers were assigned (all that the partition depth wants); "error" with the
    compiler's ``message``; "crash" with the last it said; "timeout". ``program`` is the HLO that the compiler was
    given, ``hlo`` what it made of it. ``cpu_s`` and ``max_rss_bytes`` are the process's.
    """

    ended: Ended
    lowered: Lowered | None = None
    compiled: Compiled | None = None
    hlo: str = ""
    program: str = ""
    message: str = ""
    remarks: tuple[str, ...] = ()
    wall_s: float
    cpu_s: float
    max_rss_bytes: int


def run_request(request: Request, *, program: Sequence[str], timeout_s: float, keep: Path | None = None) -> Outcome:
    """Compile a request with ``program``, which takes the folder of the request as its last argument.

    ``keep`` is where the compiler's files stay; without it they are gone afterwards. Raises InputError for a folder
    that cannot be written to, or that holds anything but an earlier compilation.
    """
    if keep is not None:
        _take_folder(keep)
        return _run(request, keep, program, timeout_s)
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        return _run(request, Path(folder), program, timeout_s)


def _take_folder(folder: Path) -> None:
    """Make a folder, or empty it of an earlier compilation."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / REQUEST).is_file():
            raise InputError(f"{folder} holds other files, which could be lost. Name a new or an empty folder.")
        for name in (LOWERED, COMPILED, MODULE, ERROR):
            (folder / name).unlink(missing_ok=True)
        for old in (folder / DUMP).glob("*"):
            if old.is_file():
                old.unlink()
        (folder / REQUEST).touch()
    except OSError as error:
        raise InputError(f"nothing can be kept in {folder}: {error.strerror}. Name a folder to write to.") from None


def _run(request: Request, folder: Path, program: Sequence[str], timeout_s: float) -> Outcome:
    dumps = folder / DUMP
    (folder / REQUEST).write_bytes(msgspec.json.encode(request))
    dumped = request.depth != "lower"
    log = folder / "compiler.log"
    started = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*program, str(folder)],
            stdout=stream,
            stderr=stream,
            env=_environment(request, dumps if dumped else None),
            start_new_session=True,
        )
        early = request.target.platform != "cpu" and request.depth == "partition"
        stop_early = dumps if early else None
        try:
            ended, status, usage, seen_kb = _wait(process, started + timeout_s, stop_early)
        except BaseException:
            # Ctrl-C does not reach it in a session of its own
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    text = log.read_text(errors="replace")
    # Linux starts a program's ru_maxrss at the peak of the process that started it: up to there it says nothing.
    inherited = usage.ru_maxrss <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent = {
        "wall_s": time.monotonic() - started,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "max_rss_bytes": (seen_kb if inherited and seen_kb else usage.ru_maxrss) * 1024,
    }
    return _outcome(folder, ended, status, text, spent, dumps, request.target.platform == "cpu")


def _environment(request: Request, dumps: Path | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    # A program out of JAX's cache is not compiled, and nothing is dumped.
    found = {**kept, **request.target.environment, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if request.depth == "lower":
        found["JAX_PLATFORMS"] = "cpu"
        found.pop("XLA_FLAGS", None)
    if dumps is not None:
        found["XLA_FLAGS"] = f"{found.get('XLA_FLAGS', '')} {FLAGS.format(folder=dumps)}".strip()
    return found


def _wait(process: "subprocess.Popen[bytes]", deadline: float, dumps: Path | None) -> tuple[str, int, Any, int]:
    """Waits for a process, and kills it at the deadline, or when the dump holds what is wanted.

    Returns how it ended, its exit status, its resource usage, and the last peak of its memory seen in KiB (0: none).
    """
    sizes: tuple[int, ...] = ()
    steady = 0
    peak_kb = 0
    ended = "exit"
    while True:
        peak_kb = max(peak_kb, _peak_kb(process.pid))
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return ended, process.returncode, usage, peak_kb
        if time.monotonic() > deadline and ended == "exit":
            ended = "timeout"
            os.killpg(process.pid, signal.SIGKILL)
        files = dump_files(dumps) if dumps is not None and ended == "exit" else None
        if files is not None:
            now = tuple(path.stat().st_size for path in files.values())
            steady = steady + 1 if now == sizes else 0
            sizes = now
            if steady >= _STABLE_POLLS:
                ended = "stopped"
                os.killpg(process.pid, signal.SIGKILL)
        time.sleep(POLL_S)


def _peak_kb(pid: int) -> int:
    """Most memory that a process has had so far, in KiB; 0 where the system does not say."""
    try:
        found = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _outcome(
    folder: Path, ended: str, status: int, log: str, spent: dict[str, Any], dumps: Path, on_cpu: bool
) -> Outcome:
    lowered = _read(folder / LOWERED, Lowered)
    compiled = _read(folder / COMPILED, Compiled)
    common: dict[str, Any] = {"lowered": lowered, "remarks": _remarks(log), "program": read_program(dumps), **spent}
    error = msgspec.json.decode((folder / ERROR).read_bytes()) if (folder / ERROR).is_file() else None
    files = None if on_cpu else dump_files(dumps)
    if files is not None and compiled is not None and ended == "exit":
        # what lies where, without what the compiler's own summary counts twice
        memory = msgspec.structs.replace(read_memory(files[BUFFERS_END].read_text()), peak=compiled.memory.peak)
        compiled = msgspec.structs.replace(compiled, memory=memory)
        return Outcome(ended="done", compiled=compiled, hlo=files[MODULE_END].read_text(), **common)
    if files is not None and (ended == "stopped" or error is not None):
        message = error["message"] if error else ""
        compiled = Compiled(
            seconds=spent["wall_s"] - (lowered.seconds if lowered else 0.0),
            memory=read_memory(files[BUFFERS_END].read_text()),
            out_of_memory=message if "RESOURCE_EXHAUSTED" in message else "",
        )
        if not error or compiled.out_of_memory:
            return Outcome(ended="stopped", compiled=compiled, hlo=files[MODULE_END].read_text(), **common)
    if error is not None:
        return Outcome(ended="error", message=_first_line(error["message"]), **common)
    if ended == "timeout":
        return Outcome(ended="timeout", message=f"stopped after {spent['wall_s']:.0f} s", **common)
    if status != 0:
        return Outcome(ended="crash", message=_last_words(status, log), **common)
    hlo = (folder / MODULE).read_text() if (folder / MODULE).is_file() else ""
    return Outcome(ended="done", compiled=compiled, hlo=hlo, **common)


def _read(path: Path, kind: Any) -> Any:
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.is_file() else None


def _remarks(log: str) -> tuple[str, ...]:
    """Lines in which the partitioner says that it copied an array whole to reshard it."""
    return tuple(line.strip() for line in log.splitlines() if "nvoluntary full rematerialization" in line)


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0] if message.strip() else "no message"


def _last_words(status: int, log: str) -> str:
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    lines = [line for line in log.splitlines() if line.strip()]
    return f"{how}: {lines[-1].strip()[:300]}" if lines else how


def python_program(module: str) -> tuple[str, ...]:
    """A module of this package run by this Python."""
    return sys.executable, "-m", module
