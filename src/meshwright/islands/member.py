"""One process as a member: its control connection to the membership service, and its links to other islands."""

import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from meshwright.core.errors import CannotRunError, InputError, StoppedError
from meshwright.islands import messages
from meshwright.islands.exchange import Links, Listener, LostIslandsError, Timeouts, WorldChangedError

SERVICE, ISLANDS, ISLAND, KEY = "MESHWRIGHT_SERVICE", "MESHWRIGHT_ISLANDS", "MESHWRIGHT_ISLAND", "MESHWRIGHT_KEY"
BEAT_EVERY_S = 0.3
RECONNECT_S, STOP_S, PATIENCE_S = 0.1, 2.0, 5.0
SILENT_MS = 3000


class OutError(Exception):
    """This process was dropped from the world. It may join again, but its state is void."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The island of this process, the number of islands, the membership service's HOST:PORT and the run's key."""

    service: str
    island: int
    count: int
    key: str = ""


def find_identity(env: Mapping[str, str] = os.environ) -> Identity | None:
    """Reads the variables of `launch --elastic` or a job script; None without islands. Raises InputError if invalid."""
    if SERVICE not in env:
        return None
    for name in (ISLANDS, ISLAND):
        if not env.get(name, "").isdecimal():
            raise InputError(
                f"{SERVICE} is set and {name}={env.get(name, '')!r} is not a whole number. Set {ISLANDS} to their "
                f"number and {ISLAND} to this one's, from 0."
            )
    if ":" not in env[SERVICE]:
        raise InputError(f"{SERVICE}={env[SERVICE]!r} is not HOST:PORT. Give the address of the membership service.")
    return Identity(service=env[SERVICE], island=int(env[ISLAND]), count=int(env[ISLANDS]), key=env.get(KEY, ""))


class Member:
    """A process that joins worlds. A thread talks to the service; `links` are the connections of the present world."""

    def __init__(
        self,
        identity: Identity,
        *,
        process: int = 0,
        processes: int = 1,
        settings: Mapping[str, str],
        timeouts: Timeouts | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.identity, self.timeouts, self._say = identity, timeouts or Timeouts(), say
        self.asks_stop: Callable[[], bool] = lambda: False
        self._processes, self._settings = processes, dict(settings)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._control = self._reach()
        self._listener = Listener(self._control.getsockname()[0], key=identity.key)
        self.place = messages.IslandProcess(identity.island, process, self._listener.address, uuid.uuid4().hex[:8])
        self.step = self._settled = 0
        self.links: Links | None = None
        self._world: messages.World | None = None  # the newest world with this process
        self._refused, self._out, self._is_ready, self._ended = "", "", False, False
        self._heard_at = time.monotonic()
        threading.Thread(target=self._speak, name="islands-member", daemon=True).start()

    # -- what a run calls --------------------------------------------------------------------------------

    def ready(self) -> None:
        """Tells the service that this process can train from the next step boundary on."""
        with self._changed:
            self._is_ready, self._out = True, ""
        self._tell(messages.IsReady())

    @property
    def newest(self) -> int:
        """The generation of the newest world with this process, 0 before the first."""
        return self._world.generation if self._world else 0

    def join(self) -> Links:
        """Waits for a world newer than that of `links`, connects to it, returns its links. Raises OutError if dropped,
        CannotRunError if refused or after `Timeouts.start_s`, StoppedError if stopped.
        """
        after = 0
        if self.links:
            after = self.links.world.generation
            self.links.close()
        end = time.monotonic() + self.timeouts.start_s
        while True:
            world = self._next_world(after, end)
            links = Links(world, self.place, self._listener, self.timeouts, key=self.identity.key)
            with self._changed:
                self.links = links
                if self.newest != world.generation:  # a newer one came meanwhile
                    continue
            try:
                links.connect()
                return links
            except WorldChangedError:
                pass
            except LostIslandsError as error:
                self.lost(error)
            links.close()
            after = world.generation

    def lost(self, error: LostIslandsError) -> None:
        """Reports a failed exchange to the service; call `join` next."""
        if self.links:
            self._tell(messages.Lost(self.links.world.generation, error.islands, error.late))

    def settled(self) -> None:
        """Tells the service that this process trains in the present world; new islands wait until all members do."""
        if self.links:
            self._settled = self.links.world.generation
        self._tell(messages.Beat(self.step, self._settled))

    def note_run(self, run: str) -> None:
        """Tells the service the run's folder, for islands that join later."""
        self._tell(messages.Note(run))

    def leave(self) -> None:
        """Ends the membership after the last step, and closes all connections."""
        self._ended = True
        self._tell(messages.Leave())
        if self.links:
            self.links.close()
        self._listener.close()

    # -- the thread -----------------------------------------------------------------------------------

    def _next_world(self, after: int, end: float) -> messages.World:
        stops_at, told_at = time.monotonic() + STOP_S, time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                if self.asks_stop() and time.monotonic() > stops_at:
                    raise StoppedError("stopped while it waited for other islands.")
                if time.monotonic() > told_at:
                    self._say(f"island {self.place.island} waits for other islands at {self.identity.service}")
                    told_at = end
                if self._refused:
                    raise CannotRunError(
                        f"island {self.place.island} may not join: {self._refused}. Start all islands alike."
                    )
                if self._out:
                    raise OutError(self._out)
                if self._world and self._world.generation > after:
                    return self._world
                if time.monotonic() > end:
                    raise CannotRunError(
                        f"island {self.place.island} has waited {self.timeouts.start_s:g} s for other islands at the "
                        f"membership service {self.identity.service}. See whether it and they run and can be reached."
                    )
                self._changed.wait(0.2)

    def _abort(self) -> None:
        with self._changed:
            links = self.links
        if links:
            links.abort()

    def _reach(self) -> socket.socket:
        told_at, end = time.monotonic() + PATIENCE_S, time.monotonic() + self.timeouts.start_s
        while True:
            try:
                return self._connection()
            except (OSError, ValueError) as error:
                if time.monotonic() > end:
                    raise CannotRunError(
                        f"no membership service answers at {self.identity.service} ({error}). Start it, or correct "
                        f"{SERVICE}."
                    ) from None
                if time.monotonic() > told_at:
                    told_at = end
                    self._say(f"no membership service answers at {self.identity.service} yet ({error})")
                time.sleep(RECONNECT_S)

    def _connection(self) -> socket.socket:
        connection = socket.create_connection(messages.host_and_port(self.identity.service), 2.0)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a broken network sends no error
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
        return connection

    def _tell(self, message: messages.MemberMessage) -> None:
        with self._sending, suppress(OSError):
            messages.send(self._control, message)

    def _speak(self) -> None:
        while not self._ended:
            with suppress(OSError, ValueError):
                self._present()
                self._listen()
            if self._ended or self._refused:
                return
            time.sleep(RECONNECT_S)
            with suppress(OSError):
                self._control.close()
                self._control = self._connection()

    def _present(self) -> None:
        with self._changed:
            world, is_ready = self._world, self._is_ready
        join = messages.Join(
            place=self.place, processes=self._processes, settings=self._settings, key=self.identity.key, world=world
        )
        self._tell(join)
        if is_ready:
            self._tell(messages.IsReady())

    def _listen(self) -> None:
        """Sends heartbeats and handles messages of the service until the connection ends."""
        beat_at = 0.0
        while not self._ended:
            if time.monotonic() - beat_at >= BEAT_EVERY_S:
                with self._sending:
                    messages.send(self._control, messages.Beat(self.step, self._settled))
                beat_at = time.monotonic()
            if not select.select([self._control], [], [], BEAT_EVERY_S)[0]:
                continue
            message = messages.receive(self._control, 5.0)
            with self._changed:
                if isinstance(message, messages.World):
                    is_newer = message.generation > self.newest
                    self._world = message if message.generation >= self.newest else self._world
                elif isinstance(message, messages.Refused):
                    self._refused = message.reason
                elif isinstance(message, messages.Dropped):
                    self._out, self._world, self._is_ready, self._settled = message.reason, None, False, 0
                    self.place = msgspec.structs.replace(self.place, start=uuid.uuid4().hex[:8])
                self._changed.notify_all()
            if isinstance(message, messages.Refused | messages.Dropped):
                self._abort()
                raise ConnectionError  # join again, as a new start of the process
            if isinstance(message, messages.World) and message.urgent and is_newer:
                self._abort()
