"""Steps that islands do together: work, a sum, a meeting; and how those who remain go on after a fault.

A step is done once its process knows that every process has its sums: then it updates its state. When a world ends in
between, those of the next one meet. If one of them has done the step, all hold its sums, and those who have not yet
done it do so. If none has, they keep what they have computed and add it again without those who left. Who holds no
state, or an older one, gets that of another island over its lane. So states stay the same bits everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
import numpy as np

from meshwright.core.errors import CannotRunError, StoppedError
from meshwright.islands.codec import FP32, Codec
from meshwright.islands.exchange import Links, LostIslandsError, Timeouts, WorldChangedError
from meshwright.islands.ledger import Ledger, SampleBlock, deal, handed_over
from meshwright.islands.member import Member, OutError
from meshwright.islands.watch import GoBackError, StepTimeouts, Stragglers, odd_islands

MOST_ODD = 3
"""How often an island's state may differ from that of the others before it ends."""
ROUNDS_OF_NOTICE = 3
"""Rounds in which an island that was asked to stop sees whether all others were too, which ends the run."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says once it has the sums of a step.

    ``numbers`` are added over islands; ``work_s`` are the seconds of its own work. ``switches`` is True where it knows
    of a newer world; that of the leader counts. ``digest`` is that of its state before the step, "" if none is due.
    """

    island: int
    process: int
    numbers: dict[str, float] = {}
    work_s: float = 0.0
    stops: bool = False
    switches: bool = False
    digest: str = ""


class OpenStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that is not done: the samples of each island as they were ``dealt``, whose ``blocks`` they are now, and
    the ledger ``after`` it."""

    dealt: dict[int, SampleBlock]
    blocks: dict[int, SampleBlock]
    after: Ledger


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says when a world begins; ``step`` is None without a state, ``samples`` are those of a batch."""

    island: int
    step: int | None
    samples: int
    has_sums: bool = False
    open_step: OpenStep | None = None
    ledger: Ledger = Ledger()
    agreed: int = 0
    last: list[Said] = []
    facts: dict[str, Any] = {}


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A step that is done: who did which samples, the ledger after it, and what all said."""

    step: int
    generation: int
    blocks: dict[int, SampleBlock]
    ledger: Ledger
    said: list[Said]

    @property
    def firsts(self) -> list[Said]:
        """What the first process of each island said."""
        return [one for one in self.said if one.process == 0]

    def total(self, name: str) -> float:
        """Returns a number summed over islands."""
        return float(sum(one.numbers.get(name, 0.0) for one in self.firsts))


class IslandWork(Protocol):
    """What an island does. ``sizes`` are the samples of a step, by those of each island's batch; ``compute`` returns
    the arrays to add."""

    @property
    def samples(self) -> int: ...
    def start(self) -> tuple[int, Ledger]: ...
    def sizes(self, samples: Mapping[int, int]) -> dict[int, int]: ...
    def compute(
        self, step: int, block: SampleBlock, dealt: dict[int, SampleBlock]
    ) -> tuple[Sequence[np.ndarray], Said]: ...
    def nothing(self) -> Sequence[np.ndarray]: ...
    def apply(self, sums: Sequence[np.ndarray], done: Done) -> None: ...
    def give(self, links: Links, ranks: Sequence[int]) -> None: ...
    def take(self, links: Links, rank: int, facts: dict[str, Any]) -> None: ...
    def facts(self) -> dict[str, Any]: ...
    def reset(self) -> None: ...


class Rounds:
    """Runs steps with the others until the last; ``on_done`` is called after each, ``on_world`` when one begins.

    ``on_done`` may raise GoBackError, in all islands or in none. ``say`` gets lines in the process that decides.
    """

    def __init__(
        self,
        member: Member,
        work: IslandWork,
        *,
        codec: Codec = FP32,
        on_done: Callable[[Done], None] = lambda done: None,
        on_world: Callable[[], None] = lambda: None,
    ) -> None:
        self.member, self.work, self.codec = member, work, codec
        self._on_done, self._on_world = on_done, on_world
        self.asks_stop: Callable[[], bool] = lambda: False
        self.say: Callable[[str], None] = lambda line: None
        self.is_long: Callable[[int], bool] = lambda step: False  # what follows a step, such as an evaluation
        self._stragglers, self._pace, self._times_odd = Stragglers(), StepTimeouts(member.timeouts), 0
        self.step: int | None = None
        self.agreed, self.trusted = 0, -1  # the last step known to be alike in all; if >= 0, files after it are suspect
        self.ledger = Ledger()
        self._open: OpenStep | None = None
        self._arrays: Sequence[np.ndarray] | None = None
        self._own = Said(island=0, process=0)
        self._samples: dict[int, int] = {}
        self._sums: list[np.ndarray] | None = None
        self._last: list[Said] = []
        self._rounds_asked = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="islands-sum")
        self._early: Future[list[np.ndarray]] | None = None

    @property
    def links(self) -> Links:
        """The connections of the present world."""
        assert self.member.links
        return self.member.links

    def run(self, steps: int) -> bool:
        """Runs steps up to this number; False if all were asked to stop before. Raises StoppedError if this one was."""
        self.member.ready()
        self._together(self._settle)
        while self.step is not None and self.step < steps:
            self._together(self._step)
            asked = {one.island for one in self._last if one.stops}
            if asked and asked == {one.island for one in self._last}:
                return False
            number = self.member.place.island
            self._rounds_asked = self._rounds_asked + 1 if number in asked else 0
            if self._rounds_asked > ROUNDS_OF_NOTICE:
                raise StoppedError(f"island {number} was asked to stop, and leaves; the others train on.")
        return True

    def begin_sum(self, arrays: Sequence[np.ndarray]) -> None:
        """Begins to add, beside it, what the present `compute` is to return; after a fault it is added again."""
        self._early = self._thread.submit(self.links.sum, arrays, codec=self.codec)

    def conclude(self, finish: Callable[[], None]) -> None:
        """The leader finishes the run while the others wait; if it dies, another does so."""
        is_over = False

        def act() -> None:
            nonlocal is_over
            if self.links.is_leader:
                finish()
            self.links.meet(self._status(), patience=self.member.timeouts.start_s)
            is_over = True

        while not is_over:
            self._together(act)
        self.member.leave()

    def _together(self, act: Callable[[], None]) -> None:
        """Acts; after a fault in it, or in the world that follows, settles with those who remain."""
        while True:
            try:
                return act()
            except WorldChangedError:
                act = self._settle
            except LostIslandsError as error:
                self.member.lost(error)
                act = self._settle
            except OutError:
                self._forget()
                self.member.ready()
                act = self._settle
            except GoBackError:
                self._forget()
                act = self._agree

    def _forget(self) -> None:
        self.step = self._open = self._arrays = self._sums = None
        self._last = []
        self.work.reset()

    # -- a step --------------------------------------------------------------------------------------

    def _step(self) -> None:
        assert self.step is not None
        place, links = self.member.place, self.links
        if self._open is None:
            blocks, after = deal(self.ledger, self.work.sizes(self._samples))
            self._open = OpenStep(dealt=blocks, blocks=blocks, after=after)
        if self._arrays is None:
            self._own = Said(island=place.island, process=place.process)
            block = self._open.blocks.get(place.island)
            if block:
                self._arrays, self._own = self.work.compute(self.step + 1, block, self._open.dealt)
            else:
                self._arrays = self.work.nothing()
        if self._sums is None:
            early, self._early = self._early, None
            self._sums = early.result() if early else links.sum(self._arrays, codec=self.codec)
        switches = self.member.newest > links.world.generation
        own = msgspec.structs.replace(self._own, stops=self.asks_stop(), switches=switches)
        said = links.meet(own)
        self._commit(said)
        self._compare(said)
        if any(one.switches for one in said if one.island == links.world.leader and one.process == 0):
            raise WorldChangedError

    def _commit(self, said: list[Said]) -> None:
        assert self.step is not None
        assert self._sums is not None
        assert self._open is not None
        self.step += 1
        self.member.step = self.step
        done = Done(
            step=self.step,
            generation=self.links.world.generation,
            blocks=self._open.blocks,
            ledger=self._open.after,
            said=said,
        )
        sums, self.ledger, self._last = self._sums, self._open.after, said
        self._open = self._arrays = self._sums = None
        self.work.apply(sums, done)
        self._pace.step_done()
        self._wait(self._pace.long if self.is_long(self.step) else self._pace.now)
        for line in self._stragglers.seen({one.island: one.work_s for one in done.firsts if one.work_s}):
            self._tell(line)
        self._on_done(done)

    def _compare(self, said: list[Said]) -> None:
        """Who does not hold what the others hold takes their state; if nobody knows who is right, all go back."""
        assert self.step is not None
        odd = odd_islands([(one.island, one.digest) for one in said])
        if not odd:
            self.agreed = self.step - 1 if all(one.digest for one in said) else self.agreed
            return
        if self.links.world.leader in odd:
            self.trusted = self.agreed
        names = " and ".join(map(str, sorted(odd)))
        if odd == {one.island for one in said}:
            self._tell(f"islands {names} hold different states, and nobody knows which is right: all go back")
            raise GoBackError
        self._tell(f"the state of island {names} is not that of the others: it takes theirs")
        if self.member.place.island in odd:
            self._times_odd += 1
            if self._times_odd >= MOST_ODD:
                raise CannotRunError(f"the state of this island has differed {MOST_ODD} times. See to its hardware.")
            self._forget()
        self._agree()

    def _wait(self, timeouts: Timeouts) -> None:
        self.member.timeouts = self.links.timeouts = timeouts

    def _tell(self, line: str) -> None:
        if self.links.decides:
            self.say(line)

    # -- a new world -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Joins the next world, and agrees with it."""
        self.member.join()
        self._agree()

    def _agree(self) -> None:
        """Agrees on the state: afterwards all hold that of the newest step."""
        statuses = self.links.meet(self._status())
        if all(status.step is None for status in statuses):
            if self.links.is_leader:  # the others get its state
                self.step, self.ledger = self.work.start()
                self.agreed = self.step
            statuses = self.links.meet(self._status(), patience=self.member.timeouts.start_s)
        newest = max(status.step for status in statuses if status.step is not None)
        if self.step == newest - 1 and self._sums is not None:
            self._commit(next(status.last for status in statuses if status.step == newest))
        self._sums = None  # added by fewer, or by more
        statuses = self.links.meet(self._status())
        behind = {status.island for status in statuses if status.step != newest}
        source = next(status for status in statuses if status.island not in behind)
        self._wait(self._pace.long if behind else self._pace.now)  # for a state
        numbers, samples_by_island = self.links.world.numbers, {one.island: one.samples for one in statuses}
        self._samples = {number: samples_by_island[number] for number in numbers}
        if self.member.place.island in behind:
            self._forget()
            self.work.take(self.links, numbers.index(source.island), source.facts)
            self.step, self.ledger = newest, source.ledger
        elif behind and self.member.place.island == source.island:
            self.work.give(self.links, [numbers.index(number) for number in sorted(behind)])
        self._open = next((one.open_step for one in statuses if one.open_step and one.step == newest), None)
        if self._open:
            blocks, after = handed_over(self._open.blocks, self.work.sizes(self._samples), self._open.after)
            if blocks[self.member.place.island] != self._open.blocks.get(self.member.place.island):
                self._arrays = None  # of no sample
            self._open = msgspec.structs.replace(self._open, blocks=blocks, after=after)
        self.agreed = max(status.agreed for status in statuses if status.step == newest)
        self.member.settled()
        self._on_world()
        self.trusted = -1

    def _status(self) -> Status:
        return Status(
            island=self.member.place.island,
            step=self.step,
            samples=self.work.samples,
            has_sums=self._sums is not None,
            open_step=self._open,
            ledger=self.ledger,
            agreed=self.agreed,
            last=self._last,
            facts=self.work.facts() if self.step is not None else {},
        )
