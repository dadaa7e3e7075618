"""Joins the processes of a run through `jax.distributed`, and shares values and errors among them."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshwright.core.errors import CannotRunError, InputError
from meshwright.parallel.process_env import find_processes

SHUTDOWN_TIMEOUT_S = 15
"""How long a failed process waits at exit for the other processes, which may hang in a collective."""
LONGEST_SHARED_BYTES = 4096


def start_processes(env: Mapping[str, str] = os.environ) -> int:
    """Joins the processes that `find_processes` finds, once, and returns their number (1 if it finds none).

    Must be called before JAX makes its first array. Raises InputError for wrong variables, CannotRunError if the
    processes cannot connect.
    """
    processes = find_processes(env)
    if processes is None:
        return 1
    if jax.distributed.is_initialized():  # JAX refuses a second call
        return processes.count
    init_options: dict[str, Any] = {}
    if processes.coordinator is not None:
        # Without "deactivate" JAX asks its own detectors too, and some of those reach out to the network.
        init_options = {
            "coordinator_address": processes.coordinator,
            "num_processes": processes.count,
            "process_id": processes.index,
            "local_device_ids": processes.local_devices,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(**init_options, shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S)
    except RuntimeError as error:
        address = processes.coordinator or "the first node"
        raise CannotRunError(
            f"process {processes.index} of {processes.count} ({processes.source}) cannot join the others at {address}: "
            f"{str(error).splitlines()[0]}"
        ) from None
    return processes.count


def is_first() -> bool:
    """True in process 0, the only one that prints and writes the files of a run."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Waits until every process calls this. JAX shows ``name`` if processes wait at different points."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def shared(make: Callable[[], str]) -> str:
    """Returns what ``make`` returns in process 0 in every process; raises its InputError or CannotRunError in all."""
    if jax.process_count() == 1:
        return make()
    answer_text = ""
    if is_first():
        try:
            answer_text = "=" + make()  # the first character tells answers from errors
        except (InputError, CannotRunError) as error:  # raised after the broadcast, which the other processes wait for
            answer_text = type(error).__name__[0] + str(error)
    answer_text = _broadcast(answer_text)
    for error_type in (InputError, CannotRunError):
        if answer_text[0] == error_type.__name__[0]:
            raise error_type(answer_text[1:])
    return answer_text[1:]


def first_error(check: Callable[[], object]) -> str:
    """Runs ``check`` in every process. Returns, in all, the first failing process's CannotRunError message, or ""."""
    message = ""
    try:
        check()
    except CannotRunError as error:
        message = str(error)
    if jax.process_count() == 1:
        return message
    failed_processes = np.flatnonzero(multihost_utils.process_allgather(np.array(bool(message))))
    if not failed_processes.size:
        return ""
    return _broadcast(message, source=int(failed_processes[0]))  # one sender, which all processes agree on


def _broadcast(text: str, *, source: int = 0) -> str:
    text_bytes = text.encode() if jax.process_index() == source else b""
    assert len(text_bytes) <= LONGEST_SHARED_BYTES, len(text_bytes)
    buffer = np.zeros(LONGEST_SHARED_BYTES, np.uint8)  # receivers do not know the length
    buffer[: len(text_bytes)] = np.frombuffer(text_bytes, np.uint8)
    received_bytes = np.asarray(
        multihost_utils.broadcast_one_to_all(buffer, is_source=jax.process_index() == source)
    ).astype(np.uint8)
    return received_bytes.tobytes().rstrip(b"\0").decode()


def stop_is_agreed(step: int) -> bool:
    """True if all processes must stop after this step because one received SIGTERM; all get the same answer.

    Every process calls it once a step, in order. Always False for a single process.
    """
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)
