"""Kills processes of islands with SIGKILL, at any moment, and looks whether runs go on to the same bits.

    python -m tests.kills.islands [--kills 100] [--seed 0]

All islands are required, so that a step waits for who was killed, and the batch stays whole: losses, samples, weights
must be those of a run that nothing interrupted. A kill is meant for one process, for all at once (the run then goes on
from its newest checkpoint, which may just be being written), or for the membership service. A third of the kills is of
islands of one process, the others are of islands of two processes with fsdp inside.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.cli.made_rates import write_rates
from tests.cli.verbs.test_launch_islands import CONFIG

STEPS, EVERY, KILLS_OF_A_RUN = 300, 10, 5
LONGEST_S, MOST_WAIT_S = 900, 12.0


class Case(NamedTuple):
    """Islands, and processes of each."""

    islands: int
    processes: int

    @property
    def name(self) -> str:
        """Short."""
        return f"{self.islands}x{self.processes}"


CASES = (Case(2, 1), Case(1, 2), Case(2, 2))


class Ended(NamedTuple):
    """What a run that ended holds, by step: losses, samples; and the digest of its weights."""

    losses: list[float]
    samples: list[dict[str, Any]]
    weights: str


def meshwright(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Starts the command line in a folder; what it says goes to a file there."""
    with (folder / "said.txt").open("ab") as said:
        return subprocess.Popen([sys.executable, "-m", "meshwright", *words], cwd=folder, stdout=said, stderr=said)


def make_plan(folder: Path, case: Case) -> None:
    """Writes the plan of a case."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_rates(folder)
    on = f"{case.islands}*cpu:{case.processes}@10Gbit/s" if case.islands > 1 else f"cpu:{case.processes}"
    words = ["plan", "config.json", "--on", on, "--batch", "8seq", "--seq", "32", "-o", f"{case.name}.toml"]
    words += ["--set", "strategy.state=fp32", "--set", f"strategy.fsdp={case.processes}", "--calibration", "cpu.toml"]
    child = meshwright(folder, *words)
    assert child.wait(120) == 0, (folder / "said.txt").read_text()


def start(folder: Path, case: Case, runs: str) -> subprocess.Popen[bytes]:
    """Starts the run of a case."""
    number = case.islands * case.processes
    words = ["launch", "-n", str(number), "--islands", str(case.islands), "--elastic", "--min", str(case.islands)]
    words += ["--devices", "1", "--", "train", f"{case.name}.toml", "--steps", str(STEPS), "--runs", runs]
    words += ["--set", f"train.checkpoint_every={EVERY}"]
    if case.islands == 1:  # what is lost is in no other island: it has states nearer than its checkpoints
        words += ["--set", "train.local_every=3", "--set", f"train.local_folder={folder / 'near'}"]
    return meshwright(folder, *words)


def processes_of(folder: Path, launcher: int) -> dict[str, int]:
    """Returns the processes that a launcher keeps, the service under "service"."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            variables = dict(v.split(b"=", 1) for v in (path / "environ").read_bytes().split(b"\0") if b"=" in v)
            if parent == launcher and b"MESHWRIGHT_KEY" in variables:
                island, process = variables.get(b"MESHWRIGHT_ISLAND"), variables.get(b"MESHWRIGHT_PROCESS", b"0")
                found["service" if island is None else f"{island.decode()}.{process.decode()}"] = int(path.name)
    return found


def ended(folder: Path, runs: str) -> Ended:
    """Reads what a run left."""
    (run,) = [run for run in (folder / runs).iterdir() if (run / "metrics.jsonl").exists()]
    by_step = {}
    for line in (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]:
        record = json.loads(line)
        assert record["step"] not in by_step, "a step is there twice"
        by_step[record["step"]] = record
    assert sorted(by_step) == list(range(1, STEPS + 1))
    weights = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(run.glob("*.safetensors")))).hexdigest()
    records = [by_step[step] for step in sorted(by_step)]
    return Ended([r["loss"] for r in records], [r["islands"] for r in records], weights)


def kill(folder: Path, launcher: int, chance: random.Random) -> str:
    """Kills something; returns what."""
    found = processes_of(folder, launcher)
    islands = sorted(name for name in found if name != "service")
    if not islands:
        return ""
    what = chance.choices(("one", "all", "service"), (6, 3, 1))[0]
    names = {"one": [chance.choice(islands)], "all": islands, "service": ["service"]}[what]
    for name in names:
        with suppress(ProcessLookupError, KeyError):
            os.kill(found[name], signal.SIGKILL)
    return what


def trial(folder: Path, case: Case, number: int, chance: random.Random) -> list[str]:
    """Runs a case under kills, and compares it with the run that nothing interrupted; returns what was killed."""
    runs, killed = f"runs-{case.name}-{number}", list[str]()
    child = start(folder, case, runs)
    began = time.monotonic()
    while child.poll() is None and time.monotonic() - began < LONGEST_S:
        due = time.monotonic() + chance.uniform(0, MOST_WAIT_S)  # also in the starts between
        while time.monotonic() < due and child.poll() is None:
            time.sleep(0.02)
        if child.poll() is None and len(killed) < KILLS_OF_A_RUN:
            killed += filter(None, [kill(folder, child.pid, chance)])
    assert child.poll() == 0, (child.poll(), (folder / "said.txt").read_text()[-5000:])
    assert ended(folder, runs) == ended(folder, f"runs-{case.name}"), runs
    return killed


def main() -> None:
    """Runs the trials, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", choices=[case.name for case in CASES])
    given = parser.parse_args()
    chance, total = random.Random(given.seed), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [case for case in CASES if given.case in (None, case.name)]
        for case in cases:
            make_plan(folder, case)
            assert start(folder, case, f"runs-{case.name}").wait(LONGEST_S) == 0, (folder / "said.txt").read_text()
        number = 0
        while total < given.kills:
            case = cases[number % len(cases)]
            killed = trial(folder, case, number, chance)
            total, number = total + len(killed), number + 1
            print(f"{case.name}: {', '.join(killed) or 'nothing'} killed; the same bits ({total} kills)", flush=True)


if __name__ == "__main__":
    main()
