"""Runs training steps over several islands (compute, sum, all-gather of messages), and recovers from lost islands.

A process commits a step, which updates its state, once it knows that every process has the sums. If a world ends during
a step, the members of the next world compare. If one of them has committed the step, all have its sums, and the rest
commit it too. If none has, they keep their computed arrays and sum them again without the lost islands. A process with
no state, or an older one, receives the state of another island. So all states stay bit-equal.
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
"""The number of times an island's state differs from the others' after which the island ends with an error."""
ROUNDS_OF_NOTICE = 3
"""Steps that an island asked to stop waits for all others to be asked too, which ends the run for all."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a process that has the sums of a step. ``numbers`` are summed over islands; ``work_s`` are its
    seconds of compute; ``stops``: it was asked to stop; ``switches``: it knows of a newer world (the leader's value
    decides); ``digest`` hashes its state before the step ("": not due).
    """

    island: int
    process: int
    numbers: dict[str, float] = {}
    work_s: float = 0.0
    stops: bool = False
    switches: bool = False
    digest: str = ""


class OpenStep(msgspec.Struct, frozen=True, kw_only=True):
    """An uncommitted step: the samples of each island as first ``dealt``, the ``blocks`` of the present islands, and
    the ledger ``after`` it."""

    dealt: dict[int, SampleBlock]
    blocks: dict[int, SampleBlock]
    after: Ledger


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A process's message at the start of a world; ``step`` is None without a state, ``samples`` is its batch size."""

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
    """A committed step: the samples of each island, the ledger after it, and the messages of all processes."""

    step: int
    generation: int
    blocks: dict[int, SampleBlock]
    ledger: Ledger
    said: list[Said]

    @property
    def firsts(self) -> list[Said]:
        """The messages of each island's first process."""
        return [one for one in self.said if one.process == 0]

    def total(self, name: str) -> float:
        """Returns the number ``name`` of the messages, summed over islands."""
        return float(sum(one.numbers.get(name, 0.0) for one in self.firsts))


class IslandWork(Protocol):
    """Interface of an island's training. ``sizes`` maps each island's batch size to its samples of a step; ``compute``
    returns the arrays to sum, ``nothing`` zeros of their shapes; ``give`` and ``take`` transfer the state."""

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
    """Runs steps with the other islands. Calls ``on_done`` after each step and ``on_world`` when a world begins.

    ``on_done`` may raise GoBackError, in all islands or in none. The leader's first process passes lines to ``say``.
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
        self.is_long: Callable[[int], bool] = lambda step: False  # a long task follows the step, such as an evaluation
        self._stragglers, self._pace, self._times_odd = Stragglers(), StepTimeouts(member.timeouts), 0
        self.step: int | None = None
        self.agreed, self.trusted = 0, -1  # last step with equal states; if >= 0, later files are suspect
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
        """The connections of this process in the present world."""
        assert self.member.links
        return self.member.links

    def run(self, steps: int) -> bool:
        """Runs up to step ``steps``; False if all islands were asked to stop, StoppedError if only this one was."""
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
                raise StoppedError(f"island {number} was asked to stop, and leaves; the other islands continue.")
        return True

    def begin_sum(self, arrays: Sequence[np.ndarray]) -> None:
        """Starts the sum of `compute`'s arrays in a thread before it returns; after a fault they are summed again."""
        self._early = self._thread.submit(self.links.sum, arrays, codec=self.codec)

    def conclude(self, finish: Callable[[], None]) -> None:
        """Runs ``finish`` in the leading island while others wait (if it dies, in the next leader); then leaves."""
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
        """Calls ``act``; after a fault joins the next world and agrees on its state, until that succeeds."""
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
        """An island whose state differs from the majority copies theirs; without a majority all raise GoBackError."""
        assert self.step is not None
        odd = odd_islands([(one.island, one.digest) for one in said])
        if not odd:
            self.agreed = self.step - 1 if all(one.digest for one in said) else self.agreed
            return
        if self.links.world.leader in odd:
            self.trusted = self.agreed
        names = " and ".join(map(str, sorted(odd)))
        if odd == {one.island for one in said}:
            self._tell(f"the states of islands {names} differ without a majority: all return to an earlier step")
            raise GoBackError
        self._tell(f"the state of island {names} differs from the others: it copies theirs")
        if self.member.place.island in odd:
            self._times_odd += 1
            if self._times_odd >= MOST_ODD:
                raise CannotRunError(f"the state of this island has differed {MOST_ODD} times. Check its hardware.")
            self._forget()
        self._agree()

    def _wait(self, timeouts: Timeouts) -> None:
        self.member.timeouts = self.links.timeouts = timeouts

    def _tell(self, line: str) -> None:
        if self.links.decides:
            self.say(line)

    # -- a new world -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Joins the next world and agrees on its state."""
        self.member.join()
        self._agree()

    def _agree(self) -> None:
        """Brings all islands of the world to the state of the newest step."""
        statuses = self.links.meet(self._status())
        if all(status.step is None for status in statuses):
            if self.links.is_leader:  # the other islands copy its state
                self.step, self.ledger = self.work.start()
                self.agreed = self.step
            statuses = self.links.meet(self._status(), patience=self.member.timeouts.start_s)
        newest = max(status.step for status in statuses if status.step is not None)
        if self.step == newest - 1 and self._sums is not None:
            self._commit(next(status.last for status in statuses if status.step == newest))
        self._sums = None  # summed over another set of islands
        statuses = self.links.meet(self._status())
        behind = {status.island for status in statuses if status.step != newest}
        source = next(status for status in statuses if status.island not in behind)
        self._wait(self._pace.long if behind else self._pace.now)  # time to transfer a state
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
                self._arrays = None  # computed from other samples
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
