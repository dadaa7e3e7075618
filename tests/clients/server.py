"""`meshwright serve` as a process of its own, on a free port of the loopback."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).parents[2]
FIGURE = re.compile(r"^vllm:(\w+?)(?:_total)?\{[^}]*\} (\S+)$", re.MULTILINE)


class Server:
    """A running server; as a context, ends it by SIGTERM, and fails if it did not end well."""

    def __init__(self, folder: Path, *options: str, log: Path | None = None) -> None:
        python = f"{ROOT / 'src'}:{ROOT}"
        self.log = log or folder.parent / "serve.log"
        command = [sys.executable, "-m", "meshwright", "serve", str(folder), "--port", "0", *options]
        environment = {**os.environ, "PYTHONPATH": python, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, text=True)
        self.url = self._ready()

    def _ready(self, most_s: float = 300.0) -> str:
        until = time.monotonic() + most_s
        while time.monotonic() < until and self.process.poll() is None:
            if found := re.search(r"^.*serving \S+ at (\S+)", self.log.read_text(), re.MULTILINE):
                return found[1]
            time.sleep(0.1)
        self.process.kill()
        raise AssertionError(f"the server did not start: {self.log.read_text()}")

    def get(self, path: str) -> bytes:
        """The body of a GET."""
        with urlopen(self.url + path, timeout=30) as answer:
            return answer.read()

    def figures(self) -> dict[str, float]:
        """Plain figures of /metrics, by their names without vLLM's prefix."""
        return {name: float(value) for name, value in FIGURE.findall(self.get("/metrics").decode())}

    def rest(self, most_s: float = 30.0) -> dict[str, float]:
        """Waits until nothing runs or waits; returns the figures then."""
        until = time.monotonic() + most_s
        while True:
            found = self.figures()
            if not found["num_requests_running"] and not found["num_requests_waiting"]:
                return found
            assert time.monotonic() < until, found
            time.sleep(0.1)

    def _ticks(self) -> int:
        """Time that the process has computed for, in ticks of the kernel's clock."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def compile_all(self, most_s: float = 300.0) -> None:
        """Waits until the process is idle: the programs that are compiled beside the first answers are there."""
        until, before = time.monotonic() + most_s, -os.sysconf("SC_CLK_TCK")
        while (now := self._ticks()) - before > os.sysconf("SC_CLK_TCK") // 4:
            assert time.monotonic() < until, "the server is still busy"
            before = now
            time.sleep(1)

    def memory_bytes(self) -> int:
        """Resident memory of the process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(self, most_s: float = 90.0) -> int:
        """Sends SIGTERM; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(most_s)

    def lines(self) -> list[dict]:
        """Lines of the request log."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            status = self.stop()
        finally:
            self.process.kill()
        if kind is None:
            said = self.log.read_text()
            assert status == 0, said
            assert "Traceback" not in said, said
