"""Settings of malloc for the running process."""

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Parameters of glibc's mallopt, and what each is set to: no block comes from the kernel by itself (M_MMAP_MAX), nothing
# goes back at the end of the heap (M_TRIM_THRESHOLD), and there is one heap (M_ARENA_MAX), which can hold any block.
_SETTINGS = {-4: 0, -1: -1, -8: 1}
# Blocks of 128 kB and more (M_MMAP_THRESHOLD) come from the kernel by themselves, and go back when they are freed.
_RETURNING = {-4: 65536, -3: 2**17, -1: 2**17}


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory for the rest of the process; True if the setting took effect.

    On CPU a compiled step takes its scratch memory from malloc and frees it at the end. glibc gives large blocks back
    to the kernel, which then clears new ones page by page: 0.7 s of a training step of 4.8 s on two busy cores
    (`benchmarks/train_cpu.py`, 2026-11-21). The process keeps as much as its largest step used. Does nothing if the
    environment configures malloc itself, or with another C library.
    """
    return _set(_SETTINGS)


@contextmanager
def returning_freed_memory() -> Iterator[None]:
    """Makes malloc return freed large blocks to the kernel inside the context, and keep freed memory after it. Without
    this, blocks that are freed while weights load would stay in the heap: a quarter more memory than the weights."""
    _set(_RETURNING)
    try:
        yield
    finally:
        keep_freed_memory()


def _set(settings: Mapping[int, int]) -> bool:
    if "malloc" in os.environ.get("GLIBC_TUNABLES", "") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(parameter, new_value) == 1 for parameter, new_value in settings.items())
