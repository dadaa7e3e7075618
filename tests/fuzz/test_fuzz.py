"""A sample of the mutated inputs of `tests.fuzz.fuzz`; the script runs as many as there is time for."""

import subprocess
import sys

import pytest

from tests.fuzz.fuzz import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_every_input_ends_in_an_answer_or_a_message(seed):
    """A process of its own: the limit on memory is of the whole process."""
    words = ("--seed", seed, "--count", 10_000, "--shell", 20, "--minutes", 15)
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.fuzz", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
