"""Messages between islands and their membership service: four bytes of length, then MessagePack."""

import asyncio
import socket
import struct

import msgspec

_LENGTH = struct.Struct("!I")
MOST_MESSAGE_BYTES = 1 << 24


class IslandProcess(msgspec.Struct, frozen=True):
    """One process of an island: its numbers, the address that it listens at, and which start of it this is."""

    island: int
    process: int
    address: str
    start: str


class World(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The islands that train together from this ``generation`` on, in the order in which their arrays are added.

    It is ``urgent`` where an island of the generation before is missing: exchanges under way end at once. ``new``
    islands hold no state. ``run`` is the folder of the run, "" before there is one. The ``leader`` decides, writes
    files and prints: the one before, while it is there, else the first island that holds a state.
    """

    generation: int
    islands: tuple[tuple[IslandProcess, ...], ...]
    urgent: bool = False
    new: tuple[int, ...] = ()
    run: str = ""
    leader: int = -1

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the islands, in order."""
        return tuple(processes[0].island for processes in self.islands)

    def has(self, place: IslandProcess) -> bool:
        """True if this very start of a process belongs to the world."""
        return any(place in processes for processes in self.islands)


class Join(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A process is there. ``settings`` are compared with those of the others; ``world`` is the one it is in, if any."""

    place: IslandProcess
    processes: int
    settings: dict[str, str]
    key: str
    world: World | None = None


class IsReady(msgspec.Struct, frozen=True, tag=True):
    """The process has compiled its programs, and waits to be in a world."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The process lives; it has done ``step`` steps, and is at one with the others of ``generation``."""

    step: int
    generation: int = 0


class Lost(msgspec.Struct, frozen=True, tag=True):
    """An exchange of a generation failed since these islands are cut off, or ``late``: connected, and silent."""

    generation: int
    islands: tuple[int, ...]
    late: bool


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The process has ended its work."""


class Note(msgspec.Struct, frozen=True, tag=True):
    """The folder of the run, for those who join later."""

    run: str


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Asks for events."""

    key: str


class Event(msgspec.Struct, frozen=True, tag=True):
    """A line that says what happened, "" for a sign of life; the islands that are out since, those that train, and the
    folder of their run."""

    line: str
    dropped: tuple[int, ...] = ()
    present: tuple[int, ...] = ()
    run: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why a process may not join."""

    reason: str


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """The process is no longer in the world; it may join again, without its state."""

    reason: str


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Opens a connection between two processes of a generation; ``kind`` is "lane" or "star"."""

    generation: int
    place: IslandProcess
    kind: str
    key: str


class Spoken(msgspec.Struct, frozen=True, tag=True):
    """What a process says to the leader at a meeting, or the leader's answer."""

    body: msgspec.Raw


MemberMessage = Join | IsReady | Beat | Lost | Leave | Note | Watch | Event | Refused | Dropped | Hello | Spoken | World
_DECODER: msgspec.msgpack.Decoder[MemberMessage] = msgspec.msgpack.Decoder(MemberMessage)


def packed(message: MemberMessage) -> bytes:
    """Returns the bytes of a message on the wire."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def send(connection: socket.socket, message: MemberMessage, timeout_s: float = 5.0) -> None:
    """Sends a message. Raises OSError if that is not possible within the time."""
    connection.settimeout(timeout_s)
    connection.sendall(packed(message))


def receive(connection: socket.socket, timeout_s: float) -> MemberMessage:
    """Returns the next message. Raises TimeoutError, ConnectionError at the end, or ValueError for other bytes."""
    connection.settimeout(timeout_s)
    length = _length(_exactly(connection, _LENGTH.size))
    return _decoded(_exactly(connection, length))


async def read(reader: asyncio.StreamReader) -> MemberMessage:
    """Returns the next message of a stream. Raises IncompleteReadError at the end, ValueError for other bytes."""
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
    """Returns the parts of ``host:port``; an IPv6 host may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
