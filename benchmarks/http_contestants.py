"""Servers as processes of their own, and an asyncio client that loads them: completions, whole or streamed."""

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np

SERVERS = ("transformers serve", "meshwright serve")
FORMS = ("whole", "stream")
CLIENTS = Path(__file__).parents[1] / ".clients" / "bin" / "python"
"""The environment of `make test-clients`, which has what `transformers serve` needs."""
MOST_START_S = 600


class Completed(NamedTuple):
    """What one request gave: the numbers of its tokens, and seconds from its start to its first bytes of text."""

    tokens: list[int]
    first_s: float


def command_of(kind: str, folder: Path, port: int) -> list[str]:
    """The command of a server."""
    if kind == "meshwright serve":
        bounds = ["--max-requests", "8", "--max-len", "512", "--token-budget", "256"]
        return [sys.executable, "-m", "meshwright", "serve", str(folder), "--port", str(port), *bounds]
    python = str(CLIENTS) if CLIENTS.exists() else sys.executable
    options = ["--continuous-batching", "--device", "cpu", "--dtype", "auto", "--port", str(port)]
    run = "from transformers.cli.transformers import main; main()"
    return [python, "-c", run, "serve", str(folder), "--host", "127.0.0.1", *options]


async def chunks(reader: asyncio.StreamReader) -> Any:
    """Yields the body of an answer as it comes. Raises RuntimeError for an error."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    if " 200 " not in head.partition("\r\n")[0]:
        raise RuntimeError((head + (await reader.read()).decode(errors="replace"))[:2_000])
    if "transfer-encoding: chunked" not in head:
        yield await reader.read()
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def complete(port: int, model: str, prompt: list[int], num_tokens: int, stream: bool) -> Completed:
    """Sends one completion on a connection of its own."""
    body = {"model": model, "prompt": " ".join(map(str, prompt)), "max_tokens": num_tokens, "temperature": 0}
    raw = json.dumps(body | {"stream": stream}).encode()
    started, first_s, text = time.perf_counter(), 0.0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
    async for chunk in chunks(reader):
        first_s = first_s or time.perf_counter() - started
        text += chunk
    writer.close()
    events = [line[6:] for line in text.split(b"\n") if line.startswith(b"data: {")] if stream else [text]
    pieces = [choice["text"] for event in events for choice in json.loads(event)["choices"]]
    return Completed([int(word) for word in "".join(pieces).split()], first_s)


class ServerContestant:
    """A server that is loaded when asked."""

    def __init__(self, kind: str, folder: Path, threads: int) -> None:
        self.model = folder.name if kind == "meshwright serve" else str(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        environment = {"OMP_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        started = time.perf_counter()
        cores = sorted(os.sched_getaffinity(0))[:threads]
        self.process = subprocess.Popen(
            command_of(kind, folder, self.port),
            env={**os.environ, **environment, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        while not self._answers():
            if self.process.poll() is not None or time.perf_counter() - started > MOST_START_S:
                raise RuntimeError(f"{kind} did not start. For transformers serve, run make test-clients first.")
            time.sleep(0.1)
        self.start_s = time.perf_counter() - started

    def _answers(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return answer.status == 200
        except (URLError, OSError):
            return False

    def run(self, given: list[list[int]], num_tokens: int, stream: bool) -> dict[str, Any]:
        """Tokens and seconds of requests that are sent at once, after a short run that is not timed."""

        async def all_of_them(most: int) -> list[Completed]:
            return await asyncio.gather(*(complete(self.port, self.model, one, most, stream) for one in given))

        asyncio.run(all_of_them(8))
        started = time.perf_counter()
        found = asyncio.run(all_of_them(num_tokens))
        seconds = time.perf_counter() - started
        first_s = statistics.median(one.first_s for one in found)
        return {"tokens": [one.tokens for one in found], "seconds": seconds, "first_s": first_s}

    def close(self) -> None:
        """Ends the server."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def same_tokens(one: list[list[int]], other: list[list[int]], num_tokens: int) -> float:
    """The share of tokens that are the same at the same place; one that is missing is another one."""
    rows = [[*row, *[-1] * num_tokens][:num_tokens] for row in one]
    others = [[*row, *[-2] * num_tokens][:num_tokens] for row in other]
    return float((np.array(rows) == np.array(others)).mean())
