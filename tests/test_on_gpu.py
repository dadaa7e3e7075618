"""The benchmarks of a GPU run whole at toy size, here and as on a machine without a network."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("kernels", "train", "serve", "bench", "trace")
NO_TORCH = "" if find_spec("torch") else "torch and transformers are not installed"
MOST_FILES = 8
MOST_CPU_S = 2 * 300
"""Five minutes of two cores."""
THERE = (
    *("jax==0.11.2", "numpy", "scipy", "click", "jaxtyping", "jinja2", "narwhals", "optax", "orbax-checkpoint"),
    *("packaging", "prometheus-client", "rich", "safetensors", "tokenizers"),
)
"""What a machine with Python 3.12 and JAX 0.11.2 has of what meshwright needs, but for torch and transformers."""


def on_gpu(out: Path, *arguments: str, python: str = sys.executable, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """The script, started as a user starts it: without what `conftest` sets for this process."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_", "PYTEST_"))}
    env |= {"OUT": str(out), "PYTHON": python, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        ["bash", "benchmarks/on_gpu.sh", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=900
    )


def check(found: subprocess.CompletedProcess, out: Path) -> None:
    """All parts ended well, and left what they found."""
    assert found.returncode == 0, found.stdout + found.stderr
    for part in PARTS:
        kept = json.loads((out / f"{part}.json").read_text())
        assert kept["cases"]
        assert not re.search(rf'"error": "(?!{NO_TORCH})', json.dumps(kept)), kept["cases"]
        (last,) = (line for line in found.stdout.splitlines() if line.startswith(f"{part}: ") and "; goal: " in line)
        assert kept["figure"] in last
        assert kept["goal"] in last
    assert "kernels: 31 of 31 right" in found.stdout
    assert len(list(out.iterdir())) <= MOST_FILES
    assert (out / "on_gpu.txt").read_text() in found.stdout


def test_unknown_parts_are_refused(tmp_path):
    found = on_gpu(tmp_path, "--tiny", "trains")
    assert found.returncode == 2
    assert found.stderr == "on_gpu.sh has no part 'trains'. Use --tiny, kernels, train, serve, bench or trace.\n"


def test_a_machine_without_a_gpu_is_refused(tmp_path):
    found = on_gpu(tmp_path, "serve")
    assert found.returncode == 1
    assert "JAX runs on cpu: an NVIDIA GPU is needed, or --tiny to see the program run." in found.stdout


@pytest.mark.slow
def test_every_part_runs_at_toy_size(tmp_path):
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    check(on_gpu(tmp_path, "--tiny"), tmp_path)
    assert sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before < MOST_CPU_S


@pytest.mark.slow
def test_every_part_runs_where_wheels_are_all_there_is(tmp_path):
    python = shutil.which("python3.12")
    if not python or subprocess.run([python, "--version"], capture_output=True).returncode:  # a shim may stand for none
        pytest.skip("there is no Python 3.12")
    there, tree = tmp_path / "there", tmp_path / "tree"
    subprocess.run([python, "-m", "venv", there], check=True)
    subprocess.run([there / "bin" / "pip", "install", "--quiet", *THERE], check=True)
    subprocess.run(["git", "clone", "--quiet", ROOT, tree], check=True)
    packed = subprocess.run(["bash", "benchmarks/pack_gpu.sh"], cwd=tree, env={**os.environ, "PYTHON": sys.executable})
    assert packed.returncode == 0
    out = tmp_path / "out"
    check(on_gpu(out, "--tiny", python=str(there / "bin" / "python"), cwd=tree), out)
