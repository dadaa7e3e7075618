"""The server as it runs: the `openai` package as its client, and what a signal does to the process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from meshwright.core.errors import InputError
from meshwright.serve.http.run import Listening
from tests.serve.http.fake import FakeEngine, in_loop, listening

ROOT = Path(__file__).parents[3]


@in_loop
async def test_openai_as_a_client():
    async with listening(options={"api_keys": ("key",)}, max_queued=8) as (b, port):
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
            assert [one.id async for one in client.models.list()] == ["toy"]
            done = await client.completions.create(model="toy", prompt="abc", max_tokens=3, logprobs=1, seed=1)
            assert done.choices[0].text == "def"
            assert done.choices[0].logprobs.tokens == ["d", "e", "f"]
            messages = [{"role": "user", "content": "hi"}]
            chat = await client.chat.completions.create(
                **{"model": "toy", "messages": messages, "max_completion_tokens": 3, "logprobs": True, "n": 2},
                **{"top_logprobs": 1, "extra_body": {"top_k": 5, "min_tokens": 1}},
            )
            assert [one.message.content for one in chat.choices] == ["?@A", "?@A"]
            assert chat.usage.total_tokens == chat.usage.prompt_tokens + 6
            stream = await client.chat.completions.create(
                **{"model": "toy", "messages": messages, "max_tokens": 5, "stream": True},
                stream_options={"include_usage": True},
            )
            chunks = [one async for one in stream]
            assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == "?@ABC"
            assert chunks[-1].usage.completion_tokens == 5
            with pytest.raises(openai.BadRequestError, match="positions"):
                await client.completions.create(model="toy", prompt="abc", max_tokens=5_000)
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="abc")
            wrong = client.with_options(api_key="no")
            with pytest.raises(openai.AuthenticationError):
                await wrong.models.list()
        await b.rest()


@in_loop
async def test_openai_sees_an_error_in_a_stream():
    async with listening(FakeEngine(delay_s=0.005)) as (b, port):
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client:
            stream = await client.completions.create(model="toy", prompt="a", max_tokens=400, stream=True)
            await anext(stream)
            b.engine.fails = RuntimeError("gone")
            with pytest.raises(openai.APIError, match="the engine failed: gone"):
                [one async for one in stream]
        assert b.frontend.in_system == 0


SERVER = """
import sys
from meshwright.serve.frontend import Frontend
from meshwright.serve.http.app import make_app
from meshwright.serve.http.run import Listening, serve_app
from tests.serve.http.fake import FakeEngine, served

engine = FakeEngine(delay_s=0.01, max_len=4_000)
if {fails}:
    step = engine.step
    def fail():
        if engine.steps == {fails}:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return step()
    engine.step = fail
frontend = Frontend(engine)
serve_app(make_app(frontend, served()), frontend, Listening(**{where}), on_ready=lambda url: print(url, flush=True))
print("ended")
"""


class Process:
    """A server in a process of its own; ``where`` it says that it listens. Its engine fails after some steps."""

    def __init__(self, fails=0, **where):
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        code = SERVER.replace("{where}", repr(where)).replace("{fails}", str(fails))
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=pipe, stderr=pipe, text=True)
        self.where = self.process.stdout.readline().strip()

    def stream(self, tokens):
        """A socket on which a stream has begun."""
        port = self.where.rpartition(":")[2]
        sock = socket.socket(socket.AF_INET if port.isdecimal() else socket.AF_UNIX)
        sock.connect(("127.0.0.1", int(port)) if port.isdecimal() else self.where)
        raw = json.dumps({"prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        assert sock.recv(10) == b"HTTP/1.1 2"
        return sock

    def ended(self):
        """Waits for the end; returns the exit code, and the rest of both outputs."""
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


def rest_of(sock):
    with sock:
        return b"".join(iter(lambda: sock.recv(65_536), b""))


def test_a_signal_lets_what_runs_finish():
    server = Process(port=0)
    sock = server.stream(40)
    server.process.send_signal(signal.SIGTERM)
    assert b"[DONE]" in rest_of(sock)
    assert server.ended() == (0, "ended\n", "")


def test_what_a_drain_cuts_off_ends_with_an_error():
    server = Process(port=0, drain_s=1)
    sock = server.stream(400)
    server.process.send_signal(signal.SIGTERM)
    assert b"the server stopped before the request was done" in rest_of(sock)
    assert server.ended() == (0, "ended\n", "")


def test_a_second_signal_ends_at_once(tmp_path):
    path = tmp_path / "socket"
    server = Process(uds=str(path))
    assert server.where == str(path)
    sock = server.stream(3000)  # takes 30 s
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    start = time.perf_counter()
    assert server.ended() == (0, "ended\n", "")
    assert time.perf_counter() - start < 12
    assert b"[DONE]" not in rest_of(sock)
    assert not path.exists()


def test_a_server_whose_engine_fails_answers_what_waits_and_ends():
    server = Process(port=0, fails=100)
    stream = server.stream(400)
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    answer = httpx.post(f"{server.where}/v1/completions", json=body, timeout=20)
    assert answer.status_code == 503
    assert "the engine failed: RESOURCE_EXHAUSTED: out of memory." in answer.json()["error"]["message"]
    assert b"the engine failed: RESOURCE_EXHAUSTED: out of memory" in rest_of(stream)
    code, out, err = server.ended()
    assert code != 0
    assert out == ""
    assert err.splitlines()[-1] == (
        "meshwright.core.errors.CannotRunError: the engine failed: RESOURCE_EXHAUSTED: out of memory. "
        "The server has ended; start it again."
    )


def test_an_address_that_is_taken_is_one_line(tmp_path):
    with Listening(port=0).bind() as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(InputError, match=rf"cannot listen on 127.0.0.1:{port}: .*in use. Give another address"):
            Listening(port=port).bind()
    with pytest.raises(InputError, match=r"cannot listen on 127.0.0.1:99999"):
        Listening(port=99_999).bind()
    with pytest.raises(InputError, match=r"cannot listen on .*/no/socket: "):
        Listening(uds=str(tmp_path / "no" / "socket")).bind()
