"""Connections between the islands of one world (islands that train together), for sums, states and messages.

Every process connects to the process of the same number in each other island (lanes), and to the leader's first one.
Every wait has a timeout: `Timeouts.step_s` until the other side starts to send, `Timeouts.sum_s` between bytes later.
"""

import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import numpy as np

from meshwright.islands.codec import FP32, Codec
from meshwright.islands.messages import Hello, IslandProcess, Spoken, World, host_and_port, receive, send

_Body = TypeVar("_Body")
ALIGNED = 64
"""Each island's part of a sum has a multiple of this many values, so that the codec's blocks are whole."""
CONNECT_S = 2.0
POLL_S = 0.2
BUFFER_BYTES = 1 << 20


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to wait for the next bytes of a sum, for another island's part of a step, and for a world to begin.

    Each should exceed the one before it, so that the innermost fault is reported first.
    """

    sum_s: float = 10.0
    step_s: float = 120.0
    start_s: float = 600.0


class WorldChangedError(Exception):
    """A newer world has begun, and the exchange in progress is void."""


class LostIslandsError(Exception):
    """The connection to ``islands`` is broken, or (``late``) they sent nothing before a timeout."""

    def __init__(self, islands: Sequence[int], *, late: bool) -> None:
        super().__init__(f"islands {', '.join(map(str, islands))} {'are late' if late else 'are cut off'}")
        self.islands, self.late = tuple(islands), late


class Listener:
    """Accepts the connections that other islands open to this process, and keeps them until `take`."""

    def __init__(self, host: str, *, key: str) -> None:
        self._socket = socket.create_server((host, 0))
        self._key, self._arrived = key, threading.Condition()
        self._kept: dict[tuple[int, int, int, str], socket.socket] = {}
        bound_host, port = self._socket.getsockname()[:2]
        self.address = f"{bound_host}:{port}"
        threading.Thread(target=self._accept, name="islands-listener", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            hello = receive(connection, CONNECT_S)
        except (OSError, ValueError):
            hello = None
        if not isinstance(hello, Hello) or hello.key != self._key:
            connection.close()
            return
        with self._arrived:
            self._kept[hello.generation, hello.place.island, hello.place.process, hello.kind] = connection
            for old in [kept for kept in self._kept if kept[0] < hello.generation]:
                self._kept.pop(old).close()
            self._arrived.notify_all()

    def take(
        self, generation: int, place: IslandProcess, kind: str, until: Callable[[], bool], timeout_s: float
    ) -> socket.socket:
        """Waits for a process's connection. Raises WorldChangedError once ``until()``, LostIslandsError if late."""
        name, end = (generation, place.island, place.process, kind), time.monotonic() + timeout_s
        with self._arrived:
            while name not in self._kept:
                if until():
                    raise WorldChangedError
                if time.monotonic() > end:
                    raise LostIslandsError([place.island], late=True)
                self._arrived.wait(POLL_S)
            return self._kept.pop(name)

    def wake(self) -> None:
        """Makes waiting `take` calls check ``until`` at once."""
        with self._arrived:
            self._arrived.notify_all()

    def close(self) -> None:
        """Closes the listening socket."""
        self._socket.close()


class Links:
    """The connections of one process in one world. Another thread may `abort` every exchange in progress."""

    def __init__(self, world: World, place: IslandProcess, listener: Listener, timeouts: Timeouts, *, key: str) -> None:
        self.world, self.place, self.timeouts = world, place, timeouts
        self.rank, self.size = world.numbers.index(place.island), len(world.islands)
        self._closed = False
        self._listener, self._key = listener, key
        self._lanes: dict[int, socket.socket] = {}
        self._star: dict[IslandProcess, socket.socket] = {}
        self._leader = world.islands[world.numbers.index(world.leader)][0]

    @property
    def is_leader(self) -> bool:
        """True in all processes of the leading island."""
        return self.place.island == self._leader.island

    @property
    def decides(self) -> bool:
        """True in the leader's first process, which gathers the messages of `meet`."""
        return self.place == self._leader

    def connect(self) -> None:
        """Makes all connections. Raises WorldChangedError, or LostIslandsError for an island that cannot be reached."""
        for rank, processes in enumerate(self.world.islands):
            if rank != self.rank:
                self._lanes[rank] = self._connection(processes[self.place.process], "lane", opens=rank > self.rank)
        others = [place for processes in self.world.islands for place in processes if place != self._leader]
        for place in others if self.decides else [self._leader]:
            self._star[place] = self._connection(place, "star", opens=not self.decides)

    def _connection(self, other: IslandProcess, kind: str, *, opens: bool) -> socket.socket:
        if not opens:
            connection = self._listener.take(
                self.world.generation, other, kind, lambda: self._closed, self.timeouts.step_s
            )
        else:
            self._require_open()
            try:
                connection = socket.create_connection(host_and_port(other.address), CONNECT_S)
                send(connection, Hello(self.world.generation, self.place, kind, self._key))
            except OSError:
                self._require_open()
                raise LostIslandsError([other.island], late=False) from None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def abort(self) -> None:
        """Ends every exchange in progress, here and in the connected islands; any thread may call it."""
        self._closed = True
        for connection in [*self._lanes.values(), *self._star.values()]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.wake()

    def close(self) -> None:
        """Closes all connections; only the thread that uses them may call it."""
        self.abort()
        for connection in [*self._lanes.values(), *self._star.values()]:
            connection.close()

    def _require_open(self) -> None:
        if self._closed:
            raise WorldChangedError

    # -- all-gathers of messages ---------------------------------------------------------------------

    def meet(self, own: _Body, *, patience: float = 0.0) -> list[_Body]:
        """All-gathers a message of each process: returns them in the order of islands and processes.

        ``own`` has a type that msgspec can encode. The leader's first process gathers and sends the list, so it is also
        a barrier. ``patience`` replaces the timeout of a step (s). Raises WorldChangedError, LostIslandsError.
        """
        self._require_open()  # a single island waits for nobody, so would not notice that it is out
        wait_s = patience or self.timeouts.step_s
        said = {self.place: own}
        other = self._leader
        try:
            if not self.decides:
                send(self._star[other], Spoken(msgspec.Raw(msgspec.msgpack.encode(own))), self.timeouts.sum_s)
                # the leader may wait as long for other processes
                return self._heard(self._star[other], list[type(own)], 2 * wait_s)  # type: ignore[misc, no-any-return]
            for other, connection in self._star.items():
                said[other] = self._heard(connection, type(own), wait_s)
            in_order = [said[place] for processes in self.world.islands for place in processes]
            message = Spoken(msgspec.Raw(msgspec.msgpack.encode(in_order)))
            for other, connection in self._star.items():  # noqa: B007
                send(connection, message, self.timeouts.sum_s)
            return in_order
        except (OSError, ValueError) as error:
            self._require_open()
            raise LostIslandsError([other.island], late=isinstance(error, TimeoutError)) from None

    @staticmethod
    def _heard(connection: socket.socket, kind: Any, timeout_s: float) -> Any:
        message = receive(connection, timeout_s)
        if not isinstance(message, Spoken):
            raise ValueError(type(message).__name__)
        return msgspec.msgpack.decode(message.body, type=kind)

    # -- arrays --------------------------------------------------------------------------------------

    def sum(self, arrays: Sequence[np.ndarray], *, codec: Codec = FP32) -> list[np.ndarray]:
        """All-reduces arrays over islands: returns float32 sums, added in island order, so bit-equal everywhere.

        A reduce-scatter, then an all-gather: each of R islands sends 2 (R - 1) / R of the bytes.
        """
        flat = np.concatenate([np.asarray(array, np.float32).ravel() for array in arrays] or [np.zeros(0, np.float32)])
        ends = [min(flat.size, -(-flat.size * (i + 1) // (self.size * ALIGNED)) * ALIGNED) for i in range(self.size)]
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        sizes = [high - low for low, high in bounds]
        encoded = [memoryview(codec.encode(flat[low:high])) for low, high in bounds]
        parts = {rank: np.empty(codec.num_bytes(sizes[self.rank]), np.uint8) for rank in range(self.size)}
        self._transfer(
            {rank: [encoded[rank]] for rank in self._lanes}, {rank: [parts[rank].data] for rank in self._lanes}
        )
        total = np.zeros(sizes[self.rank], np.float32)
        for rank in range(self.size):
            total += codec.decode(encoded[rank] if rank == self.rank else parts[rank].data, total.size)
        sums = {rank: np.empty(codec.num_bytes(size), np.uint8) for rank, size in enumerate(sizes)}
        own = memoryview(codec.encode(total))
        self._transfer({rank: [own] for rank in self._lanes}, {rank: [sums[rank].data] for rank in self._lanes})
        for rank, (low, high) in enumerate(bounds):
            flat[low:high] = codec.decode(own if rank == self.rank else sums[rank].data, high - low)
        shapes = [np.shape(array) for array in arrays]
        cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(flat, cuts), shapes, strict=True)]

    def give(self, ranks: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Sends the buffers to each of the islands ``ranks``."""
        self._transfer({rank: list(buffers) for rank in ranks}, {})

    def take(self, rank: int, buffers: Sequence[memoryview]) -> None:
        """Fills the buffers with the bytes that island ``rank`` sends by `give`."""
        self._transfer({}, {rank: list(buffers)})

    def _transfer(self, outgoing: Mapping[int, list[memoryview]], incoming: Mapping[int, list[memoryview]]) -> None:
        """Sends and receives concurrently until all buffers are done. Raises WorldChangedError, LostIslandsError."""
        to_send = {rank: [b.cast("B") for b in buffers if b.nbytes] for rank, buffers in outgoing.items()}
        to_read = {rank: [b.cast("B") for b in buffers if b.nbytes] for rank, buffers in incoming.items()}
        last = dict.fromkeys(self._lanes, time.monotonic())
        begun: set[int] = set()
        with selectors.DefaultSelector() as selector:
            for connection in self._lanes.values():
                connection.setblocking(False)
            while pending := {rank for table in (to_send, to_read) for rank, buffers in table.items() if buffers}:
                self._watch(selector, to_send, to_read, pending)
                for entry, events in selector.select(POLL_S):
                    rank, connection = entry.data, self._lanes[entry.data]
                    try:
                        moved = events & selectors.EVENT_READ and _move_some(connection.recv_into, to_read[rank])
                        begun |= {rank} if moved else set()
                        moved = (events & selectors.EVENT_WRITE and _move_some(connection.send, to_send[rank])) or moved
                    except OSError:
                        self._require_open()
                        raise LostIslandsError([self.world.numbers[rank]], late=False) from None
                    if moved:
                        last[rank] = time.monotonic()
                self._require_open()
                now = time.monotonic()
                late = [
                    self.world.numbers[rank]
                    for rank in sorted(pending)
                    if now - last[rank] > (self.timeouts.sum_s if rank in begun else self.timeouts.step_s)
                ]
                if late:
                    raise LostIslandsError(late, late=True)

    def _watch(
        self,
        selector: selectors.DefaultSelector,
        to_send: Mapping[int, list[memoryview]],
        to_read: Mapping[int, list[memoryview]],
        pending: set[int],
    ) -> None:
        registered = {entry.data: entry for entry in selector.get_map().values()}
        for rank, connection in self._lanes.items():
            events = selectors.EVENT_READ * bool(to_read.get(rank)) | selectors.EVENT_WRITE * bool(to_send.get(rank))
            if rank not in registered and events:
                selector.register(connection, events, rank)
            elif rank in registered and not events:
                selector.unregister(registered[rank].fileobj)
            elif rank in registered and registered[rank].events != events:
                selector.modify(registered[rank].fileobj, events, rank)


def _move_some(move: Callable[[memoryview], int], buffers: list[memoryview]) -> int:
    """Reads into, or sends, the first buffer; returns the number of bytes. Raises ConnectionError if closed."""
    try:
        count = move(buffers[0][:BUFFER_BYTES])
    except BlockingIOError:
        return 0
    if not count:
        raise ConnectionError
    buffers[0] = buffers[0][count:]
    if not buffers[0]:
        buffers.pop(0)
    return count
