"""The golden files that are made in seconds: what the verbs say of themselves, and the steps of 212 derivations."""

import subprocess
import sys

from tests.golden import environment


def test_help_and_derived_steps_are_the_golden_files():
    """In a process of its own, whose environment the comparison fixes."""
    command = [sys.executable, "-m", "tests.golden.compare", "help", "steps"]
    done = subprocess.run(command, cwd=environment.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
