"""What processes can only do together, done once by each: python -m tests.parallel.meeting."""

import json
import os
import signal
import time

from meshwright.core.errors import InputError
from meshwright.parallel.processes import is_first, shared, start_processes, stop_is_agreed

count = start_processes()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from meshwright.parallel.mesh import device_mesh  # noqa: E402


def refuse() -> str:
    raise InputError("the first process found no such file.")


def raised() -> str:
    try:
        return shared(refuse)
    except InputError as error:
        return str(error)


def stop_at() -> int:
    """The step after which this process stops, when the last one was sent SIGTERM in its second step."""
    for step in range(1, 1000):
        if step == 2 and jax.process_index() == count - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if stop_is_agreed(step):
            return step
        time.sleep(0.01 * (1 + jax.process_index()))
    return 0


def total() -> float:
    """A sum over a mesh of all devices, of rows that each process holds."""
    mesh = device_mesh({"data": len(jax.devices())})
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    rows = jax.make_array_from_callback((len(jax.devices()),), sharding, lambda i: np.arange(100.0)[i])
    return float(jax.jit(lambda a: a.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(rows))


said = {
    "count": count,
    "first": is_first(),
    "devices": [device.process_index for device in jax.devices()],
    "shared": shared(lambda: f"a folder that process {jax.process_index()} made"),
    "raised": raised(),
    "total": total(),
    "stop": stop_at(),
}
print("said " + json.dumps(said), flush=True)
