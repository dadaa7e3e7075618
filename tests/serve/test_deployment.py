"""The container and the SLURM job of `examples/serve`: what they copy is there, what they call takes those options."""

import ast
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright.cli.verbs import compile, serve
from tests.test_architecture import ROOT

FOLDER = ROOT / "examples" / "serve"


def instructions() -> list[tuple[str, str]]:
    """Returns the Dockerfile's instructions without comments, continued lines as one."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def of(name: str) -> list[str]:
    return [rest for one, rest in instructions() if one == name]


def options(verb, words: list[str]) -> dict:
    return verb.make_context("verb", words).params


def test_the_container_copies_what_the_package_is_built_from():
    copied = [source for rest in of("COPY") for source in rest.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    project = (ROOT / "pyproject.toml").read_text()
    needed = {"requirements.lock", "pyproject.toml", "src"} | set(re.findall(r'"(README.md|LICENSE)"', project))
    assert needed == set(copied)


def test_the_container_serves_on_its_port_as_another_user():
    (entry,), (command,), (port,), (user,) = of("ENTRYPOINT"), of("CMD"), of("EXPOSE"), of("USER")
    verb, *words = json.loads(entry)[1:] + json.loads(command)
    given = options(serve.command, words)
    assert (verb, given["host"], given["port"] or 8000) == ("serve", "0.0.0.0", int(port))
    assert user.isdigit()
    assert int(user) > 0
    (health,) = of("HEALTHCHECK")
    assert f":{port}/health" in health
    compiled = json.loads(health.partition("CMD ")[2])
    assert compiled[:2] == ["python", "-c"]
    ast.parse(compiled[2])
    assert of("VOLUME") == [of("ENV")[0].removeprefix("MESHWRIGHT_CACHE=")]


def test_the_job_compiles_and_serves_with_the_same_options(tmp_path):
    """A `srun` of the test writes what it is given; the job's own lines run."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    srun.chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "123045", "HOME": str(tmp_path)}
    job = [bash, FOLDER / "serve.sbatch"]
    wrong = subprocess.run(job, env=env, capture_output=True, text=True)
    assert wrong.returncode != 0
    assert "usage: " in wrong.stderr
    said = subprocess.run([*job, "a model", "--max-len", "64"], env=env, capture_output=True, text=True, check=True)
    assert ":8045 " in said.stdout
    first, second = (line.split() for line in Path(tmp_path / "calls").read_text().splitlines())
    assert (first[:2], second[:2]) == (["meshwright", "compile"], ["meshwright", "serve"])
    assert options(compile.command, ["model", *first[4:]])["max_len"] == 64
    given = options(serve.command, ["model", *second[4:]])
    assert (given["max_len"], given["port"]) == (64, 8045)
    seconds = int(re.findall(r"--signal=TERM@(\d+)", (FOLDER / "serve.sbatch").read_text())[0])
    assert given["drain"] < seconds


def test_the_page_has_the_names_that_vllm_gives_options():
    page = (ROOT / "docs" / "serve.md").read_text()
    rows = re.findall(r"^\| `(--[a-z-]+)[^`]*` \| `(--[a-z-]+)` \|", page, re.MULTILINE)
    assert len(rows) > 8
    assert set(rows) <= {tuple(option.opts) for option in serve.command.params}
