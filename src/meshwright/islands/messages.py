"""Messages between islands and the membership service: four bytes of length, then MessagePack."""

import asyncio
import socket
import struct

import msgspec

_LENGTH = struct.Struct("!I")
MOST_MESSAGE_BYTES = 1 << 24


class IslandProcess(msgspec.Struct, frozen=True):
    """One process of an island: both numbers, its listening address, and an id of this start of it."""

    island: int
    process: int
    address: str
    start: str


class World(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The islands that train together from this ``generation`` on, in the order in which their arrays are added.

    ``urgent``: exchanges in progress must end at once, as an island left or lost a connection. ``new`` islands have no
    state. ``run`` is the run's folder, "" before it exists. The ``leader`` decides, writes files and prints: the
    previous leader if still present, else the first island with a state.
    """

    generation: int
    islands: tuple[tuple[IslandProcess, ...], ...]
    urgent: bool = False
    new: tuple[int, ...] = ()
    run: str = ""
    leader: int = -1

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the islands, in the order of ``islands``."""
        return tuple(processes[0].island for processes in self.islands)

    def has(self, place: IslandProcess) -> bool:
        """True if this process, with the same start id, belongs to the world."""
        return any(place in processes for processes in self.islands)


class Join(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A process joins. ``settings`` must equal the other processes'; ``world`` is the world that it is in, if any."""

    place: IslandProcess
    processes: int
    settings: dict[str, str]
    key: str
    world: World | None = None


class IsReady(msgspec.Struct, frozen=True, tag=True):
    """The process has compiled its programs, and waits for a world."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat: the process has done ``step`` steps, and trains in the world ``generation``."""

    step: int
    generation: int = 0


class Lost(msgspec.Struct, frozen=True, tag=True):
    """An exchange failed, as the connection to ``islands`` broke or (``late``) they are connected but silent."""

    generation: int
    islands: tuple[int, ...]
    late: bool


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The process has finished the run."""


class Note(msgspec.Struct, frozen=True, tag=True):
    """The folder of the run, for islands that join later."""

    run: str


class Watch(msgspec.Struct, frozen=True, tag=True):
    """A watcher subscribes to `Event` messages."""

    key: str


class Event(msgspec.Struct, frozen=True, tag=True):
    """A line on what happened ("": a heartbeat), the islands dropped by it, the islands that train, and the run's
    folder."""

    line: str
    dropped: tuple[int, ...] = ()
    present: tuple[int, ...] = ()
    run: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A process may not join, for ``reason``."""

    reason: str


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """The process is dropped from the world; it may join again, but its state is void."""

    reason: str


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Opens a connection between two processes of a generation; ``kind`` is "lane" or "star"."""

    generation: int
    place: IslandProcess
    kind: str
    key: str


class Spoken(msgspec.Struct, frozen=True, tag=True):
    """A message of `Links.meet`: to the leader, or the leader's list of all messages."""

    body: msgspec.Raw


MemberMessage = Join | IsReady | Beat | Lost | Leave | Note | Watch | Event | Refused | Dropped | Hello | Spoken | World
_DECODER: msgspec.msgpack.Decoder[MemberMessage] = msgspec.msgpack.Decoder(MemberMessage)


def packed(message: MemberMessage) -> bytes:
    """Returns the bytes of a message on the wire."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def send(connection: socket.socket, message: MemberMessage, timeout_s: float = 5.0) -> None:
    """Sends a message. Raises OSError if sending fails or takes longer than ``timeout_s``."""
    connection.settimeout(timeout_s)
    connection.sendall(packed(message))


def receive(connection: socket.socket, timeout_s: float) -> MemberMessage:
    """Returns the next message. Raises TimeoutError, ConnectionError if closed, ValueError for invalid bytes."""
    connection.settimeout(timeout_s)
    length = _length(_exactly(connection, _LENGTH.size))
    return _decoded(_exactly(connection, length))


async def read(reader: asyncio.StreamReader) -> MemberMessage:
    """Returns the next message of a stream. Raises IncompleteReadError if closed, ValueError for invalid bytes."""
    length = _length(await reader.readexactly(_LENGTH.size))
    return _decoded(await reader.readexactly(length))


def _length(header: bytes) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > MOST_MESSAGE_BYTES:
        raise ValueError(f"a message of {length:,} bytes is not one of meshwright's")
    return int(length)


def _decoded(body: bytes) -> MemberMessage:
    try:
        return _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a message of meshwright: {error}") from None


def _exactly(connection: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise ConnectionError("the other side closed the connection")
        view = view[received:]
    return bytes(buffer)


def host_and_port(address: str) -> tuple[str, int]:
    """Returns (host, port) of ``host:port``; an IPv6 host may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
