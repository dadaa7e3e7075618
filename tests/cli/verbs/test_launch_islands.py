"""`launch --elastic`: real islands, beside one mesh and under faults."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.islands.member import ISLAND, ISLANDS, SERVICE
from tests.cli.made_rates import write_rates

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
PLAN = ("--batch", "12seq", "--seq", "32", "--set", "strategy.state=fp32", "--calibration", "cpu.toml")
CONSTANT = ("--set", "train.schedule=constant", "--set", "train.warmup_steps=1")


def meshwright(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Starts the command line in a folder; what it says goes to a file there."""
    with (folder / "said.txt").open("ab") as said:
        return subprocess.Popen([sys.executable, "-m", "meshwright", *words], cwd=folder, stdout=said, stderr=said)


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[Path]:
    """A plan of three islands on CPUs, in an own folder."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_rates(tmp_path)
    words = ("plan", "config.json", "--on", "3*cpu:1@10Gbit/s", *PLAN, "-o", "islands.toml")
    assert meshwright(tmp_path, *words).wait(120) == 0, (tmp_path / "said.txt").read_text()
    yield tmp_path
    for pid in islands_of(tmp_path).values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def records(folder: Path, runs: str = "runs") -> list[dict[str, Any]]:
    """Returns the lines of metrics of the newest run."""
    for path in sorted(folder.glob(f"{runs}/*/metrics.jsonl")):
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    return []


def islands_of(folder: Path) -> dict[int, int]:
    """Returns the processes of islands that run in a folder."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = dict(v.split(b"=", 1) for v in (path / "environ").read_bytes().split(b"\0") if b"=" in v)
            if (path / "cwd").resolve() == folder and b"MESHWRIGHT_ISLAND" in variables:
                found[int(variables[b"MESHWRIGHT_ISLAND"])] = int(path.name)
    return found


def train_by_hand(folder: Path, plans: Sequence[str], *, steps: int) -> None:
    """Trains islands with a plan each, which `launch` does not start, to the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    own = {SERVICE: address, ISLANDS: str(len(plans)), "XLA_FLAGS": ""}
    service = [sys.executable, "-m", "meshwright.islands", address, json.dumps({"count": len(plans)})]
    with subprocess.Popen(service) as running:
        children = []
        for island, name in enumerate(plans):
            words = [sys.executable, "-m", "meshwright", "train", name, "--steps", str(steps), *CONSTANT]
            children.append(subprocess.Popen(words, cwd=folder, env={**os.environ, **own, ISLAND: str(island)}))
        assert [child.wait(200) for child in children] == [0] * len(plans)
        running.kill()


def until(folder: Path, condition: Any, child: subprocess.Popen[bytes], most_s: float = 120) -> None:
    """Waits until a condition of the lines of metrics holds."""
    end = time.monotonic() + most_s
    while not condition(records(folder)):
        assert time.monotonic() < end, (folder / "said.txt").read_text()[-3000:]
        assert child.poll() is None, (folder / "said.txt").read_text()[-3000:]
        time.sleep(0.05)


def require_once(lines: list[dict[str, Any]]) -> None:
    """Asserts that steps are whole and no sample was taken twice or left out, but what the last fault postponed."""
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    blocks = [block for line in lines for block in line["islands"].values()]
    taken = [number for block in blocks for first, count in block for number in range(first, first + count)]
    assert len(set(taken)) == len(taken)
    assert len(set(range(max(taken) + 1)) - set(taken)) <= 12


def test_islands_have_the_losses_of_one_mesh_and_outlive_their_leader(plan: Path):
    child = meshwright(plan, "launch", "-n", "3", "--elastic", "--devices", "1", "--",
                       "train", "islands.toml", "--steps", "100000", *CONSTANT)  # fmt: skip
    until(plan, lambda lines: len(lines) >= 20, child)
    os.kill(islands_of(plan)[0], signal.SIGKILL)
    until(plan, lambda lines: lines[-1]["islands"].keys() == {"1", "2"}, child)
    until(plan, lambda lines: lines[-1]["islands"].keys() == {"0", "1", "2"}, child)
    child.send_signal(signal.SIGTERM)
    assert child.wait(90) == 75, (plan / "said.txt").read_text()[-3000:]
    lines = records(plan)
    require_once(lines)
    text = (plan / "said.txt").read_text()
    assert "island 0 is out: its process ended or was disconnected; 2 of 3 islands train" in text
    assert "island 0 was killed by SIGKILL; it restarts" in text
    assert "[1] island 1 leads" in text
    words = ("plan", "config.json", "--on", "cpu:3", *PLAN, "--set", "strategy.data=3", "-o", "mesh.toml")
    assert meshwright(plan, *words).wait(120) == 0
    assert meshwright(plan, "train", "mesh.toml", "--steps", "20", "--runs", "one", *CONSTANT).wait(120) == 0
    losses = [[line["loss"] for line in part[:20]] for part in (lines, records(plan, "one"))]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_islands_with_batches_of_their_own_have_the_losses_of_one_mesh(plan: Path):
    words = ("plan", "config.json", "--on", "3*cpu:1@10Gbit/s", *PLAN, "--batch", "24seq", "-o", "large.toml")
    assert meshwright(plan, *words).wait(120) == 0
    words = ("plan", "config.json", "--on", "cpu:1", *PLAN, "--batch", "16seq", "-o", "mesh.toml")
    assert meshwright(plan, *words).wait(120) == 0
    train_by_hand(plan, ("islands.toml", "large.toml", "islands.toml"), steps=12)
    assert meshwright(plan, "train", "mesh.toml", "--steps", "12", "--runs", "one", *CONSTANT).wait(120) == 0
    lines = records(plan)
    assert lines[1]["islands"] == {"0": [[16, 4]], "1": [[20, 8]], "2": [[28, 4]]}
    losses = [[line["loss"] for line in part] for part in (lines, records(plan, "one"))]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes_and_meshes_and_past_a_damaged_checkpoint(plan: Path):
    """Three islands, then one process of three devices, then two processes that split each weight."""
    for name, words in (("mesh", ("cpu:3", "data=3")), ("two", ("cpu:2", "fsdp=2"))):
        plan_words = ("plan", "config.json", "--on", words[0], *PLAN, "--set", f"strategy.{words[1]}", "-o")
        assert meshwright(plan, *plan_words, f"{name}.toml").wait(120) == 0
    assert meshwright(plan, "train", "mesh.toml", "--steps", "20", "--runs", "whole", *CONSTANT).wait(120) == 0
    islands = ("launch", "-n", "3", "--elastic", "--devices", "1", "--", "train", "islands.toml")
    every = ("--set", "train.checkpoint_every=4")
    assert meshwright(plan, *islands, "--steps", "10", *CONSTANT, *every).wait(120) == 0
    (run,) = plan.glob("runs/*")
    largest = max(run.glob("checkpoints/10/state/**/*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(bytes([largest.read_bytes()[0] ^ 1]) + largest.read_bytes()[1:])
    assert meshwright(plan, "train", "mesh.toml", "--resume", str(run), "--steps", "15").wait(120) == 0
    text = (plan / "said.txt").read_text()
    assert "checkpoint 10 is passed over and kept as 10.damaged" in text
    assert "going on from checkpoint 8" in text
    two = ("launch", "-n", "2", "--elastic", "--islands", "1", "--devices", "1", "--", "train", "two.toml")
    assert meshwright(plan, *two, "--resume", str(run), "--steps", "20").wait(120) == 0
    lines = records(plan)
    assert [line["step"] for line in lines] == list(range(1, 21))
    losses = [[line["loss"] for line in part] for part in (lines, records(plan, "whole"))]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
