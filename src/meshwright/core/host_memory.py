"""Settings of malloc for the running process."""

import ctypes
import os
import platform

# Parameters of glibc's mallopt, and what each is set to: no block comes from the kernel by itself (M_MMAP_MAX), nothing
# goes back at the end of the heap (M_TRIM_THRESHOLD), and there is one heap (M_ARENA_MAX), which can hold any block.
_SETTINGS = {-4: 0, -1: -1, -8: 1}


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory for the rest of the process; True if the setting took effect.

    On CPU a compiled step takes its scratch memory from malloc and frees it at the end. glibc gives large blocks back
    to the kernel, which then clears new ones page by page: 0.7 s of a training step of 4.8 s on two busy cores
    (`benchmarks/train_cpu.py`, 2026-11-21). The process keeps as much as its largest step used. Does nothing if the
    environment configures malloc itself, or with another C library.
    """
    if "malloc" in os.environ.get("GLIBC_TUNABLES", "") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(parameter, value) == 1 for parameter, value in _SETTINGS.items())
