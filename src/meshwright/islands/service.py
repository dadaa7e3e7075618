"""The membership service, which decides which islands train together. The islands can restore all of its state.

Worlds follow one another, by generation. An island is dropped if a process sends no heartbeat for `Bounds.beat_s`, or
does not reconnect in half of that, or other islands have lost it too; the rest get the next world at once. Islands that
are ready join at the next step boundary. A restarted service adopts the newest world that members report, and gives
absent members `Bounds.beat_s` to reconnect, so that one world never has two successors.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from meshwright.islands import messages

TICK_S = 0.05
RETRY_S = 10.0
"""If two islands lose their connection twice within this time, the island with the higher number is dropped."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The number of islands: ``count`` at the start, then at least ``least`` and at most ``most`` (0: ``count``).

    A member is lost after ``beat_s`` without a heartbeat. After ``start_s`` the first world begins without absent
    islands. ``restarted``: members of an earlier service may still connect; ``run`` is their folder.
    """

    count: int
    least: int = 1
    most: int = 0
    beat_s: float = 2.0
    start_s: float = 300.0
    restarted: bool = False
    run: str = ""

    @property
    def room(self) -> int:
        """The maximum islands of a world."""
        return self.most or self.count


class _Peer:
    """The connection of a process to the service."""

    def __init__(self, join: messages.Join, writer: asyncio.StreamWriter) -> None:
        self.join, self.writer = join, writer
        self.beat_at = time.monotonic()
        self.is_ready = join.world is not None
        self.settled = 0  # the generation in which it trains
        self.fault = ""  # why it is dropped, though connected

    def tell(self, message: messages.MemberMessage) -> None:
        if not self.writer.is_closing():
            self.writer.write(messages.packed(message))


class Membership:
    """Decides which islands train together; calls ``say`` with a line for each change."""

    def __init__(self, bounds: Bounds, *, key: str, say: Callable[[str], None] = lambda line: None) -> None:
        self.bounds, self.key, self._say = bounds, key, say
        self.world: messages.World | None = None
        self._peers: dict[tuple[int, int], _Peer] = {}
        self._watchers: list[asyncio.StreamWriter] = []
        self._lost: list[tuple[float, int, messages.Lost]] = []
        self._retried: dict[frozenset[int], float] = {}
        self._absent: dict[tuple[int, int], float] = {}  # disconnected members: since when
        self._waits_since = time.monotonic()
        self._adopted_at = -bounds.beat_s
        self._told_waits = ""
        self._is_done = False

    async def serve(self, host: str, port: int, *, opened: Callable[[int], None] = lambda port: None) -> None:
        """Serves until cancelled; calls ``opened`` with the port."""
        server = await asyncio.start_server(self._connected, host, port)
        async with server:
            opened(server.sockets[0].getsockname()[1])
            told_at = 0.0
            while True:
                await asyncio.sleep(TICK_S)
                self._review()
                if time.monotonic() - told_at > self.bounds.beat_s / 4:
                    self._tell_all("")
                    told_at = time.monotonic()

    # -- connections ---------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = None
        try:
            first = await asyncio.wait_for(messages.read(reader), self.bounds.beat_s)
            if isinstance(first, messages.Watch) and first.key == self.key:
                self._watchers.append(writer)
                await reader.read()
            elif isinstance(first, messages.Join):
                peer = self._joined(first, writer)
                while peer:
                    self._heard(peer, await messages.read(reader))
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, ValueError):
            pass
        finally:
            if writer in self._watchers:
                self._watchers.remove(writer)
            if peer and self._peers.get(_number(peer.join.place)) is peer:
                del self._peers[_number(peer.join.place)]
                self._absent[_number(peer.join.place)] = time.monotonic()
            writer.close()

    def _joined(self, join: messages.Join, writer: asyncio.StreamWriter) -> _Peer | None:
        peer = _Peer(join, writer)
        if self.world and not any(self.world.has(other.join.place) for other in self._peers.values()):
            self._is_done = False  # all had left, and one of them starts again
        reason = self._fault(join)
        if reason:
            self._tell_all(f"island {join.place.island} is refused: {reason}")
            peer.tell(messages.Refused(reason))
            return None
        if join.world and (self.world is None or join.world.generation > self.world.generation):
            self.world, self._adopted_at = join.world, time.monotonic()
        if join.world and self.world and not self.world.has(join.place):
            peer.fault = "the others continued without it"
            peer.tell(messages.Dropped(peer.fault))
        if join.world and self.world and self.world.has(join.place):
            peer.tell(self.world)
        if join.world and not self._peers:
            self._adopted_at = time.monotonic()  # all members were disconnected and reconnect
        earlier = self._peers.get(_number(join.place))
        if earlier and earlier.join.place.address != join.place.address:
            earlier.tell(messages.Refused("a later process has its number"))
        self._peers[_number(join.place)] = peer
        return peer

    def _fault(self, join: messages.Join) -> str:
        """Returns the reason why a process may not join, "" if it may."""
        if join.key != self.key:
            return "it belongs to another run"
        for _, other in sorted(self._peers.items()):
            names = join.settings.keys() | other.join.settings.keys()
            for name in sorted(names, key=lambda name: (not name.startswith("strategy."), name)):
                own, theirs = join.settings.get(name, "nothing"), other.join.settings.get(name, "nothing")
                if own != theirs and _number(other.join.place) != _number(join.place):
                    return f"its {name} is {own}, island {other.join.place.island} has {theirs}"
        return ""

    def _heard(self, peer: _Peer, message: messages.MemberMessage) -> None:
        peer.beat_at = time.monotonic()
        if isinstance(message, messages.IsReady):
            peer.is_ready = True
            self._review()
        elif isinstance(message, messages.Lost):
            if self.world and message.generation == self.world.generation:
                self._lost.append((peer.beat_at, peer.join.place.island, message))
        elif isinstance(message, messages.Note) and self.world:
            self.world = msgspec.structs.replace(self.world, run=message.run)
            for other in self._peers.values():  # which report it to a restarted service
                if self.world.has(other.join.place):
                    other.tell(self.world)
            self._tell_all("")
        elif isinstance(message, messages.Leave):
            self._is_done = True
            raise ConnectionError
        elif isinstance(message, messages.Beat):
            peer.settled = message.generation
        else:
            raise ValueError(type(message).__name__)

    # -- worlds --------------------------------------------------------------------------------------

    def _review(self) -> None:
        """Begins the next world if islands left or joined, or connections must be remade."""
        if self._is_done:
            return
        now = time.monotonic()
        apart = self._judge(now)
        present, gone = self._present(now)
        fresh = self._fresh({island[0].island for island in present}, now)
        if self.world and not present and len(gone) == len(self.world.islands) and not self._told_waits:
            self._waits_since, self._told_waits = now, "all"
        if not present and not self._may_begin(fresh, now):
            return
        if self.world and present and not gone and not self._is_settled():
            fresh = []  # else some members could miss the present world
        islands = sorted([*present, *fresh[: self.bounds.room - len(present)]], key=lambda island: island[0].island)
        if self.world and not gone and not apart and len(islands) == len(self.world.islands):
            return
        if len(islands) < self.bounds.least:
            text = f"{len(islands)} islands are present and at least {self.bounds.least} are needed; waiting for more"
            if text != self._told_waits:
                self._tell_all(text, tuple(gone))
            self._told_waits = text
            return
        self._begin(islands, new=fresh, gone=gone, apart=apart)

    def _begin(
        self,
        islands: Sequence[tuple[messages.IslandProcess, ...]],
        *,
        new: Sequence[tuple[messages.IslandProcess, ...]],
        gone: dict[int, str],
        apart: bool,
    ) -> None:
        before = self.world or messages.World(generation=0, islands=(), run=self.bounds.run)
        numbers = tuple(island[0].island for island in islands)
        new_numbers = tuple(island[0].island for island in new if island in islands)
        leads_on = before.leader in numbers and before.leader not in new_numbers
        first = next((number for number in numbers if number not in new_numbers), numbers[0])
        self.world = messages.World(
            generation=before.generation + 1,
            islands=tuple(islands),
            urgent=bool(gone) or apart,
            new=new_numbers,
            run=before.run,
            leader=before.leader if leads_on else first,
        )
        self._told_waits = ""
        words = [f"island {number} is out: {reason}" for number, reason in sorted(gone.items())]
        words += [f"island {number} is in" for number in new_numbers] if before.generation else []
        words += ["connections are made anew"] if apart and not gone else []
        count = f"{len(numbers)} of {self.bounds.count} islands train"
        self._tell_all("; ".join([*words, count]), tuple(gone))
        for number, reason in gone.items():
            for peer in self._of(number):
                if before.has(peer.join.place):  # not a new start of it, which is connected already
                    peer.fault = reason
                    peer.tell(messages.Dropped(reason))
        for island in islands:
            for place in island:
                peer_there = self._peers.get(_number(place))  # else it gets the world when it reconnects
                if peer_there:
                    peer_there.tell(self.world)

    def _present(self, now: float) -> tuple[list[tuple[messages.IslandProcess, ...]], dict[int, str]]:
        """Returns the live islands of the world, and island -> reason for each lost one."""
        present, gone = list[tuple[messages.IslandProcess, ...]](), dict[int, str]()
        waits_for_return = now - self._adopted_at < self.bounds.beat_s
        for island in self.world.islands if self.world else ():
            reasons = []
            for place in island:
                peer = self._peers.get(_number(place))
                if peer is None:
                    absent_s = now - self._absent.get(_number(place), 0.0)
                    if not waits_for_return and absent_s > self.bounds.beat_s / 2:
                        reasons.append("its process ended or was disconnected")
                elif peer.join.place.start != place.start:
                    reasons.append("its process ended")
                elif peer.fault:
                    reasons.append(peer.fault)
                elif now - peer.beat_at > self.bounds.beat_s:
                    reasons.append(f"no heartbeat for {now - peer.beat_at:.1f} s")
            if reasons:
                gone[island[0].island] = reasons[0]
            else:
                present.append(island)
        return present, gone

    def _is_settled(self) -> bool:
        """True if all members report that they train in the present world."""
        assert self.world
        places = [place for island in self.world.islands for place in island]
        peers = [self._peers.get(_number(place)) for place in places]
        return all(peer and peer.settled == self.world.generation for peer in peers)

    def _fresh(self, exclude: set[int], now: float) -> list[tuple[messages.IslandProcess, ...]]:
        """Returns the islands outside the world whose processes are all connected, ready and alive."""
        fresh = []
        for number in sorted({number for number, _ in self._peers} - exclude):
            peers = self._of(number)
            is_alive = all(p.is_ready and not p.fault and now - p.beat_at <= self.bounds.beat_s for p in peers)
            in_world = self.world and any(self.world.has(peer.join.place) for peer in peers)
            if is_alive and len(peers) == peers[0].join.processes and not in_world:
                fresh.append(tuple(peer.join.place for peer in peers))
        return fresh

    def _may_begin(self, fresh: Sequence[tuple[messages.IslandProcess, ...]], now: float) -> bool:
        """True if the first world may begin: ``count`` islands are ready, or after ``start_s`` at least ``least``."""
        waited_s = now - self._waits_since
        if self.bounds.restarted and self.world is None and waited_s < 2 * self.bounds.beat_s:
            return False
        return len(fresh) >= self.bounds.count or (waited_s > self.bounds.start_s and len(fresh) >= self.bounds.least)

    def _judge(self, now: float) -> bool:
        """Evaluates reports of lost islands: marks as faulty an island that is late and reports nothing itself, and
        the higher number of two that lost each other twice. Returns True if connections should be remade."""
        heard = [one for one in self._lost if now - one[0] >= TICK_S]  # by then dead connections have ended
        complaining = {accuser for _, accuser, _ in heard}
        pairs = {(frozenset((accuser, n)), lost.late) for _, accuser, lost in heard for n in lost.islands}
        apart = False
        for pair, late in pairs:
            silent = pair - complaining
            absent = [place for place in self._absent if place[0] in pair and place not in self._peers]
            if absent:
                self._absent |= dict.fromkeys(absent, -RETRY_S)
            elif late and silent:
                self._mark(min(silent), f"island {min(pair - silent)} waited for it too long")
            elif now - self._retried.get(pair, -RETRY_S) < RETRY_S:
                self._mark(max(pair), f"it and island {min(pair)} cannot reach each other")
            else:
                self._retried[pair], apart = now, True
        self._lost = [one for one in self._lost if one not in heard]
        return apart

    def _mark(self, number: int, fault: str) -> None:
        for peer in self._of(number):
            peer.fault = fault

    def _of(self, number: int) -> list[_Peer]:
        return [peer for (island, _), peer in sorted(self._peers.items()) if island == number]

    def _tell_all(self, line: str, dropped: tuple[int, ...] = ()) -> None:
        if line:
            self._say(line)
        world = self.world or messages.World(generation=0, islands=(), run=self.bounds.run)
        event = messages.packed(messages.Event(line, dropped, world.numbers, world.run))
        for writer in self._watchers:
            with suppress(ConnectionError):
                writer.write(event)


def _number(place: messages.IslandProcess) -> tuple[int, int]:
    return place.island, place.process
