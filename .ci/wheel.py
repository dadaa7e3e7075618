"""`make wheel-test`: the wheel in a new environment of each Python, as one who only plans installs it.

    python .ci/wheel.py dist/meshwright-0.1.0-py3-none-any.whl python3.11 python3.12

Installs without pip's cache and plans within 60 s, in at most 130 MB without pip; then no part of the extras is loaded,
and the help of every verb prints without them. Interpreters that this machine lacks are named and passed over.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MOST_S, MOST_BYTES = 60, 130e6
OF_PIP = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")
PLAN = ["plan", "llama3-8b", "--on", "h100:8x4", "--batch", "1Mi", "--seq", "4096"]
AFTER_PLAN = f"""
import sys
from meshwright.cli.main import VERBS, run
assert run({PLAN}) == 0
extras = {{"jax", "jaxtyping", "scipy", "altair", "vl_convert", "starlette"}} & set(sys.modules)
assert not extras, f"plan loads {{extras}}"
assert all(run([verb, "--help"]) == 0 for verb in VERBS)
"""


def test_wheel(python: str, wheel: str) -> None:
    """Says how long the wheel took and how large it is. Raises AssertionError where that is too much."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        start, installed = time.monotonic(), Path(folder) / "bin" / "python"
        subprocess.run([installed, "-m", "pip", "install", "--quiet", "--no-cache-dir", wheel], check=True)
        subprocess.run([installed.with_name("meshwright"), *PLAN], check=True, stdout=subprocess.DEVNULL, cwd=folder)
        seconds = time.monotonic() - start
        (packages,) = Path(folder).glob("lib/*/site-packages")
        parts = [path for path in packages.iterdir() if not path.name.startswith(OF_PIP)]
        files = [path for part in parts for path in (part, *part.rglob("*")) if path.is_file()]
        num_bytes = sum(path.stat().st_size for path in files)
        took = f"{seconds:.0f} s at a load of {os.getloadavg()[0]:.1f}"
        print(f"{python}: installed and planned in {took}, {num_bytes / 1e6:.0f} MB", flush=True)
        assert seconds <= MOST_S, f"more than {MOST_S} s"
        assert num_bytes <= MOST_BYTES, f"more than {MOST_BYTES / 1e6:.0f} MB"
        subprocess.run([installed, "-c", AFTER_PLAN], check=True, stdout=subprocess.DEVNULL, cwd=folder)


def runs(python: str) -> bool:
    """True if the interpreter is there and starts, which a shim need not."""
    try:
        return subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    wheel, *pythons = sys.argv[1:]
    present = [python for python in pythons if runs(python)]
    if missing := sorted({*pythons} - {*present}):
        print(f"not here: {', '.join(missing)}", file=sys.stderr)
    assert present, "none of these Pythons is here"
    for python in present:
        test_wheel(python, wheel)
