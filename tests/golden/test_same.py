"""The golden file that is made in seconds: the steps of 212 derivations."""

import subprocess
import sys

from tests.golden import environment


def test_derived_steps_are_the_golden_file():
    """In a process of its own, whose environment the comparison fixes."""
    command = [sys.executable, "-m", "tests.golden.compare", "steps"]
    done = subprocess.run(command, cwd=environment.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
