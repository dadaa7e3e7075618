"""An island without JAX: its state is a vector, a sample adds a vector of its own. Run as a process by the tests.

SIGUSR1 damages its state, SIGUSR2 makes it hang (its threads live), SIGHUP makes it slow and quick again.
"""

import json
import signal
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.islands.exchange import Links, Timeouts
from meshwright.islands.ledger import Ledger, SampleBlock, sample_numbers
from meshwright.islands.member import Member, find_identity
from meshwright.islands.rounds import Done, Rounds, Said

WIDTH = 1000


def value(sample: int) -> np.ndarray:
    """Returns what a sample adds: whole numbers, whose float32 sums are exact."""
    return np.arange(WIDTH, dtype=np.float32) % 7 + sample % 97


class Toy:
    """Adds up the values of samples; saves its state every ``every`` steps."""

    def __init__(self, folder: Path, step_s: float, every: int) -> None:
        self.folder, self.step_s, self.every = folder, step_s, every
        self.state = np.zeros(WIDTH, np.float32)
        self.samples = 3
        self.faults: list[int] = []
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, lambda number, frame: self.faults.append(number))

    def suffer(self) -> None:
        """Has the faults that were asked for."""
        while self.faults:
            fault = self.faults.pop()
            if fault == signal.SIGUSR1:
                self.state = self.state + (np.arange(WIDTH, dtype=np.float32) == 3)
            elif fault == signal.SIGUSR2:
                time.sleep(1e6)
            else:
                self.step_s = self.step_s * 3 if self.step_s < 0.05 else self.step_s / 3

    def start(self) -> tuple[int, Ledger]:
        world = rounds.links.world
        member.note_run(world.run or f"run of {island} in {world.generation}")
        saved = sorted(self.folder.glob("state-*.npz"))
        if not saved:
            return 0, Ledger()
        with np.load(saved[-1]) as file:
            self.state = file["state"]
            return int(file["step"]), Ledger(samples=int(file["samples"]))

    def sizes(self, samples: Mapping[int, int]) -> dict[int, int]:
        return dict(samples)

    def compute(
        self, step: int, block: SampleBlock, dealt: dict[int, SampleBlock]
    ) -> tuple[Sequence[np.ndarray], Said]:
        self.suffer()
        time.sleep(self.step_s)
        numbers = sample_numbers(block)
        digest = f"{zlib.crc32(self.state)}" if step % 5 == 1 else ""
        said = Said(
            island=island, process=process, numbers={"samples": len(numbers)}, work_s=self.step_s, digest=digest
        )
        return [sum(value(number) for number in numbers)], said

    def nothing(self) -> Sequence[np.ndarray]:
        return [np.zeros(WIDTH, np.float32)]

    def apply(self, sums: Sequence[np.ndarray], done: Done) -> None:
        self.state = self.state + sums[0]

    def give(self, links: Links, ranks: Sequence[int]) -> None:
        links.give(ranks, [memoryview(self.state)])

    def take(self, links: Links, rank: int, facts: dict[str, Any]) -> None:
        self.state = np.empty(WIDTH, np.float32)
        links.take(rank, [memoryview(self.state)])

    def facts(self) -> dict[str, Any]:
        return {}

    def reset(self) -> None:
        self.state = np.zeros(0, np.float32)


if __name__ == "__main__":
    folder, steps, step_s, process, processes = sys.argv[1:6]
    every = int(sys.argv[6]) if len(sys.argv) > 6 else 0
    settings = json.loads(sys.argv[7]) if len(sys.argv) > 7 else {"code": "1"}
    identity = find_identity()
    assert identity
    island, process = identity.island, int(process)
    toy = Toy(Path(folder), float(step_s), every)
    toy.samples -= island % 2  # islands have batches of their own
    timeouts = Timeouts(sum_s=3, step_s=6, start_s=60)
    member = Member(identity, process=process, processes=int(processes), settings=settings, timeouts=timeouts)
    log = (Path(folder) / f"log-{island}-{process}.jsonl").open("a", buffering=1)

    def done(record: Done) -> None:
        line = {
            "step": record.step,
            "generation": record.generation,
            "at": time.time(),
            "total": record.total("samples"),
        }
        line |= {
            "run": rounds.links.world.run,
            "blocks": record.blocks,
            "ledger": [record.ledger.samples, record.ledger.postponed],
        }
        line |= {"state": [float(toy.state[0]), float(toy.state.sum())], "leads": rounds.links.decides}
        log.write(json.dumps(line) + "\n")
        if every and record.step % every == 0 and rounds.links.decides and not record.ledger.postponed:
            part = Path(folder) / "part.npz"
            np.savez(part, state=toy.state, step=record.step, samples=record.ledger.samples)
            part.rename(Path(folder) / f"state-{record.step:06d}.npz")

    rounds = Rounds(member, toy, on_done=done)
    rounds.say = lambda line: print(line, file=sys.stderr, flush=True)
    rounds.run(int(steps))
    rounds.conclude(lambda: None)
    np.save(Path(folder) / f"end-{island}-{process}.npy", toy.state)
