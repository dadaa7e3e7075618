"""Programs on several CPU devices are compiled each time: read from JAX's cache they lose the order of collectives."""

import subprocess
import sys

PROGRAM = """
import jax
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
from meshwright.parallel.mesh import device_mesh

def compiled(number):
    jax.jit(lambda x: x + number)(1.0).block_until_ready()

device_mesh({{"data": 1}})
compiled(1)
device_mesh({{"data": {size}}})
compiled(2)
"""


def kept(folder, size):
    """How many programs a process keeps that makes a mesh of one device, then one of ``size``."""
    done = [sys.executable, "-c", PROGRAM.format(folder=str(folder), size=size)]
    subprocess.run(done, check=True, capture_output=True)
    return sum("lambda" in path.name and path.name.endswith("-cache") for path in folder.iterdir())


def test_programs_of_several_cpu_devices_are_not_kept(tmp_path):
    assert kept(tmp_path / "one", 1) == 2
    assert kept(tmp_path / "two", 2) == 1
