"""Compiles a request in a child process with a time limit, so that a crash of the compiler does not end the caller.

Compilers dump the optimised program and the buffer assignment before they generate code. Code generation takes most of
the time and changes neither, so depth "partition" kills the process once both files are complete.
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
from meshwright.core.progress import working
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
    buffers were assigned (enough for the partition depth); "error" with the compiler's ``message``; "crash" with its
    last line of output; "timeout". ``memory`` is the buffer assignment, ``out_of_memory`` the compiler's message about
    a program that is too large. ``program`` is the HLO before optimisation, ``hlo`` after it. ``remarks`` are the
    partitioner's messages about arrays that it replicated. ``compiler`` lists the compiler options in use. ``cpu_s``
    and ``max_rss_bytes`` count the compiling process only.
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
    """Compiles a request by the command ``program``, to which the request's folder is appended as last argument.

    The process is killed after ``timeout_s``. ``keep`` is the folder that keeps the compiler's files; without it they
    are deleted. Raises InputError if ``keep`` cannot be written or has other files than an earlier compilation's.
    """
    if keep is not None:
        _take_folder(keep)
        return _run(request, keep, program, timeout_s)
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        return _run(request, Path(folder), program, timeout_s)


def _take_folder(folder: Path) -> None:
    """Creates a folder, or deletes an earlier compilation's files from it. Raises InputError if it has other files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / REQUEST).is_file():
            raise InputError(f"{folder} has other files, which could be lost. Name a new or an empty folder.")
        for file_name in (LOWERED, MEMORY, MODULE, OPTIONS, ERROR):
            (folder / file_name).unlink(missing_ok=True)
        for old_file in (folder / DUMP).glob("*"):
            if old_file.is_file():
                old_file.unlink()
        (folder / REQUEST).touch()
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}. Name a folder that can be.") from None


def _run(request: Request, folder: Path, program: Sequence[str], timeout_s: float) -> CompileOutcome:
    dump_folder = folder / DUMP
    (folder / REQUEST).write_bytes(msgspec.json.encode(request))
    log_path = folder / "compiler.log"
    start_s = time.monotonic()
    with log_path.open("wb") as log_file, working(f"compiling the {request.step} step"):
        process = subprocess.Popen(
            [*program, str(folder)],
            stdout=log_file,
            stderr=log_file,
            env=_environment(request, dump_folder),
            start_new_session=True,
        )
        dumps_to_watch = dump_folder if request.target.platform != "cpu" and request.depth == "partition" else None
        try:
            end_kind, exit_status, usage, peak_kb = _wait(process, start_s + timeout_s, dumps_to_watch)
        except BaseException:
            # the process runs in a session of its own, which Ctrl-C does not reach
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    log_text = log_path.read_text(errors="replace")
    # Linux starts a program's ru_maxrss at the peak of the process that started it: up to there it says nothing.
    is_inherited_peak = usage.ru_maxrss <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    costs = {
        "wall_s": time.monotonic() - start_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "max_rss_bytes": (peak_kb if is_inherited_peak and peak_kb else usage.ru_maxrss) * 1024,
    }
    return _outcome(folder, end_kind, exit_status, log_text, costs, on_cpu=request.target.platform == "cpu")


def _environment(request: Request, dump_folder: Path) -> dict[str, str]:
    parent_env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    # A program from JAX's cache would not be compiled, and nothing dumped.
    variables = {**parent_env, **request.target.environment, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if request.depth == "lower":
        variables["JAX_PLATFORMS"] = "cpu"
        variables.pop("XLA_FLAGS", None)
    else:
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} {FLAGS.format(folder=dump_folder)}".strip()
    return variables


def _wait(
    process: "subprocess.Popen[bytes]", deadline_s: float, dump_folder: Path | None
) -> tuple[str, int, resource.struct_rusage, int]:
    """Waits for a process, and kills it at the deadline, or once the compiler's dump is complete.

    Returns "exit", "timeout" or "stopped", the exit status, the resource usage, and the last peak memory seen in KiB
    (0: none)."""
    file_sizes: tuple[int, ...] = ()
    num_steady_polls = 0
    peak_kb = 0
    end_kind = "exit"
    while True:
        peak_kb = max(peak_kb, _peak_kb(process.pid))
        ended_pid, wait_status, resource_usage = os.wait4(process.pid, os.WNOHANG)
        if ended_pid:
            process.returncode = os.waitstatus_to_exitcode(wait_status)
            return end_kind, process.returncode, resource_usage, peak_kb
        if time.monotonic() > deadline_s and end_kind == "exit":
            end_kind = "timeout"
            os.killpg(process.pid, signal.SIGKILL)
        path_by_suffix = dump_files(dump_folder) if dump_folder is not None and end_kind == "exit" else None
        if path_by_suffix is not None:
            new_file_sizes = tuple(path.stat().st_size for path in path_by_suffix.values())
            num_steady_polls = num_steady_polls + 1 if new_file_sizes == file_sizes else 0
            file_sizes = new_file_sizes
            if num_steady_polls >= _STABLE_POLLS:
                end_kind = "stopped"
                os.killpg(process.pid, signal.SIGKILL)
        time.sleep(POLL_S)


def _peak_kb(pid: int) -> int:
    """Returns the peak memory of a running process in KiB; 0 if the operating system does not report it."""
    try:
        match = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) if match else 0


def _outcome(folder: Path, ending: str, code: int, log: str, costs: dict[str, Any], *, on_cpu: bool) -> CompileOutcome:
    memory, error_fields = _read(folder / MEMORY, Memory), _read(folder / ERROR, dict)
    dumps = None if on_cpu else dump_files(folder / DUMP)
    is_lowered, program = (folder / LOWERED).is_file(), read_program(folder / DUMP)
    # The partitioner reports that it replicated an array to reshard it.
    remarks = tuple(line.strip() for line in log.splitlines() if "nvoluntary full rematerialization" in line)
    options = _read(folder / OPTIONS, GivenOptions) or GivenOptions()
    make = partial(CompileOutcome, lowered=is_lowered, remarks=remarks, program=program, compiler=options, **costs)
    if dumps is not None:
        assigned_memory, hlo = read_memory(dumps[BUFFERS_END].read_text()), dumps[MODULE_END].read_text()
        if memory is not None and ending == "exit":
            # the compiler's own summary counts aliased buffers twice, the dumped assignment does not
            return make(ended="done", memory=msgspec.structs.replace(assigned_memory, peak=memory.peak), hlo=hlo)
        message = error_fields["message"] if error_fields else ""
        oom_text = message if "RESOURCE_EXHAUSTED" in message else ""
        if oom_text or (ending == "stopped" and not error_fields):
            return make(ended="stopped", memory=assigned_memory, out_of_memory=oom_text, hlo=hlo)
    if error_fields is not None:
        message_lines = error_fields["message"].strip().splitlines() or ["no message"]
        return make(ended="error", message=message_lines[0])
    if ending == "timeout":
        return make(ended="timeout", message=f"stopped after {costs['wall_s']:.0f} s")
    if code != 0:
        return make(ended="crash", message=_last_words(code, log))
    hlo = (folder / MODULE).read_text() if (folder / MODULE).is_file() else ""
    return make(ended="done", memory=memory, hlo=hlo)


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.is_file() else None


# -- what the compiler dumps --------------------------------------------------------------------------


def dump_files(folder: Path) -> dict[str, Path] | None:
    """Returns the step's dump files by suffix, the largest of each; None until each suffix has a non-empty file."""
    path_by_suffix = {}
    for suffix in _ENDS:
        paths = sorted(path for path in folder.glob(f"*.jit_*{suffix}") if path.stat().st_size)
        if not paths:
            return None
        # small modules, such as those of constants, come before the step and are smaller
        path_by_suffix[suffix] = max(paths, key=lambda path: path.stat().st_size)
    return path_by_suffix


def read_program(folder: Path) -> str:
    """Returns the step's HLO before optimisation, from the compiler's dump; empty if the dump has none."""
    paths = sorted(folder.glob(f"*.jit_*{PROGRAM_END}"), key=lambda path: path.stat().st_size)
    return paths[-1].read_text() if paths else ""


def read_memory(buffer_assignment: str) -> Memory:
    """Sums the HBM bytes (memory space 0) of a buffer assignment: parameters, temporaries and separate outputs."""
    argument_bytes = temporary_bytes = output_bytes = 0
    for size_text, color, attributes_text in _ALLOCATION.findall(buffer_assignment):
        if (color and color != "0") or "thread-local" in attributes_text:
            continue
        if "parameter" in attributes_text:
            argument_bytes += int(size_text)
        elif "maybe-live-out" in attributes_text or "output shape" in attributes_text:
            output_bytes += int(size_text)
        else:
            temporary_bytes += int(size_text)
    return Memory(arguments=argument_bytes, temporaries=temporary_bytes, outputs=output_bytes)


def available_bytes(message: str) -> int | None:
    """Returns the HBM bytes that a program may use, from the compiler's out-of-memory message; None if not stated."""
    match = _OUT_OF_MEMORY.search(message)
    if match is None:
        return None
    number_text, unit = (match[1], match[2]) if match[1] else (match[5], match[6])
    return round(parse_bytes(f"{number_text}{unit}iB"))


def _last_words(exit_status: int, log_text: str) -> str:
    exit_text = f"signal {signal.Signals(-exit_status).name}" if exit_status < 0 else f"exit status {exit_status}"
    log_lines = [line for line in log_text.splitlines() if line.strip()]
    return f"{exit_text}: {log_lines[-1].strip()[:300]}" if log_lines else exit_text


def python_program(module: str) -> tuple[str, ...]:
    """Returns the command that runs a module with this Python."""
    return sys.executable, "-m", module
