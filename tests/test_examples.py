"""The examples run: each ends well only where its losses, or tokens, are those of one device (`examples/README.md`)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SHARED = "beside_one_device.py"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.*") if path.suffix in (".py", ".sh") and path.name != SHARED)
NO_LOSSES = ("flash_attention.py", "generation.py", "real_model.sh", "without_a_cache.py")
"""Examples that print no two losses; the last one fetches a model, and is run by `make test-clients`."""
LONGEST_S = 600
LOSSES = re.compile(r"^(?: +\d+ +)?(\d+\.\d+)\s+(\d+\.\d+)$", re.MULTILINE)
"""A row of losses: maybe the number of the step, then the loss that was found and the one expected."""


def test_the_table_has_every_example():
    rows = re.findall(r"^\| \[`(\S+)`\]\((\S+)\) \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(name for name, _ in rows) == EXAMPLES
    assert all(name == target for name, target in rows)


def run(name: str, cache: Path, *given: str) -> str:
    """What an example prints, started as a user starts it: without what `conftest` sets for this process; ``given``
    are files that it writes."""
    bin_folder = Path(sys.executable).parent
    env = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_", "PYTEST_"))}
    env |= {"PATH": f"{bin_folder}{os.pathsep}{env['PATH']}", "MESHWRIGHT_CACHE": str(cache)}
    command = [sys.executable if name.endswith(".py") else "sh", name, *(str(cache / file) for file in given)]
    found = subprocess.run(command, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=LONGEST_S)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in NO_LOSSES])
def test_an_example_learns_as_one_device_does(name, tmp_path):
    rows = [(float(first), float(second)) for first, second in LOSSES.findall(run(name, tmp_path))]
    assert len(rows) == 5
    for first, second in rows:
        assert first == pytest.approx(second, rel=2e-5)  # printed with five digits behind the point
    assert rows[-1][0] < rows[0][0]


@pytest.mark.slow
def test_generation_gives_the_tokens_of_one_device(tmp_path):
    said = run("generation.py", tmp_path)
    assert said.splitlines()[-1] == "one device gives the same tokens"
    assert len(re.findall(r"^\[.*\] -> \[(?:\d+, ){11}\d+\]$", said, re.MULTILINE)) == 4


@pytest.mark.slow
def test_a_cache_makes_the_time_of_a_token_flat(tmp_path):
    rows = re.findall(
        r"^ *(\d+) +([\d.]+) ms +([\d.]+) ms$", run("without_a_cache.py", tmp_path, "drawn.png"), re.MULTILINE
    )
    (_, cached, first), *_, (_, last_cached, last) = (tuple(map(float, row)) for row in rows)
    assert len(rows) == 5
    assert last / first > 4
    assert last_cached / cached < last / first / 2
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
