"""Processes that join through `jax.distributed`: one mesh, one voice, one moment to stop."""

import json

import pytest

from meshwright.parallel.processes import is_first, shared, start_processes, stop_is_agreed
from tests.parallel.several import Variables, own_variables, run_all


def torchrun(index: int, count: int, port: int) -> dict[str, str]:
    return {"RANK": str(index), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def slurm(index: int, count: int, port: int) -> dict[str, str]:
    """As srun sets them on one node; the port, which JAX makes from the job's number, by JAX's own variable."""
    task = {"SLURM_NTASKS": str(count), "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
    return {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "JAX_COORDINATOR_PORT": str(port), **task}


def open_mpi(index: int, count: int, port: int) -> dict[str, str]:
    world = {"SIZE": count, "RANK": index, "LOCAL_SIZE": count, "LOCAL_RANK": index}
    variables = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in world.items()}
    return {**variables, "PMIX_NAMESPACE": f"prterun-test-{port}@1"}


def kubernetes(index: int, count: int, port: int) -> dict[str, str]:
    """The index is what an indexed Job gives its pods; the rest stands in the pod's template."""
    template = {"MESHWRIGHT_PROCESSES": str(count), "MESHWRIGHT_COORDINATOR": f"localhost:{port}"}
    return {"JOB_COMPLETION_INDEX": str(index), **template}


def meet(count: int, variables: Variables, devices: int = 1) -> list[dict]:
    outcomes = run_all(["-m", "tests.parallel.meeting"], count=count, variables=variables, devices=devices)
    for code, out, error in outcomes:
        assert code == 0, out + error
    return [json.loads(line[5:]) for _, out, _ in outcomes for line in out.splitlines() if line.startswith("said ")]


def check(found: list[dict], count: int, devices: int) -> None:
    assert [said["first"] for said in found] == [True] + [False] * (count - 1)
    assert {said["count"] for said in found} == {count}
    # Devices of a process stand together, so a mesh axis inside a process never leaves it.
    assert {tuple(said["devices"]) for said in found} == {tuple(i for i in range(count) for _ in range(devices))}
    assert {said["shared"] for said in found} == {"a folder that process 0 made"}
    assert {said["raised"] for said in found} == {"the first process found no such file."}
    assert {said["total"] for said in found} == {sum(range(count * devices))}
    (stop,) = {said["stop"] for said in found}
    assert stop >= 2


def test_two_processes_are_one():
    check(meet(2, own_variables, devices=2), 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [torchrun, slurm, open_mpi, kubernetes])
def test_every_launcher_brings_them_together(variables):
    check(meet(2, variables), 2, 1)


@pytest.mark.slow
def test_four_processes_are_one():
    check(meet(4, own_variables), 4, 1)


def test_one_process_agrees_with_itself():
    assert start_processes({}) == 1
    assert is_first()
    assert shared(lambda: "x" * 10_000) == "x" * 10_000
    assert not stop_is_agreed(1)
