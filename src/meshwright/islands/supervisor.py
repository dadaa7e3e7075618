"""Runs islands and their membership service on one machine, and restarts processes that end or hang."""

import asyncio
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

import msgspec

from meshwright.core.errors import EX_TEMPFAIL
from meshwright.islands.member import ISLAND, ISLANDS, KEY, SERVICE
from meshwright.islands.messages import Event, Watch, packed, read
from meshwright.islands.service import Bounds

MOST_STARTS = 10
"""An island is given up after this many starts in a row that each ended within `GOOD_S` seconds."""
GOOD_S = 60.0
FIRST_DELAY_S, MOST_DELAY_S = 0.2, 30.0
HUNG_S = 8.0
"""An island that was dropped and does not rejoin within this time is killed."""
SILENT_S = 3.0
ENDING_S = 15.0
LONGEST_LINE = 1 << 30
_WRONG = (2, 3)
"""Exit codes of InputError and CannotRunError, after which a restart would not help."""

Pass = Callable[[int, int, bytes, bool], None]
"""Called with island, process, a line of output, and True if it is from standard output, False from error."""


class Programs(msgspec.Struct, frozen=True, kw_only=True):
    """Commands of an island and of the service; ``environment(process, port)`` are a process's variables."""

    island: Sequence[str]
    service: Sequence[str]
    environment: Callable[[int, int], Mapping[str, str]]
    processes: int = 1


@dataclass
class _Kept:
    """The state of a supervised island: its processes, and its short-lived starts in a row."""

    number: int
    children: list[Process] = field(default_factory=list)
    starts: int = 0
    status: int | None = None
    out_since: float = 0.0
    began: float = 0.0


class Supervisor:
    """Runs islands until one has finished the run; calls ``say`` with a line per event, ``show`` per output line."""

    def __init__(
        self, programs: Programs, bounds: Bounds, *, islands: int, key: str, say: Callable[[str], None], show: Pass
    ) -> None:
        self.programs, self.bounds, self.key, self._say, self._show = programs, bounds, key, say, show
        self.islands = [_Kept(number) for number in range(islands)]
        self.service: Process | None = None
        self.port = free_port()
        self._received: list[int] = []
        self._is_over = False
        self._present: set[int] = set()  # islands that train, by the service's last event
        self._run = ""
        self._heard_at = time.monotonic()

    async def run(self) -> int:
        """Runs to the end; returns 75 if an island was stopped, else 0 if one finished, else the least exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._forward, number)
        keepers = [asyncio.create_task(self._keep_service()), asyncio.create_task(self._watch())]
        tasks = {asyncio.create_task(self._keep(island)) for island in self.islands}
        try:
            while tasks and not any(island.status in (0, EX_TEMPFAIL) for island in self.islands):
                _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._is_over = True
            self._send(signal.SIGKILL, {island.number for island in self.islands} - self._present)  # spares
            if tasks:
                await asyncio.wait(tasks, timeout=None if self._received else ENDING_S)
        finally:
            for keeper in [*keepers, *tasks]:
                keeper.cancel()
            await asyncio.gather(*keepers, *tasks, return_exceptions=True)
            self._send(signal.SIGKILL)
            if self.service and self.service.returncode is None:
                self.service.kill()
                await self.service.wait()
        statuses = [island.status for island in self.islands if island.status is not None]
        return next((status for status in (EX_TEMPFAIL, 0) if status in statuses), min(statuses, default=1))

    # -- islands ------------------------------------------------------------------------------------------

    async def _keep(self, island: _Kept) -> None:
        while True:
            began = time.monotonic()
            status = await self._live(island)
            island.starts = 0 if time.monotonic() - began > GOOD_S else island.starts + 1
            ending = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
            if self._is_over and status < 0:  # a spare
                return
            if status in (0, *_WRONG) or self._received:
                island.status = status if status >= 0 else 128 - status
                return
            if island.starts >= MOST_STARTS:
                self._say(f"island {island.number} {ending}, for the {MOST_STARTS}th time; it is not restarted")
                island.status = status if status > 0 else 128 - status
                return
            delay_s = min(MOST_DELAY_S, FIRST_DELAY_S * 2**island.starts)
            self._say(f"island {island.number} {ending}; it restarts in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)

    async def _live(self, island: _Kept) -> int:
        """Runs an island; if a process fails, kills the rest. Returns the first failure's exit code, else 0."""
        island.children, island.out_since, island.began = [], 0.0, time.monotonic()
        port = free_port()
        for process in range(self.programs.processes):
            own = {SERVICE: f"127.0.0.1:{self.port}", KEY: self.key, ISLAND: str(island.number)}
            own |= {ISLANDS: str(self.bounds.count)}
            env = {**self.programs.environment(process, port), **own}
            child = await asyncio.create_subprocess_exec(
                *self.programs.island,
                env=env,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                limit=LONGEST_LINE,
                start_new_session=True,
            )
            island.children.append(child)
        pumps = [
            asyncio.create_task(self._pump(island.number, process, stream, is_output))
            for process, child in enumerate(island.children)
            for stream, is_output in ((child.stdout, True), (child.stderr, False))
        ]
        waiting = {asyncio.create_task(child.wait()) for child in island.children}
        status = 0
        try:
            while waiting and not status:
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                status = next((task.result() for task in ended if task.result()), 0)
        finally:
            if status and waiting and status in (*_WRONG, EX_TEMPFAIL):
                await asyncio.wait(waiting, timeout=5)
            for child in island.children:
                with suppress(ProcessLookupError):
                    child.kill()
        await asyncio.wait(pumps, timeout=5)
        return status

    async def _pump(self, island: int, process: int, stream: asyncio.StreamReader | None, is_output: bool) -> None:
        assert stream is not None
        async for line in stream:
            self._show(island, process, line, is_output)

    def _forward(self, number: int) -> None:
        self._send(signal.SIGKILL if self._received else number)
        self._received.append(number)

    def _send(self, number: int, islands: Collection[int] | None = None) -> None:
        for island in self.islands:
            for child in island.children if islands is None or island.number in islands else ():
                with suppress(ProcessLookupError):
                    child.send_signal(number)

    # -- the service ---------------------------------------------------------------------------------------

    async def _keep_service(self) -> None:
        is_restarted = False
        while True:
            bounds = msgspec.structs.replace(self.bounds, restarted=is_restarted, run=self._run)
            words = [*self.programs.service, f"127.0.0.1:{self.port}", msgspec.json.encode(bounds).decode(), "quiet"]
            env = {**self.programs.environment(0, 0), KEY: self.key}
            self.service = await asyncio.create_subprocess_exec(*words, env=env, stdin=DEVNULL, start_new_session=True)
            self._heard_at = time.monotonic()
            await self.service.wait()
            self._say("the membership service ended; it restarts")
            is_restarted = True
            await asyncio.sleep(FIRST_DELAY_S)

    async def _watch(self) -> None:
        """Shows the service's lines; kills the service if silent, and dropped islands that do not rejoin."""
        while True:
            with suppress(OSError, ValueError, asyncio.IncompleteReadError, TimeoutError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                with closing(writer):
                    writer.write(packed(Watch(self.key)))
                    while True:
                        event = await asyncio.wait_for(read(reader), SILENT_S)
                        self._heard_at = time.monotonic()
                        if isinstance(event, Event):
                            self._heed(event)
            if self.service and time.monotonic() - self._heard_at > 2 * SILENT_S:
                self._say(f"the membership service has been silent for {2 * SILENT_S:g} s")
                with suppress(ProcessLookupError):
                    self.service.kill()
            await asyncio.sleep(FIRST_DELAY_S)

    def _heed(self, event: Event) -> None:
        now = time.monotonic()
        if event.line:
            self._say(event.line)
        self._present, self._run = {*event.present}, event.run
        for island in self.islands:
            is_of_earlier_start = now - island.began < 2 * self.bounds.beat_s
            if island.number in event.dropped and not is_of_earlier_start:
                island.out_since = island.out_since or now
            if island.number in event.present:
                island.out_since = 0.0
            if island.out_since and now - island.out_since > HUNG_S:
                island.out_since = 0.0
                if any(child.returncode is None for child in island.children):
                    self._say(f"island {island.number} has not rejoined in {HUNG_S:g} s and is killed")
                for child in island.children:
                    with suppress(ProcessLookupError):
                        child.kill()


def service_program() -> list[str]:
    """Returns the command of a membership service, without its arguments (address and bounds)."""
    return [sys.executable, "-m", "meshwright.islands"]


def free_port() -> int:
    """Returns a port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
