"""`meshwright launch`: one verb in several processes on this machine, which live and die together."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO

import click

from meshwright.cli.output import say
from meshwright.core.errors import InputError
from meshwright.parallel.process_env import COORDINATOR, PROCESS, PROCESSES

GRACE_S = 5.0
"""After one process failed the others may end by themselves for this long: often they fail for the same reason."""
POLL_S = 0.05
ERROR = "meshwright: "
"""How the line begins in which a verb says why it ends."""
_DEVICES_FLAG = "--xla_force_host_platform_device_count"
_NOISE = ("[Gloo] Rank", "peer ranks")
"""Each new group of devices makes every device of a process say so on standard output, several at once."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--processes", required=True, type=click.IntRange(1, 1024), help="How many processes.")
@click.option(
    "--devices",
    type=click.IntRange(1, 1024),
    help="Devices of each: emulated ones, or this many accelerators of the machine; a plan for cpu:N needs none.",
)
@click.argument("verb", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- VERB ...")
def command(processes: int, devices: int | None, verb: tuple[str, ...]) -> None:
    """Run a verb in several processes on this machine: launch --processes 4 -- train plan.toml.

    Standard output is that of process 0; all else comes on standard error behind the number of its process, an error
    that several have in common once. When one process fails the others are stopped, and the exit code is that of the
    first that failed.
    """
    if verb[0] == "launch":
        raise InputError("launch cannot start itself. Write: launch --processes 4 -- train plan.toml.")
    start = [sys.executable, "-c", "from meshwright.cli.main import main; main()", *verb]
    code = launch(start, processes=processes, devices=devices)
    if code:
        sys.exit(code)


def launch(program: Sequence[str], *, processes: int, devices: int | None = None) -> int:
    """Run a program in several processes. The exit code: 0, that of the first that failed, or 128 + the signal that
    killed it."""
    port = free_port()
    children: list[subprocess.Popen[bytes]] = []
    with _signals_to(children):
        for index in range(processes):
            children.append(_start(program, index, processes, port=port, devices=devices))
        once = _Once()
        pumps = [pump for index, child in enumerate(children) for pump in _pumps(index, child, once)]
        code = _wait(children)
    for pump in pumps:
        pump.join()
    return code


def _start(
    program: Sequence[str], index: int, processes: int, *, port: int, devices: int | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        program,
        env=child_environment(dict(os.environ), index, processes, port=port, devices=devices),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A terminal's Ctrl-C would reach them twice: they get it from here.
        start_new_session=True,
    )


def child_environment(
    env: dict[str, str], index: int, processes: int, *, port: int, devices: int | None
) -> dict[str, str]:
    """Variables of one process: who it is, where process 0 listens (on loopback only), and its devices."""
    flags = re.sub(rf"{_DEVICES_FLAG}=\d+", "", env.get("XLA_FLAGS", ""))
    env.pop("JAX_NUM_CPU_DEVICES", None)
    if devices is not None:
        flags += f" {_DEVICES_FLAG}={devices}"
        env["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(index * devices + i) for i in range(devices))
    address = f"127.0.0.1:{port}"
    own = {COORDINATOR: address, PROCESSES: str(processes), PROCESS: str(index)}
    # Not through a file: a pipe would hold the lines back until it is full.
    return env | own | {"JAX_COORDINATOR_BIND_ADDRESS": address, "XLA_FLAGS": flags.strip(), "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """A port of this machine that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class _Once:
    """Lines that say why a verb ends, each let through once: processes that do the same often fail alike."""

    def __init__(self) -> None:
        self._lock, self._said = threading.Lock(), set[str]()

    def lets(self, line: str) -> bool:
        """Whether the line is to be shown."""
        if not line.startswith(ERROR):
            return True
        with self._lock:
            known = line in self._said
            self._said.add(line)
        return not known


def _pumps(index: int, child: subprocess.Popen[bytes], once: _Once) -> list[threading.Thread]:
    """Threads that pass on what a process prints, line by line."""
    assert child.stdout is not None
    assert child.stderr is not None
    out: Callable[[str], None] = click.echo if index == 0 else _prefixed(index)
    threads = [
        threading.Thread(target=_pass_on, args=(child.stdout, out, once), daemon=True),
        threading.Thread(target=_pass_on, args=(child.stderr, _prefixed(index), once), daemon=True),
    ]
    for thread in threads:
        thread.start()
    return threads


def _prefixed(index: int) -> Callable[[str], None]:
    return lambda line: say(f"[{index}] {line}")


def _pass_on(source: IO[bytes], show: Callable[[str], None], once: _Once) -> None:
    with source:
        for line in without_noise(line.decode(errors="replace").rstrip("\n") for line in source):
            if once.lets(line):
                show(line)


def without_noise(lines: Iterable[str]) -> Iterator[str]:
    """The lines without what Gloo says of its connections, also where two of its lines are cut into each other."""
    after_noise = False
    for line in lines:
        # What is left of the second of two lines that were written at once: the end of one, a number or nothing.
        rest = after_noise and not line.strip(" 0123456789")
        after_noise = rest or any(noise in line for noise in _NOISE)
        if not after_noise:
            yield line


@contextmanager
def _signals_to(children: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to every process; a second one kills them."""
    seen = False

    def forward(signum: int, frame: FrameType | None) -> None:
        nonlocal seen
        _signal(children, signal.SIGKILL if seen else signal.Signals(signum))
        seen = True

    before = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all have ended; after the first failure the others have `GRACE_S`, then they are killed."""
    first: int | None = None
    deadline = 0.0
    while any(child.poll() is None for child in children):
        failed = [i for i, child in enumerate(children) if child.poll()]
        if failed and first is None:
            first, deadline = failed[0], time.monotonic() + GRACE_S
        if first is not None and time.monotonic() > deadline:
            say(f"process {first} {_ending(children[first].returncode)}; the others are stopped")
            _signal(children, signal.SIGKILL)
            for child in children:
                child.wait()
        time.sleep(POLL_S)
    codes = [child.returncode for child in children]
    if first is None:
        first = next((i for i, code in enumerate(codes) if code), None)
    if first is None:
        return 0
    return codes[first] if codes[first] > 0 else 128 - codes[first]


def _signal(children: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _ending(code: int) -> str:
    return f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
