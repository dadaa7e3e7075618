"""Kills runs of one and of two processes with SIGKILL, anywhere, and looks whether they go on to the same bits.

    python -m tests.kills.trial [--kills 100] [--seed 0]

Each run is killed several times, then let end. Its losses, its metrics (each step once) and its exported weights must
be those of a run that nothing interrupted. A kill is meant for a rank (of two processes one of both, or `launch`
itself) and for a part of the run: its start, compilation (with an empty cache), a step, a checkpoint that is being
written, or its end.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.corruption.trial import SMALL

PARTS = ("start", "compile", "step", "checkpoint", "end")
PROCESSES = (1, 2)
STEPS, EVERY = 40, 4
LONGEST_S = 300
PROGRAM = (sys.executable, "-c", "from meshwright.cli.main import main; main()")


class Kill(NamedTuple):
    """Where a run is killed: the number of processes, the part of the run, and the rank; -1 is `launch` itself."""

    processes: int
    part: str
    rank: int


class Ended(NamedTuple):
    """What a run that ended holds: losses, steps of its metrics, digest of its weights."""

    losses: list[float]
    steps: list[int]
    weights: str


class Trial(NamedTuple):
    """A folder with plan and text, the seconds that a start takes, and what chooses times."""

    folder: Path
    start_s: dict[int, float]
    chance: random.Random

    def command(self, processes: int, run_root: Path) -> list[str]:
        """The command that starts the run in ``run_root``, or goes on with it."""
        run = run_root / "mini-001"
        # The settings are the first that a run writes; killed before, there is nothing to go on with.
        going_on = (run / "resolved.toml").exists()
        if not going_on:
            shutil.rmtree(run, ignore_errors=True)
        fresh = [str(self.folder / "plan.toml"), "--data", str(self.folder / "text.txt"), "--runs", str(run_root)]
        changes = ["--set", f"train.checkpoint_every={EVERY}", "--set", "train.held_out=0"]
        train = [
            "train",
            *(["--resume", str(run)] if going_on else [*fresh, *changes]),
            "--steps",
            str(STEPS),
            "--json",
        ]
        return [*PROGRAM, *(["launch", "--processes", str(processes), "--"] if processes > 1 else []), *train]

    def start(self, processes: int, run_root: Path, cache: Path) -> subprocess.Popen[bytes]:
        """Starts the run, or goes on with it."""
        env = os.environ | {"MESHWRIGHT_CACHE": str(cache)}
        with open(run_root / "said.txt", "ab") as said:
            return subprocess.Popen(
                self.command(processes, run_root), env=env, stdout=subprocess.PIPE, stderr=said, start_new_session=True
            )

    def end(self, processes: int, run_root: Path) -> Ended:
        """Lets the run end. Raises AssertionError when it does not end well."""
        child = self.start(processes, run_root, self.folder / "cache")
        answer = child.communicate(timeout=LONGEST_S)[0]
        assert child.returncode == 0, (child.returncode, (run_root / "said.txt").read_text()[-2000:])
        return _ended(json.loads(answer), run_root / "mini-001")

    def kill(self, kill: Kill, run_root: Path) -> bool:
        """Starts or resumes the run and kills it there. False when it had ended before."""
        with tempfile.TemporaryDirectory(dir=self.folder) as empty:
            cache = Path(empty) if kill.part == "compile" else self.folder / "cache"
            run, began = run_root / "mini-001", time.monotonic()
            child = self.start(kill.processes, run_root, cache)
            until = self._reached(kill.part, run, began, self.start_s[kill.processes])
            ranks = _processes_of(child, kill.processes)
            while child.poll() is None and not until() and time.monotonic() < began + LONGEST_S:
                time.sleep(0.002)
            time.sleep(self.chance.uniform(0, 0.5 if kill.part == "end" else 0.05))
            hit = _send_kill(ranks[kill.rank] if kill.rank >= 0 else child.pid)
            answer, _ = child.communicate(timeout=LONGEST_S)
            _wait_until_gone(ranks)
            return hit and not answer

    def _reached(self, part: str, run: Path, began: float, first_s: float) -> Callable[[], bool]:
        """What says that the run has come to this part, once the time to kill it is chosen."""
        before = _written(run)
        wait_s = first_s * self.chance.uniform(*{"start": (0, 1), "compile": (0.5, 1.5)}.get(part, (0, 0)))
        lines = {"step": before + self.chance.randint(1, 6), "end": STEPS}.get(part, before + 1)
        if part == "checkpoint":
            return lambda: any(run.glob("checkpoints/*.orbax-checkpoint-tmp*"))
        return lambda: _written(run) >= lines or (bool(wait_s) and time.monotonic() - began > wait_s)


def _ended(answer: dict[str, Any], run: Path) -> Ended:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
    return Ended(answer["losses"], [line["step"] for line in lines if "loss" in line], weights)


def _written(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _processes_of(child: subprocess.Popen[bytes], processes: int) -> Sequence[int]:
    """Process ids by rank, as soon as all have started."""
    if processes == 1:
        return [child.pid]
    while child.poll() is None:
        found = {rank: pid for pid in _children(child.pid) for rank in _rank(pid)}
        if len(found) == processes:
            return [found[rank] for rank in range(processes)]
        time.sleep(0.01)
    return [child.pid] * processes


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _rank(pid: int) -> Iterator[int]:
    name = b"MESHWRIGHT_PROCESS="
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(name):
            yield int(entry.removeprefix(name))


def _send_kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _wait_until_gone(pids: Sequence[int]) -> None:
    """Processes of a `launch` that was killed end by themselves, after a checkpoint."""
    deadline = time.monotonic() + LONGEST_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def prepare(folder: Path, chance: random.Random) -> tuple[Trial, dict[int, Ended]]:
    """Writes a text and a plan for two devices, and trains without a kill: with one process, and with two."""
    from tests.cli.made_rates import write_rates
    from tests.train.small import write_text

    write_text(folder)
    plan = [*PROGRAM, "plan", "tiny", *SMALL, "--on", "cpu:2", "--axes", "fsdp=2", "--set", "model.name=mini"]
    plan += ["--calibration", str(write_rates(folder)), "-o", str(folder / "plan.toml")]
    subprocess.run(plan, check=True, capture_output=True)
    trial, whole = Trial(folder, {}, chance), {}
    for processes in PROCESSES:
        root = folder / f"whole-{processes}"
        root.mkdir()
        trial.end(processes, root)  # fills the caches
        shutil.rmtree(root / "mini-001")
        began = time.monotonic()
        child = trial.start(processes, root, folder / "cache")
        while not _written(root / "mini-001"):
            assert child.poll() is None, (root / "said.txt").read_text()
            time.sleep(0.01)
        trial.start_s[processes] = time.monotonic() - began
        whole[processes] = _ended(json.loads(child.communicate(timeout=LONGEST_S)[0]), root / "mini-001")
    return trial, whole


def main(num_kills: int, seed: int, say: Callable[[str], None] = print) -> Counter[Kill]:
    """Kills ``num_kills`` times and returns how often each was done. Raises AssertionError at the first difference."""
    chance, done, runs = random.Random(seed), Counter[Kill](), 0
    with tempfile.TemporaryDirectory() as name:
        trial, whole = prepare(Path(name), chance)
        assert whole[1].steps == list(range(1, STEPS + 1))
        while done.total() < num_kills:
            processes, runs = chance.choice(PROCESSES), runs + 1
            root = trial.folder / f"run-{runs}"
            root.mkdir()
            kills = []
            for _ in range(min(chance.randint(3, 7), num_kills - done.total())):
                rank = chance.randrange(-1, processes) if processes > 1 else 0
                kills.append(Kill(processes, chance.choice(PARTS), rank))
            for kill in sorted(kills, key=lambda kill: kill.part == "end"):
                if trial.kill(kill, root):
                    done[kill] += 1
            assert trial.end(processes, root) == whole[processes], (root, kills)
            say(f"run {runs}: {processes} processes, {done.total()} kills so far, the same bits")
            shutil.rmtree(root)
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for kill, count in sorted(main(asked.kills, asked.seed).items()):
        print(
            f"{count:4} {kill.processes} processes, {kill.part}, {'launch' if kill.rank < 0 else f'rank {kill.rank}'}"
        )
