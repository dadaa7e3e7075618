"""Compiles a request in a process of its own, with a time limit, and survives its crashes.

Compilers dump the optimised program and the buffer assignment before they generate code. Code generation takes most of
the time and changes neither, so the partition depth stops there.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from meshwright.core.errors import InputError
from meshwright.core.units import parse_bytes
from meshwright.spec.chip import GivenOptions
from meshwright.verify.request import ERROR, LOWERED, MEMORY, MODULE, OPTIONS, REQUEST, Memory, Request

DUMP = "dump"
POLL_S = 0.05
_STABLE_POLLS = 3
FLAGS = "--xla_dump_to={folder} --xla_dump_hlo_as_text"

PROGRAM_END = ".before_optimizations.txt"
MODULE_END = "after_optimizations.txt"
BUFFERS_END = "after_optimizations-buffer-assignment.txt"
LAST_END = "after_optimizations-memory-usage-report.txt"
_ENDS = (MODULE_END, BUFFERS_END, LAST_END)

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(?:, color (\d+))?,?(.*)$", re.MULTILINE)
_OUT_OF_MEMORY = re.compile(r"exceeds available HBM \(([\d.]+)([KMGT])\)|Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")

Kind = TypeVar("Kind")
Ended = Literal["done", "stopped", "error", "crash", "timeout"]


class CompileOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a compilation ended, and its results.

    ``lowered``: the step has been traced, every dim divides and every type agrees. ``ended``: "done"; "stopped" once
    buffers were assigned (enough for the partition depth); "error" with the compiler's ``message``; "crash" with
    its last line of output; "timeout". ``memory`` is the buffer assignment, ``out_of_memory`` the compiler's message
    about a program that is too large. ``program`` is the HLO before optimisation, ``hlo`` after it. ``remarks`` are
    the partitioner's, about arrays that it replicated. ``compiler`` has the options of the compiler. ``cpu_s`` and
    ``max_rss_bytes`` are those of the process.
    """

    ended: Ended
    lowered: bool = False
    memory: Memory | None = None
    out_of_memory: str = ""
    hlo: str = ""
    program: str = ""
    message: str = ""
    remarks: tuple[str, ...] = ()
    compiler: GivenOptions = GivenOptions()
    wall_s: float
    cpu_s: float
    max_rss_bytes: int


def run_request(
    request: Request, *, program: Sequence[str], timeout_s: float, keep: Path | None = None
) -> CompileOutcome:
    """Compiles a request with ``program``, which takes the folder of the request as its last argument.

    ``keep`` is the folder that keeps the compiler's files; without it they are deleted. Raises InputError for a folder
    that cannot be written to, or that holds anything but an earlier compilation.
    """
    if keep is not None:
        _take_folder(keep)
        return _run(request, keep, program, timeout_s)
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        return _run(request, Path(folder), program, timeout_s)


def _take_folder(folder: Path) -> None:
    """Makes a folder, or deletes an earlier compilation in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / REQUEST).is_file():
            raise InputError(f"{folder} holds other files, which could be lost. Name a new or an empty folder.")
        for name in (LOWERED, MEMORY, MODULE, OPTIONS, ERROR):
            (folder / name).unlink(missing_ok=True)
        for old_file in (folder / DUMP).glob("*"):
            if old_file.is_file():
                old_file.unlink()
        (folder / REQUEST).touch()
    except OSError as error:
        raise InputError(f"nothing can be kept in {folder}: {error.strerror}. Name a folder to write to.") from None


def _run(request: Request, folder: Path, program: Sequence[str], timeout_s: float) -> CompileOutcome:
    dumps = folder / DUMP
    (folder / REQUEST).write_bytes(msgspec.json.encode(request))
    log = folder / "compiler.log"
    started = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*program, str(folder)],
            stdout=stream,
            stderr=stream,
            env=_environment(request, dumps),
            start_new_session=True,
        )
        dumps_to_watch = dumps if request.target.platform != "cpu" and request.depth == "partition" else None
        try:
            ended, status, usage, seen_kb = _wait(process, started + timeout_s, dumps_to_watch)
        except BaseException:
            # the process runs in a session of its own, which Ctrl-C does not reach
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    text = log.read_text(errors="replace")
    # Linux starts a program's ru_maxrss at the peak of the process that started it: up to there it says nothing.
    is_inherited = usage.ru_maxrss <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    costs = {
        "wall_s": time.monotonic() - started,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "max_rss_bytes": (seen_kb if is_inherited and seen_kb else usage.ru_maxrss) * 1024,
    }
    return _outcome(folder, ended, status, text, costs, on_cpu=request.target.platform == "cpu")


def _environment(request: Request, dumps: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    # A program from JAX's cache would not be compiled, and nothing dumped.
    variables = {**inherited, **request.target.environment, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if request.depth == "lower":
        variables["JAX_PLATFORMS"] = "cpu"
        variables.pop("XLA_FLAGS", None)
    else:
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} {FLAGS.format(folder=dumps)}".strip()
    return variables


def _wait(
    process: "subprocess.Popen[bytes]", deadline: float, dumps: Path | None
) -> tuple[str, int, resource.struct_rusage, int]:
    """Waits for a process, and kills it at the deadline, or once the dump is complete.

    Returns how it ended, its exit status, its resource usage, and the last peak of its memory seen in KiB (0: none).
    """
    sizes: tuple[int, ...] = ()
    num_steady = 0
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
            new_sizes = tuple(path.stat().st_size for path in files.values())
            num_steady = num_steady + 1 if new_sizes == sizes else 0
            sizes = new_sizes
            if num_steady >= _STABLE_POLLS:
                ended = "stopped"
                os.killpg(process.pid, signal.SIGKILL)
        time.sleep(POLL_S)


def _peak_kb(pid: int) -> int:
    """Returns the peak memory of a running process in KiB; 0 if the system does not say."""
    try:
        match = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _outcome(folder: Path, ended: str, status: int, log: str, spent: dict[str, Any], *, on_cpu: bool) -> CompileOutcome:
    memory, error = _read(folder / MEMORY, Memory), _read(folder / ERROR, dict)
    files = None if on_cpu else dump_files(folder / DUMP)
    lowered, program = (folder / LOWERED).is_file(), read_program(folder / DUMP)
    # The partitioner reports that it replicated an array to reshard it.
    remarks = tuple(line.strip() for line in log.splitlines() if "nvoluntary full rematerialization" in line)
    options = _read(folder / OPTIONS, GivenOptions) or GivenOptions()
    outcome = partial(CompileOutcome, lowered=lowered, remarks=remarks, program=program, compiler=options, **spent)
    if files is not None:
        assigned_memory, hlo = read_memory(files[BUFFERS_END].read_text()), files[MODULE_END].read_text()
        if memory is not None and ended == "exit":
            # the compiler's own summary counts aliased buffers twice, the dumped assignment does not
            return outcome(ended="done", memory=msgspec.structs.replace(assigned_memory, peak=memory.peak), hlo=hlo)
        message = error["message"] if error else ""
        out_of_memory = message if "RESOURCE_EXHAUSTED" in message else ""
        if out_of_memory or (ended == "stopped" and not error):
            return outcome(ended="stopped", memory=assigned_memory, out_of_memory=out_of_memory, hlo=hlo)
    if error is not None:
        lines = error["message"].strip().splitlines() or ["no message"]
        return outcome(ended="error", message=lines[0])
    if ended == "timeout":
        return outcome(ended="timeout", message=f"stopped after {spent['wall_s']:.0f} s")
    if status != 0:
        return outcome(ended="crash", message=_last_words(status, log))
    hlo = (folder / MODULE).read_text() if (folder / MODULE).is_file() else ""
    return outcome(ended="done", memory=memory, hlo=hlo)


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.is_file() else None


# -- what the compiler dumps --------------------------------------------------------------------------


def dump_files(folder: Path) -> dict[str, Path] | None:
    """Returns the files of the step's module by suffix; None until all of them exist and are not empty."""
    files = {}
    for suffix in _ENDS:
        paths = sorted(p for p in folder.glob(f"*.jit_*{suffix}") if p.stat().st_size)
        if not paths:
            return None
        # small modules, such as those of constants, come before the step and are smaller
        files[suffix] = max(paths, key=lambda path: path.stat().st_size)
    return files


def read_program(folder: Path) -> str:
    """Returns the step's program before optimisation; empty if it was not written."""
    paths = sorted(folder.glob(f"*.jit_*{PROGRAM_END}"), key=lambda path: path.stat().st_size)
    return paths[-1].read_text() if paths else ""


def read_memory(buffer_assignment: str) -> Memory:
    """Sums the HBM bytes (memory space 0) of a buffer assignment: parameters, temporaries and separate outputs."""
    arguments = temporaries = outputs = 0
    for size, color, rest in _ALLOCATION.findall(buffer_assignment):
        if (color and color != "0") or "thread-local" in rest:
            continue
        if "parameter" in rest:
            arguments += int(size)
        elif "maybe-live-out" in rest or "output shape" in rest:
            outputs += int(size)
        else:
            temporaries += int(size)
    return Memory(arguments=arguments, temporaries=temporaries, outputs=outputs)


def available_bytes(message: str) -> int | None:
    """Returns the HBM bytes available to a program, as the compiler's error message says; None if it does not."""
    match = _OUT_OF_MEMORY.search(message)
    if match is None:
        return None
    number, unit = (match[1], match[2]) if match[1] else (match[5], match[6])
    return round(parse_bytes(f"{number}{unit}iB"))


def _last_words(status: int, log: str) -> str:
    exit_text = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    lines = [line for line in log.splitlines() if line.strip()]
    return f"{exit_text}: {lines[-1].strip()[:300]}" if lines else exit_text


def python_program(module: str) -> tuple[str, ...]:
    """Returns the command that runs a module with this Python."""
    return sys.executable, "-m", module
