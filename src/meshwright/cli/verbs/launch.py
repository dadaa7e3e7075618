"""`meshwright launch`: one verb in several processes on this machine, which live and die together."""

import asyncio
import ctypes
import os
import re
import secrets
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress

import click

from meshwright.cli.output import say
from meshwright.cli.verb import Options, argument, option, verb
from meshwright.core.errors import EX_TEMPFAIL, InputError
from meshwright.islands.service import Bounds
from meshwright.islands.supervisor import Programs, Supervisor, free_port, service_program
from meshwright.parallel.process_env import COORDINATOR, PROCESS, PROCESSES
from meshwright.report.answer import Facts

GRACE_S = 5.0
"""Seconds that other processes have to end by themselves after one failed, often for the same reason."""
LONGEST_LINE = 1 << 30
"""Most bytes of a line of output: a JSON object is one line."""
ERROR = "meshwright: "
"""Beginning of a verb's line of error."""
PR_SET_PDEATHSIG = 1
_DEVICES_FLAG = "--xla_force_host_platform_device_count"
_NOISE = ("[Gloo] Rank", "peer ranks")
"""Parts of the lines that Gloo prints on standard output for every device of a new group."""
OF_ISLANDS: Facts = {"type": click.IntRange(1, 1024), "needs": {"elastic": "--elastic"}, "group": "Islands"}


class Given(Options, group="Processes"):
    processes: int = option("How many processes.", "-n", "--processes", type=click.IntRange(1, 1024))
    devices: int | None = option(
        "Devices of each process: emulated, or accelerators of the machine; a plan for cpu:N needs no number.",
        type=click.IntRange(1, 1024),
    )
    elastic: bool = option("Train as islands, which may fail and rejoin while the others train on.", group="Islands")
    islands: int | None = option("Islands of equal size. Default: one per process.", **OF_ISLANDS)
    least: int = option("Fewest islands that train; fewer wait.", "--min", default=1, **OF_ISLANDS)
    most: int | None = option("Most islands that train; the others are spares.", "--max", **OF_ISLANDS)
    verb: tuple[str, ...] = argument(type=click.UNPROCESSED, required=True, metavar="-- VERB ...")


@verb(Given, passes_on=True)
def command(given: Given) -> None:
    """Run a verb in several processes on this machine: launch --processes 4 -- train plan.toml.

    Standard output is the output of process 0. Other output goes to standard error, each line after the number of its
    process; an error of several processes is printed once. When a process fails, the others are stopped, and the exit
    code is the one of the first that failed.

    With --elastic the processes train as islands, each with its own JAX runtime: launch -n 4 --elastic -- train
    plan.toml. An island that dies, hangs or is cut off is restarted; meanwhile the others train on its samples, and it
    receives their state.
    """
    if given.verb[0] == "launch":
        raise InputError("launch cannot start itself. Write: launch --processes 4 -- train plan.toml.")
    program = [sys.executable, "-c", child_program(), *given.verb]
    if given.elastic:
        exit_code = launch_islands(program, given)
    else:
        exit_code = launch(program, processes=given.processes, devices=given.devices)
    if exit_code:
        sys.exit(exit_code)


def launch(program: Sequence[str], *, processes: int, devices: int | None = None) -> int:
    """Runs a program in several processes and returns an exit code: 0; that of the first process that failed, or 128 +
    the signal that killed it; 75 if the processes stopped on request; 128 + the signal after a second signal."""
    return asyncio.run(_launch(program, processes, devices))


def launch_islands(program: Sequence[str], given: Given) -> int:
    """Runs a program as islands, which are restarted when they end early. Returns the exit code of the run.

    Raises InputError if the processes do not divide into the islands, or --min is above the islands that train."""
    count = given.islands or given.processes
    most = min(count, given.most or count)
    if given.processes % count or given.least > most:
        raise InputError(
            f"{given.processes} processes do not form {count} islands of one size, of which {given.least} to {most} "
            f"train. Give a number of islands that divides the processes, and --min not above it or --max."
        )
    own = given.processes // count
    shown_errors: set[str] = set()
    is_noise = noise_filter()

    def environment(process: int, port: int) -> dict[str, str]:
        return child_environment(dict(os.environ), process, own, port=port, devices=given.devices)

    def show(island: int, process: int, raw_line: bytes, is_output: bool) -> None:
        line = raw_line.decode(errors="replace").rstrip("\n")
        if is_noise(line) or line in shown_errors:
            return
        if line.startswith(ERROR):
            shown_errors.add(line)
        name = f"{island}.{process}" if own > 1 else f"{island}"
        click.echo(line) if is_output and not process else say(f"[{name}] {line}")

    programs = Programs(island=program, service=service_program(), environment=environment, processes=own)
    bounds = Bounds(count=most, least=given.least)
    return asyncio.run(Supervisor(programs, bounds, islands=count, key=secrets.token_hex(8), say=say, show=show).run())


async def _launch(program: Sequence[str], processes: int, devices: int | None) -> int:
    children: list[Process] = []
    received_signals = _pass_on_signals(children)
    port = free_port()
    for index in range(processes):
        env = child_environment(dict(os.environ), index, processes, port=port, devices=devices)
        child = await asyncio.create_subprocess_exec(
            *program,
            env=env,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            limit=LONGEST_LINE,
            # In the terminal's session Ctrl-C would reach the processes twice: `_pass_on_signals` passes it on.
            start_new_session=True,
        )
        children.append(child)
    killed_indices: list[int] = []
    end_task = asyncio.create_task(_end(children, killed_indices))
    shown_errors: set[str] = set()
    pumps = []
    for index, child in enumerate(children):
        say_numbered = _numbered(index, killed_indices)
        pumps += [_pass_on(child.stdout, say_numbered if index else click.echo, shown_errors)]
        pumps += [_pass_on(child.stderr, say_numbered, shown_errors)]
    await asyncio.gather(*pumps)
    exit_code = await end_task
    return exit_code if len(received_signals) < 2 else 128 + received_signals[1]


def child_program() -> str:
    """Returns the Python program of a process: it runs a verb and ends when the launching process is killed."""
    preamble = f"from meshwright.cli.verbs.launch import end_with_parent; end_with_parent({os.getpid()})"
    return f"{preamble}; from meshwright.cli.main import main; main()"


def end_with_parent(parent: int) -> None:
    """Asks Linux to send this process SIGTERM, on which a run writes a checkpoint, when process ``parent`` ends."""
    with suppress(OSError, AttributeError):  # other systems have no such call
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def child_environment(
    env: dict[str, str], index: int, processes: int, *, port: int, devices: int | None
) -> dict[str, str]:
    """Returns the environment ``env`` with the number of a process, process 0's address (loopback), and devices."""
    flags = re.sub(rf"{_DEVICES_FLAG}=\d+", "", env.get("XLA_FLAGS", ""))
    env.pop("JAX_NUM_CPU_DEVICES", None)
    if devices is not None:
        flags += f" {_DEVICES_FLAG}={devices}"
        env["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(index * devices + i) for i in range(devices))
    address = f"127.0.0.1:{port}"
    group = {COORDINATOR: address, PROCESSES: str(processes), PROCESS: str(index)}
    # Unbuffered: Python would otherwise write to the pipe only when its buffer is full.
    return env | group | {"JAX_COORDINATOR_BIND_ADDRESS": address, "XLA_FLAGS": flags.strip(), "PYTHONUNBUFFERED": "1"}


def _pass_on_signals(children: Sequence[Process]) -> Sequence[signal.Signals]:
    """Passes Ctrl-C and SIGTERM on to every process; a second one kills them. Returns the list that signals enter."""
    received_signals: list[signal.Signals] = []

    def forward(signal_number: signal.Signals) -> None:
        _send(children, signal.SIGKILL if received_signals else signal_number)
        received_signals.append(signal_number)

    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, forward, signal_number)
    return received_signals


def _send(children: Sequence[Process], signal_number: signal.Signals) -> None:
    for child in children:
        if child.returncode is None:
            child.send_signal(signal_number)


def _numbered(process_index: int, lost_indices: Sequence[int]) -> Callable[[str], None]:
    """Returns a printer of lines after the process's number; once processes were killed, only their lines."""
    return lambda line: say(f"[{process_index}] {line}") if process_index in lost_indices or not lost_indices else None


async def _pass_on(source: asyncio.StreamReader | None, show: Callable[[str], None], shown_errors: set[str]) -> None:
    """Calls ``show`` with each line of a process, except Gloo's and errors that another process has shown."""
    assert source is not None
    is_noise = noise_filter()
    async for raw_line in source:
        line = raw_line.decode(errors="replace").rstrip("\n")
        if not is_noise(line) and line not in shown_errors:
            show(line)
            if line.startswith(ERROR):
                shown_errors.add(line)


def noise_filter() -> Callable[[str], bool]:
    """Returns a predicate, True for Gloo's lines; it needs all lines in order, since two may be written at once."""
    after_noise = False

    def is_noise(line: str) -> bool:
        nonlocal after_noise
        # After two lines that were written at once, the rest of the second is a number or nothing.
        is_rest = after_noise and not line.strip(" 0123456789")
        after_noise = is_rest or any(noise in line for noise in _NOISE)
        return after_noise

    return is_noise


async def _end(children: Sequence[Process], lost: list[int]) -> int:
    """Waits for all processes and returns the exit code; after a first failure kills the others that are there after
    `GRACE_S`. Adds the index of a process that a signal killed to ``lost``."""
    index_by_task = {asyncio.create_task(child.wait()): index for index, child in enumerate(children)}
    failed: list[int] = []
    while index_by_task and not failed:
        ended, _ = await asyncio.wait(index_by_task, return_when=asyncio.FIRST_COMPLETED)
        failed = sorted(i for i in map(index_by_task.pop, ended) if children[i].returncode not in (0, EX_TEMPFAIL))
    if not failed:
        return max(child.returncode or 0 for child in children)
    status = children[failed[0]].returncode or 0
    ending = f"ended with exit code {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
    if status < 0 and index_by_task:
        lost += failed
        say(f"process {failed[0]} {ending}; the others are stopped")
    if index_by_task and (await asyncio.wait(index_by_task, timeout=GRACE_S))[1]:
        if status > 0:
            say(f"process {failed[0]} {ending}; the others are stopped")
        _send(children, signal.SIGKILL)
        await asyncio.wait(index_by_task)
    return status if status > 0 else 128 - status
