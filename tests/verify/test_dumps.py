"""What compilers dump: buffer assignments of real programs for a TPU and a GPU, refusals, and which files are the step's."""

from pathlib import Path

import pytest

from meshwright.verify.dumps import BUFFERS_END, LAST_END, MODULE_END, available_bytes, dump_files, read_memory
from meshwright.verify.dumps import read_program

DATA = Path(__file__).parents[1] / "data" / "verify"


def bytes_of(*shapes_and_widths):
    total = 0
    for width, *dims in shapes_and_widths:
        size = width
        for dim in dims:
            size *= dim
        total += size
    return total
