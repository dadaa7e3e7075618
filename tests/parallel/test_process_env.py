"""Who a process is, by the variables of every launcher, and the traps that each of them sets."""

import pytest

from meshwright.core.errors import InputError
from meshwright.parallel.process_env import Processes, find_processes

OWN = {"MESHWRIGHT_COORDINATOR": "10.0.0.1:7000", "MESHWRIGHT_PROCESSES": "4", "MESHWRIGHT_PROCESS": "3"}
RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node7", "MASTER_PORT": "2000"}
SLURM = {
    **{"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2"},
    **{"SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
}
# What mpirun of Open MPI 5 sets for process 1 of 2 on one host.
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_NAMESPACE": "prterun-host-17@1"},
}


def test_nothing_set_is_one_process():
    assert find_processes({}) is None
    assert find_processes({"MESHWRIGHT_PROCESSES": "1"}) is None
    assert find_processes({**RANK, "RANK": "0", "WORLD_SIZE": "1"}) is None
    assert find_processes({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


def test_our_own_variables_come_first():
    found = find_processes({**RANK, **SLURM, **OPEN_MPI, **OWN})
    assert found == Processes(source="meshwright", count=4, index=3, coordinator="10.0.0.1:7000")
    assert find_processes({**RANK, **SLURM, **OPEN_MPI}).source == "RANK and WORLD_SIZE"
    assert find_processes({**SLURM, **OPEN_MPI}).source == "Open MPI"


def test_one_process_may_be_asked_for_inside_a_job():
    assert find_processes({**SLURM, "MESHWRIGHT_PROCESSES": "1"}) is None


def test_kubernetes_gives_the_index_of_the_pod():
    job = {"JOB_COMPLETION_INDEX": "2", "MESHWRIGHT_PROCESSES": "4", "MESHWRIGHT_COORDINATOR": "run-0.run"}
    found = find_processes(job)
    assert found == Processes(source="Kubernetes", count=4, index=2, coordinator="run-0.run:8476")
    assert find_processes({"JOB_COMPLETION_INDEX": "2"}) is None


def test_torchrun_keeps_the_port_of_the_master_for_itself():
    assert find_processes(RANK) == Processes(
        source="RANK and WORLD_SIZE", count=2, index=1, coordinator="node7:2000", local_devices=None
    )
    agent = {**RANK, "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert find_processes(agent) == Processes(
        source="RANK and WORLD_SIZE", count=2, index=1, coordinator="node7:2001", local_devices=(1,)
    )


def test_open_mpi_on_one_host_needs_no_address():
    found = find_processes(OPEN_MPI)
    assert (found.count, found.index, found.local_devices) == (2, 1, (1,))
    host, port = found.coordinator.split(":")
    assert host == "127.0.0.1"
    assert 61440 <= int(port) <= 65535
    # All processes of a job listen at one port; two jobs of a host at two.
    assert find_processes({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}).coordinator == found.coordinator
    assert find_processes({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-host-18@1"}).coordinator != found.coordinator


def test_open_mpi_on_several_hosts_asks_for_one():
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(InputError, match=r"-x MASTER_ADDR=<first host>"):
        find_processes(several)
    found = find_processes({**several, "MASTER_ADDR": "node1", "MASTER_PORT": "5000"})
    assert (found.coordinator, found.local_devices) == ("node1:5000", None)


def test_slurm_is_left_to_jax():
    assert find_processes(SLURM) == Processes(source="SLURM", count=2, index=1, coordinator=None)
    batch_script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert find_processes(batch_script) is None


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"MESHWRIGHT_PROCESSES": "4"}, "MESHWRIGHT_PROCESS is not set"),
        ({"MESHWRIGHT_PROCESS": "0"}, "MESHWRIGHT_PROCESSES is not set"),
        ({**OWN, "MESHWRIGHT_COORDINATOR": ""}, "MESHWRIGHT_COORDINATOR is not set"),
        ({**OWN, "MESHWRIGHT_PROCESS": "4"}, "MESHWRIGHT_PROCESS=4 must be less than MESHWRIGHT_PROCESSES=4"),
        ({**OWN, "MESHWRIGHT_PROCESSES": "four"}, "MESHWRIGHT_PROCESSES='four' must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not. Set it to the host of process 0"),
        ({**RANK, "RANK": "-1"}, "RANK='-1' must be a whole number"),
    ],
)
def test_what_is_missing_or_wrong_is_named_in_one_line(env, message):
    with pytest.raises(InputError, match=message) as caught:
        find_processes(env)
    assert "\n" not in str(caught.value)
