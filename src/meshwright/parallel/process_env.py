"""Finds the index and number of processes of a run from launchers' environment variables, without importing JAX."""

import zlib
from collections.abc import Mapping
from typing import Literal

import msgspec

from meshwright.core.errors import InputError

Launcher = Literal["meshwright", "Kubernetes", "RANK and WORLD_SIZE", "Open MPI", "SLURM"]

COORDINATOR, PROCESSES, PROCESS = "MESHWRIGHT_COORDINATOR", "MESHWRIGHT_PROCESSES", "MESHWRIGHT_PROCESS"
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"
DEFAULT_PORT = 8476
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""Variables that `srun` sets and JAX reads: a process without all five is a batch script, not a task."""


class Processes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The processes of a run, of which this one has ``index`` of ``count``; process 0 listens at ``coordinator``,
    host:port (None if JAX detects it, under SLURM). ``local_devices`` are the indices of this process's accelerators on
    its host (None: all visible ones).
    """

    source: Launcher
    count: int
    index: int
    coordinator: str | None
    local_devices: tuple[int, ...] | None = None


def find_processes(env: Mapping[str, str]) -> Processes | None:
    """Returns this run's processes as set by a launcher; None for a single process.

    Reads the first of: MESHWRIGHT_* variables (on Kubernetes the index is the Job's), RANK and WORLD_SIZE as torchrun
    sets them, the variables of Open MPI 5, of SLURM. Raises InputError that names a missing or wrong variable.
    """
    if any(name in env for name in (COORDINATOR, PROCESSES, PROCESS)):
        processes = _own(env)
    elif "RANK" in env and "WORLD_SIZE" in env:
        processes = _rank(env)
    elif "OMPI_COMM_WORLD_SIZE" in env:
        processes = _open_mpi(env)
    elif all(name in env for name in SLURM):
        processes = _processes(env, "SLURM", count="SLURM_NTASKS", index="SLURM_PROCID", coordinator=None)
    else:
        return None
    return processes if processes.count > 1 else None


def _own(env: Mapping[str, str]) -> Processes:
    is_kubernetes = PROCESS not in env and KUBERNETES_INDEX in env
    index_name = KUBERNETES_INDEX if is_kubernetes else PROCESS
    if env.get(PROCESSES) == "1":  # needs no coordinator
        return Processes(source="meshwright", count=1, index=0, coordinator=None)
    for name in (PROCESSES, index_name, COORDINATOR):
        if not env.get(name):
            raise InputError(f"{name} is not set. Set {PROCESSES}, {PROCESS} and {COORDINATOR} together, or none.")
    source: Launcher = "Kubernetes" if is_kubernetes else "meshwright"
    return _processes(env, source, count=PROCESSES, index=index_name, coordinator=env[COORDINATOR])


def _rank(env: Mapping[str, str]) -> Processes:
    host = env.get("MASTER_ADDR", "")
    if env["WORLD_SIZE"] != "1" and not host:
        raise InputError("RANK and WORLD_SIZE are set and MASTER_ADDR is not. Set it to the host of process 0.")
    # torchrun's agent uses MASTER_PORT for its store, so take the next port.
    coordinator = f"{host}:{_number(env, 'MASTER_PORT', DEFAULT_PORT) + ('TORCHELASTIC_RUN_ID' in env)}"
    local_names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return _processes(
        env, "RANK and WORLD_SIZE", count="WORLD_SIZE", index="RANK", coordinator=coordinator, local=local_names
    )


def _open_mpi(env: Mapping[str, str]) -> Processes:
    """Reads the variables of Open MPI 5, which JAX cannot detect, as mpirun's address is no longer among them."""
    size_name, index_name, local_size_name, local_index_name = (
        f"OMPI_COMM_WORLD_{suffix}" for suffix in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")
    )
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if env.get(local_size_name) == env[size_name] else "")
    if not host:
        raise InputError("Open MPI runs on several hosts and MASTER_ADDR is not set. Add: -x MASTER_ADDR=<first host>.")
    # One port for all processes of a job, above the range that systems hand out: 61440 to 65535.
    job_name = env.get("PMIX_NAMESPACE", "")
    port = _number(env, "MASTER_PORT", 61440 + zlib.crc32(job_name.encode()) % 4096)
    local = (local_index_name, local_size_name)
    return _processes(env, "Open MPI", count=size_name, index=index_name, coordinator=f"{host}:{port}", local=local)


def _processes(
    env: Mapping[str, str],
    source: Launcher,
    *,
    count: str,
    index: str,
    coordinator: str | None,
    local: tuple[str, str] | None = None,
) -> Processes:
    """Returns the processes from the named variables; each gets one accelerator if its host has several processes."""
    num_processes, own_index = _number(env, count), _number(env, index)
    if own_index >= num_processes:
        raise InputError(f"{index}={own_index} must be less than {count}={num_processes}. Number processes from 0.")
    shares_host = local is not None and local[0] in env and _number(env, local[1], num_processes) > 1
    return Processes(
        source=source,
        count=num_processes,
        index=own_index,
        coordinator=f"{coordinator}:{DEFAULT_PORT}" if coordinator and ":" not in coordinator else coordinator,
        local_devices=(_number(env, local[0]),) if local and shares_host else None,
    )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise InputError(f"{name}={text!r} must be a whole number.")
    return int(text)
