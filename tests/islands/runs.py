"""Starts a membership service and toy islands as processes, and reads what they wrote."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from meshwright.islands.ledger import sample_numbers
from meshwright.islands.service import Bounds
from tests.islands.toy import value
from tests.test_architecture import ROOT


class ToyRun:
    """A service and islands of toys; `close` kills all."""

    def __init__(
        self,
        folder: Path,
        bounds: Bounds,
        *,
        steps: int,
        step_s: float = 0.03,
        processes: int = 1,
        address: str = "",
    ) -> None:
        self.folder, self.bounds, self.steps, self.step_s, self.processes = folder, bounds, steps, step_s, processes
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = address or f"127.0.0.1:{probe.getsockname()[1]}"
        self.children: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        self.service: subprocess.Popen[bytes] | None = None
        self.everyone: list[subprocess.Popen[bytes]] = []
        self.said = (folder / "service.txt").open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.everyone:
            child.kill()
            child.wait()
        self.said.close()

    def _env(self, **more: str) -> dict[str, str]:
        own = {
            "MESHWRIGHT_SERVICE": self.address,
            "MESHWRIGHT_KEY": "k",
            "MESHWRIGHT_ISLANDS": "4",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        }
        return os.environ | own | more

    def serve(self, *, restarted: bool = False, network: str = "") -> None:
        """Starts the service, in a network namespace if one is named."""
        bounds = msgspec.structs.replace(self.bounds, restarted=restarted)
        program = [sys.executable, "-m", "meshwright.islands", self.address, msgspec.json.encode(bounds).decode()]
        program = [*_within(network), *program]
        self.service = subprocess.Popen(program, env=self._env(), stderr=self.said, cwd=ROOT)
        self.everyone.append(self.service)

    def start(self, island: int, *, every: int = 0, settings: dict[str, str] | None = None, network: str = "") -> None:
        """Starts all processes of an island."""
        for process in range(self.processes):
            words = [str(self.folder), self.steps, self.step_s, process, self.processes, every]
            program = [*_within(network), sys.executable, "-m", "tests.islands.toy", *map(str, words)]
            program += [json.dumps(settings)] if settings else []
            env = self._env(MESHWRIGHT_ISLAND=str(island))
            self.children[island, process] = subprocess.Popen(program, env=env, stderr=self.said, cwd=ROOT)
            self.everyone.append(self.children[island, process])

    def kill(self, island: int, signal_number: int = signal.SIGKILL) -> None:
        """Sends a signal to all processes of an island."""
        for process in range(self.processes):
            self.children[island, process].send_signal(signal_number)

    def wait(self, *islands: int, timeout_s: float = 60) -> None:
        """Waits for the end of islands. Raises AssertionError unless they end well."""
        for (island, process), child in self.children.items():
            if not islands or island in islands:
                assert child.wait(timeout_s) == 0, (island, process, self.text())

    def until(self, text: str, timeout_s: float = 30) -> None:
        """Waits until the service or an island has said a text."""
        end = time.monotonic() + timeout_s
        while text not in self.text():
            assert time.monotonic() < end, f"{text!r} is not in: {self.text()}"
            time.sleep(0.02)

    def until_step(self, step: int, timeout_s: float = 60) -> None:
        """Waits until some island has done a step."""
        end = time.monotonic() + timeout_s
        while max((line["step"] for line in self.lines()), default=0) < step:
            assert time.monotonic() < end, self.text()
            time.sleep(0.02)

    def text(self) -> str:
        """Returns what the service and the islands have written to standard error."""
        return (self.folder / "service.txt").read_text()[-4000:]

    def lines(self) -> list[dict[str, Any]]:
        """Returns the records of steps of all processes, in order of time."""
        texts = [path.read_text() for path in self.folder.glob("log-*.jsonl")]
        records = [json.loads(line) for text in texts for line in text.splitlines() if line.endswith("}")]
        return sorted(records, key=lambda record: record["at"])

    def require_whole(self) -> None:
        """Asserts that all islands that ended hold one state, and that it is that of each sample once."""
        states = [np.load(path) for path in self.folder.glob("end-*.npy")]
        assert states
        assert all(np.array_equal(state, states[0]) for state in states)
        blocks_by_step = {line["step"]: line["blocks"] for line in self.lines()}  # later lines count
        assert sorted(blocks_by_step) == list(range(1, self.steps + 1))
        done = [n for blocks in blocks_by_step.values() for block in blocks.values() for n in sample_numbers(block)]
        samples, left = self.lines()[-1]["ledger"]
        assert sorted([*done, *sample_numbers(left)]) == list(range(samples))
        assert np.array_equal(states[0], sum(value(number) for number in done))


def _within(network: str) -> list[str]:
    return ["ip", "netns", "exec", network] if network else []
