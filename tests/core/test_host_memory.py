import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from meshwright.core.host_memory import keep_freed_memory
if "keep" in sys.argv:
    assert keep_freed_memory() is ("malloc" not in sys.argv)
import ctypes
malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def touch():
    block = malloc(256 << 20)
    ctypes.memset(block, 1, 256 << 20)
    free(block)

touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")


def faults(*words, **env):
    """Pages that come from the kernel when a block of 256 MiB is used a second time."""
    command = [sys.executable, "-c", PROGRAM, *words]
    return int(subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True).stdout)


@glibc
def test_a_block_that_was_freed_is_there_at_once():
    assert faults("keep") < 100 < faults()


@glibc
def test_settings_of_the_environment_are_left_alone():
    assert faults("keep", "malloc", GLIBC_TUNABLES="glibc.malloc.tcache_count=0") > 100
