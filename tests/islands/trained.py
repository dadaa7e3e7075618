"""Runs of `launch --elastic` with a very small model, whose processes are found, and which write into a folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.cli.made_rates import write_rates
from tests.test_architecture import ROOT
from tests.train.small import write_text

PROGRAM = (sys.executable, "-c", "from meshwright.cli.main import main; main()")
SMALL = (
    "model.num_layers=2", "model.d_model=32", "model.d_ff=64", "model.head_dim=4", "model.vocab_size=300",
    "model.name=mini",
)  # fmt: skip


def sets(*settings: str) -> list[str]:
    """Returns the words that set these."""
    return [word for setting in settings for word in ("--set", setting)]


def write_plan(folder: Path, *words: str) -> Path:
    """Writes a text, rates and a plan."""
    write_text(folder)
    plan = [*PROGRAM, "plan", "tiny", *sets(*SMALL, "strategy.state=fp32"), *words, "--seq", "32"]
    plan += ["--calibration", str(write_rates(folder)), "-o", str(folder / "plan.toml")]
    subprocess.run(plan, check=True, capture_output=True, cwd=ROOT)
    return folder / "plan.toml"


class TrainedRun:
    """A run of islands; `program` is what they run in place of the command line."""

    def __init__(self, folder: Path, launched: Sequence[str], *, steps: int, settings: Sequence[str] = ()) -> None:
        self.folder, self.steps, self.runs = folder, steps, folder / f"runs-{len(list(folder.glob('runs-*')))}"
        self.runs.mkdir()
        words = ["train", str(folder / "plan.toml"), "--data", str(folder / "text.txt"), "--runs", str(self.runs)]
        words += ["--steps", str(steps), *sets("train.held_out=0", "train.log_every=1000", *settings), "--json"]
        self.said = (folder / "said.txt").open("wb")
        self.answer = (folder / "answer.json").open("wb")
        path = f"{Path(__file__).parent / 'faulty'}:{ROOT / 'src'}:{ROOT}"
        env = os.environ | {"MESHWRIGHT_CACHE": str(folder.parent / "cache"), "PYTHONPATH": path}
        command = [*PROGRAM, "launch", *launched, "--elastic", "--devices", "1", "--", *words]
        self.child = subprocess.Popen(
            command, stdout=self.answer, stderr=self.said, env=env, cwd=ROOT, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in [*self.processes().values(), self.child.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.child.wait()
        self.said.close()
        self.answer.close()

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.runs / "mini-001"

    def processes(self) -> dict[tuple[int, int], int]:
        """Returns the process ids by island and process, and that of the service under (-1, 0)."""
        pids = {}
        children = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children")
        for pid in map(int, children.read_text().split() if children.exists() else ()):
            with suppress(OSError):
                variables = dict(
                    entry.split(b"=", 1)
                    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    if b"=" in entry
                )
                island = int(variables.get(b"MESHWRIGHT_ISLAND", b"-1"))
                pids[island, int(variables.get(b"MESHWRIGHT_PROCESS", b"0"))] = pid
        return pids

    def kill(self, island: int, process: int = 0, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a process."""
        os.kill(self.processes()[island, process], number)

    def text(self) -> str:
        """Returns what has been said, on one line."""
        return " ".join((self.folder / "said.txt").read_text(errors="replace").split())

    def until(self, text: str, timeout_s: float = 90) -> None:
        """Waits until a text has been said."""
        end = time.monotonic() + timeout_s
        while text not in self.text():
            assert time.monotonic() < end, f"{text!r} is not in: {self.text()}"
            assert self.child.poll() is None or text in self.text(), self.text()
            time.sleep(0.02)

    def until_step(self, step: int, timeout_s: float = 90) -> None:
        """Waits until a step has been recorded."""
        end = time.monotonic() + timeout_s
        while max((record["step"] for record in self.records()), default=0) < step:
            assert time.monotonic() < end, self.text()
            assert self.child.poll() is None, self.text()
            time.sleep(0.01)

    def records(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics."""
        metrics = self.run / "metrics.jsonl"
        return [json.loads(line) for line in metrics.read_bytes().split(b"\n")[:-1]] if metrics.exists() else []

    def end(self, timeout_s: float = 180) -> dict[str, Any]:
        """Waits for the end, and returns the answer. Raises AssertionError unless the run ends well."""
        assert self.child.wait(timeout_s) == 0, self.text()
        return dict(json.loads((self.folder / "answer.json").read_text()))
