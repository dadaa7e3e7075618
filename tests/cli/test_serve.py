"""`meshwright serve` and `compile` as a user calls them: a folder, a request, a signal."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.nn.hf.weights import save_hf
from meshwright.serve.opening import EngineOptions, open_engine
from meshwright.serve.request import TokenRequest
from tests.parallel.generate_cases import LLAMA, float_params, likeliest

ONE = {"tensor": 1}
LIMITS = ["--max-len", "32", "--max-requests", "2", "--token-budget", "16", "--host-cache-bytes", "1MB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "tiny"
    save_hf(LLAMA, float_params(LLAMA), path)
    return path


def test_a_folder_is_opened_with_what_its_pages_hold(folder):
    sizes = {"max_requests": 2, "token_budget": 16, "cache_bytes": 200_000, "page_len": 8}
    opened = open_engine(folder, EngineOptions(mesh=ONE, **sizes))
    assert "limited by cache_bytes" in opened.lines[1]
    prompt = [5, 9, 60]
    (outputs,) = opened.engine.run([TokenRequest(prompt=tuple(prompt), max_tokens=4)])
    assert [one.token for one in outputs] == likeliest(LLAMA, float_params(LLAMA), prompt, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_len": 32, "host_cache_bytes": 10.0}, "host_cache_bytes=10 keep pages of prompts"),
        ({"max_len": 4096}, "has 2,048 positions"),
        ({"max_len": 64, "cache_bytes": 1000.0}, "one request of 64 positions needs"),
        ({"max_requests": 40, "token_budget": 16}, "token_budget=16 is less than max_requests=40"),
        ({"batch_invariant": True, "token_budget": 64}, "steps of at most 32 tokens"),
        ({"cache_dtype": "fp9"}, "fp9"),
    ],
)
def test_options_that_contradict_each_other_are_one_line(folder, options, words):
    with pytest.raises(InputError, match=words):
        open_engine(folder, EngineOptions(mesh=ONE, **options))


def test_the_verbs_compile_serve_and_drain(folder, tmp_path):
    """Without JAX's own cache, as a user has it: the second verb reads what the first has written."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION", "XLA_FLAGS"))}
    environment |= {"MESHWRIGHT_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "meshwright"]
    done = subprocess.run(
        [*command, "compile", str(folder), *LIMITS], env=environment, capture_output=True, text=True, check=True
    )
    assert "programs compiled, 0 were there" in done.stderr
    names = {path.relative_to(tmp_path): path.stat().st_mtime_ns for path in tmp_path.rglob("*.program")}
    assert names
    with (tmp_path / "said").open("w+") as said:
        server = subprocess.Popen(
            [*command, "serve", str(folder), *LIMITS, "--port", "0"], env=environment, stdout=said, stderr=said
        )
        try:
            until = time.monotonic() + 60
            while "serving tiny at " not in (text := (tmp_path / "said").read_text()):
                assert server.poll() is None, text
                assert time.monotonic() < until, text
                time.sleep(0.1)
            url = text.split("serving tiny at ")[1].split()[0]
            body = {"prompt": [5, 9, 60], "max_tokens": 4, "temperature": 0}
            asked = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            answer = json.loads(urllib.request.urlopen(asked, timeout=60).read())
            expected = likeliest(LLAMA, float_params(LLAMA), [5, 9, 60], 4)
            assert answer["choices"][0]["text"] == "".join(f" {token}" for token in expected)
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
    after = {path.relative_to(tmp_path): path.stat().st_mtime_ns for path in tmp_path.rglob("*.program")}
    assert after == names  # nothing was compiled again
