"""Two servers of one model behind routers, with every policy that needs no events of the cache."""

import os
import socket
import subprocess
import time

import httpx
import openai
import pytest

from tests.clients.conftest import CLIENTS
from tests.clients.folder import NAME
from tests.clients.server import Server

APART = "prefill and decode apart"
POLICIES = {
    "vllm-router": (
        *("random", "round_robin", "cache_aware", "power_of_two", "consistent_hash", "sticky_least_loaded"),
        APART,
    ),
    "smg": (
        *("random", "round_robin", "passthrough", "cache_aware", "power_of_two", "least_load", "manual"),
        *("consistent_hashing", "prefix_hash"),
    ),
}
MESSAGES = [{"role": "user", "content": "What is a mesh?"}]


@pytest.fixture(scope="module")
def workers(folder, tmp_path_factory):
    logs, options = tmp_path_factory.mktemp("workers"), ("--max-requests", "4", "--token-budget", "16")
    with Server(folder, *options, log=logs / "first") as first, Server(folder, *options, log=logs / "second") as second:
        yield first.url, second.url


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.fixture
def router(request, workers, tmp_path):
    command, policy = request.param
    path, port = CLIENTS / "bin" / command, free_port()
    if not path.exists():
        pytest.skip(f"{command} is not installed: make test-clients installs it")
    given = [str(path), *(["launch"] if command == "smg" else []), "--host", "127.0.0.1", "--port", str(port)]
    given += ["--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1"]
    if policy == APART:
        given += ["--vllm-pd-disaggregation", "--prefill", workers[0], "--decode", workers[1]]
    else:
        given += ["--policy", policy, "--worker-urls", *workers]
    environment = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(given, env=environment, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        until = time.monotonic() + 60
        while not _answers(url):
            has_ended = process.poll() is not None or time.monotonic() > until
            assert not has_ended, (tmp_path / "log").read_text()[-4_000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _answers(url):
    try:
        body = {"model": NAME, "prompt": "A", "max_tokens": 1}
        return httpx.post(url + "/completions", json=body, timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("router", [(name, one) for name in POLICIES for one in POLICIES[name]], indirect=True, ids=str)
def test_answers_come_through_a_router(router, workers):
    given = {"model": NAME, "max_tokens": 6, "temperature": 0}
    with openai.OpenAI(base_url=workers[0] + "/v1", api_key="any", max_retries=0) as api:
        text = api.completions.create(prompt="A mesh is", **given).choices[0].text
        said = api.chat.completions.create(messages=MESSAGES, **given).choices[0].message.content
    with openai.OpenAI(base_url=router, api_key="any", max_retries=0) as api:
        for _ in range(2):
            assert api.completions.create(prompt="A mesh is", **given).choices[0].text == text
            stream = api.completions.create(prompt="A mesh is", stream=True, **given)
            assert "".join(one.choices[0].text for one in stream) == text
            assert api.chat.completions.create(messages=MESSAGES, **given).choices[0].message.content == said
            stream = api.chat.completions.create(messages=MESSAGES, stream=True, **given)
            assert "".join(one.choices[0].delta.content or "" for one in stream) == said
        more = {"min_tokens": 4, "ignore_eos": True, "top_k": 5}
        found = api.completions.create(prompt="A mesh is", n=2, stop=["zz"], logprobs=2, extra_body=more, **given)
        assert [len(one.logprobs.tokens) for one in found.choices] == [6, 6]
