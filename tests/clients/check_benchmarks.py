"""Two load generators as clients of `meshwright serve`: guidellm, and vLLM's `bench serve`."""

import json

import pytest

from tests.clients.conftest import CLIENTS
from tests.clients.folder import NAME
from tests.clients.server import ROOT

NUM_REQUESTS, PROMPT_LEN, NUM_TOKENS = 24, 64, 32


@pytest.mark.parametrize("form", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("profile", ["kind=concurrent,streams=4", "kind=poisson,rate=40"])
def test_guidellm(client, server, folder, tmp_path, form, profile):
    before = server.rest()
    client(
        *("guidellm", "run", "--disable-progress", "--profile", profile),
        *("--backend", f"kind=openai_http,target={server.url},request_format={form}"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}", "--tokenizer", f"kind=hf_auto,model={folder}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_LEN},output_tokens={NUM_TOKENS}"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
    )
    (found,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    counts = found["metrics"]["request_totals"]
    assert (counts["successful"], counts["errored"]) == (NUM_REQUESTS, 0)
    rows = found["requests"]["successful"]
    assert {row["output_metrics"]["text_tokens"] for row in rows} == {NUM_TOKENS}
    after = server.rest()
    assert after["generation_tokens"] - before["generation_tokens"] >= NUM_REQUESTS * NUM_TOKENS


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllm_bench_serve(client, server, folder, tmp_path, backend, path):
    if not (CLIENTS / "vllm").is_dir():
        pytest.skip("the files of vLLM's wheel are not there: make test-clients fetches them")
    server.rest()
    client(
        *("python", str(ROOT / "tests" / "clients" / "vllm_bench.py"), str(CLIENTS / "vllm")),
        *("--backend", backend, "--base-url", server.url, "--endpoint", path, "--model", NAME),
        *("--tokenizer", str(folder), "--dataset-name", "random", "--num-prompts", str(NUM_REQUESTS), "--ignore-eos"),
        *("--random-input-len", str(PROMPT_LEN), "--random-output-len", str(NUM_TOKENS), "--max-concurrency", "8"),
        *("--save-result", "--result-filename", str(tmp_path / "report.json"), "--disable-tqdm"),
    )
    found = json.loads((tmp_path / "report.json").read_text())
    assert (found["completed"], found["failed"]) == (NUM_REQUESTS, 0)
    assert found["total_output_tokens"] == NUM_REQUESTS * NUM_TOKENS
    server.rest()
