"""What a compiler writes on its way: the optimised program, and which buffer lies where, before any code is made.

Code generation is most of a compilation's time and changes neither, so the partition depth stops here.
"""

import re
from pathlib import Path

from meshwright.verify.request import Memory

FLAGS = "--xla_dump_to={folder} --xla_dump_hlo_as_text"

PROGRAM_END = ".before_optimizations.txt"
MODULE_END = "after_optimizations.txt"
BUFFERS_END = "after_optimizations-buffer-assignment.txt"
LAST_END = "after_optimizations-memory-usage-report.txt"
LIVE_END = "after_optimizations-live-range.txt"
_ENDS = (MODULE_END, BUFFERS_END, LAST_END)

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(?:, color (\d+))?,?(.*)$", re.MULTILINE)
_OUT_OF_MEMORY = re.compile(r"exceeds available HBM \(([\d.]+)([KMGT])\)|Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
_UNIT = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def dump_files(folder: Path) -> dict[str, Path] | None:
    """The files of the step's module by their ends; None until all of them are there and not empty."""
    found = {}
    for end in _ENDS:
        paths = sorted(p for p in folder.glob(f"*.jit_*{end}") if p.stat().st_size)
        if not paths:
            return None
        # small modules, such as those of constants, come before the step and are smaller
        found[end] = max(paths, key=lambda path: path.stat().st_size)
    return found


def read_program(folder: Path) -> str:
    """The step's program as it was given to the compiler; empty where it was not written."""
    paths = sorted(folder.glob(f"*.jit_*{PROGRAM_END}"), key=lambda path: path.stat().st_size)
    return paths[-1].read_text() if paths else ""


def read_memory(buffer_assignment: str) -> Memory:
    """Bytes in HBM (memory space 0) of a buffer assignment: its parameters, its heap, and results of their own."""
    arguments = temporaries = outputs = 0
    for size, color, rest in _ALLOCATION.findall(buffer_assignment):
        if (color and color != "0") or "thread-local" in rest:
            continue
        if "parameter" in rest:
            arguments += int(size)
        elif "maybe-live-out" in rest or "output shape" in rest:
            outputs += int(size)
        else:
            temporaries += int(size)
    return Memory(arguments=arguments, temporaries=temporaries, outputs=outputs)


def available_bytes(message: str) -> int | None:
    """HBM that a program may fill, where the compiler's refusal names it."""
    match = _OUT_OF_MEMORY.search(message)
    if match is None:
        return None
    number, unit = (match[1], match[2]) if match[1] else (match[5], match[6])
    return round(float(number) * _UNIT[unit])
