"""What each half needs is installed by need: without any extra every verb has its help, and says what it lacks."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshwright.core.extras import EXTRAS
from tests.test_house import NOT_IMPORTED

ROOT = Path(__file__).parents[2]
PACKAGES = sorted({name for names in EXTRAS.values() for name in names})
HELP = "from meshwright.cli.main import VERBS, run\nsys.exit(max(run([verb, '--help']) for verb in VERBS))"
RUN = "from meshwright.cli.main import run\nsys.exit(run(sys.argv[1:]))"
PLAN = ("plan", "tiny", "--on", "h100:8", "--batch", "64seq", "--seq", "64")


def base(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A program in an environment that has no package of any extra."""
    program = f"import sys\nsys.modules.update(dict.fromkeys({PACKAGES}))\n{program}"
    return subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True)


def test_every_verb_is_imported_without_extras():
    done = base(HELP)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["train", "plan.toml"], "train needs JAX: pip install 'meshwright[run]'"),
        (["serve", "folder"], "serve needs JAX: pip install 'meshwright[serve]'"),
        (["bench"], "bench machine needs JAX: pip install 'meshwright[run]'"),
        (
            ["explain", "tiny", "--on", "cpu:4", *PLAN[4:]],
            "measuring this machine as cpu:4 needs JAX: pip install 'meshwright[run]'",
        ),
        (["mask", "causal", "--run"], "--run needs JAX: pip install 'meshwright[run]'"),
        ([*PLAN, "--png", "plan.png"], "drawing plan.png needs altair: pip install 'meshwright[draw]'"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_computed(args, line, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    done = base(RUN, *args)
    assert (done.returncode, done.stderr) == (2, f"meshwright: {line}\n")
    assert ("strategy, best first" in done.stdout) == (args[0] == "plan")  # a table does not wait for its picture


@pytest.mark.parametrize(
    ("code", "name"),
    [("TrainStep", "meshwright.TrainStep needs jax"), ("generate_text('a', ['b'])", "generate_text needs JAX")],
)
def test_python_says_what_is_missing(code, name):
    assert f"{name}: pip install 'meshwright[run]'" in base(f"import meshwright as mw\nmw.{code}").stderr


def test_extras_are_those_of_the_project():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        wanted = {re.split(r"[\[>=<]", one)[0] for one in [*listed[extra], *(listed["run"] * (extra == "serve"))]}
        assert {NOT_IMPORTED.get(one, one) for one in wanted} - {"meshwright"} == set(packages)
    assert listed["all"] == ["meshwright[" + ",".join(extra for extra in EXTRAS if extra != "run") + "]"]
