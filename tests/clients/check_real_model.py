"""`examples/real_model.sh`: Gemma 3 270M from PyPI is read, served, fine-tuned, served with its adapter, converted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.server import ROOT

FOLDER = Path(os.environ.get("REAL_MODEL", ROOT / "runs" / "real"))
"""Where the model is kept from one run to the next: 253 MB of GGUF, and 0.5 GB that the script converts."""
LONGEST_S = 3_600


@pytest.fixture(scope="module")
def said():
    """What the script prints, started as a reader starts it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_", "PYTEST_"))}
    environment |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}", "PORT": "8139"}
    command = ["sh", "examples/real_model.sh", str(FOLDER)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_base_model_answers(said):
    answer = next(json.loads(line) for line in said.splitlines() if line.startswith('{"id":"cmpl-'))
    assert answer["choices"][0]["text"].startswith(" the capital of the country of France.")  # as in transformers
    assert answer["usage"]["prompt_tokens"] == 6  # with the token that begins a text


def test_the_adapter_answers_in_the_form_of_its_chats(said):
    counts = {
        line.split(":")[0]: int(line.split()[1]) for line in said.splitlines() if line.endswith("answers in form")
    }
    assert counts["gemma"] == 0
    assert counts["colours"] >= 18


@pytest.mark.peer
def test_transformers_reads_what_was_converted(said):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
    folder = FOLDER / "merged"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": "What colour is a lime?"}]
    given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**given, do_sample=False, max_new_tokens=32)[0, given["input_ids"].shape[1] :]
    assert json.loads(tokenizer.decode(tokens, skip_special_tokens=True))["thing"] == "lime"
