"""The command as a process: how fast it answers, what it loads, what it says of verbs that are not there."""

import json
import resource
import subprocess
import sys
import time

import pytest

from meshwright import __version__
from meshwright.cli.main import VERBS

LLAMA_PLAN = ["plan", "llama3-70b", "--on", "v5p:16x16x32", "--batch", "4Mi", "--seq", "4096", "--json"]


def answer(*args: str) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """The finished process, its seconds by the clock, and those of the processor."""
    code = "import sys; from meshwright.cli.main import main; sys.argv[0] = 'meshwright'; main()"
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    clock, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_answers_at_once():
    answers = [answer("--help") for _ in range(3)]
    assert min(cpu for _, _, cpu in answers) < 0.3
    for done, _, _ in answers:
        assert done.returncode == 0
        for verb in VERBS:
            assert f"  {verb} " in done.stdout


def test_help_loads_nothing_heavy():
    code = "import sys\nfrom meshwright.cli.main import run\nrun(['--help'])\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert loaded & {"jax", "jaxlib", "numpy", "optax", "rich", "msgspec", "vl_convert"} == set()


def test_a_plan_of_8192_chips_takes_less_than_two_seconds():
    answers = [answer(*LLAMA_PLAN) for _ in range(2)]
    assert min(clock for _, clock, _ in answers) < 2
    top = [one["axes"] for one in json.loads(answers[0][0].stdout)["strategies"][:5]]
    splits = {(axes["data"] * axes["fsdp"] * axes["context"], axes["tensor"]) for axes in top}
    assert splits & {(2048, 4), (1024, 8)}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(call, verb):
    said = call(verb, "--help")
    assert (said.code, said.err) == (0, "")
    assert "--json" in said.out
    assert said.out.startswith(f"Usage: meshwright {verb}")


def test_version(call):
    assert call("--version").out == f"meshwright, version {__version__}\n"


def test_our_own_fault_is_one_line_and_code_1(call, monkeypatch):
    def broken(name):
        raise RuntimeError("something\nwith two lines")

    monkeypatch.setattr("meshwright.cli.show.chip", broken)
    said = call("show", "v5e")
    assert said.code == 1
    assert said.out == ""
    assert said.err.startswith("meshwright: internal error at broken:")
    assert said.err.count("\n") == 1
