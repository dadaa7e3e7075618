"""What compilers dump: the buffers of real programs for a TPU and a GPU, refusals, and which files are the step's."""

import re
from pathlib import Path

import pytest

from meshwright.verify.running import (
    BUFFERS_END,
    LAST_END,
    MODULE_END,
    available_bytes,
    dump_files,
    read_memory,
    read_program,
)

DATA = Path(__file__).parents[1] / "data" / "verify"
GIB = 2**30

REPORTED = {"v5e": 15852636672, "h100": 38440867928}
"""Bytes in HBM (memory space 0) by the memory report that the compiler wrote beside each of the two files."""


def buffers(name: str) -> str:
    return (DATA / f"{name}_buffers.txt").read_text()


@pytest.mark.parametrize("name", sorted(REPORTED))
def test_the_sum_is_that_of_the_compilers_report(name):
    """The report counts scratch of single kernels too, which is not held while the program runs."""
    text = buffers(name)
    in_kernels = sum(int(size) for size in re.findall(r"size (\d+), thread-local", text))
    assert 0 < in_kernels < 1e-4 * REPORTED[name]
    assert read_memory(text).needed == REPORTED[name] - in_kernels


@pytest.mark.parametrize("name", sorted(REPORTED))
def test_arguments_are_weights_and_optimizer(name):
    """llama3-8b over 16 chips: bf16 weights and two float32 moments, 10 bytes a parameter, norms whole on each chip."""
    norms, all_weights = 65 * 4096, 8030261248
    assert read_memory(buffers(name)).arguments == pytest.approx(10 * ((all_weights - norms) / 16 + norms), rel=1e-3)


def test_other_memory_spaces_and_scratch_do_not_count():
    text = """BufferAssignment:
allocation 0: size 1000, parameter 0, shape |f32[250]| at ShapeIndex {}, maybe-live-out:
allocation 1: size 200, color 1, preallocated-temp:
allocation 2: size 30, thread-local:
allocation 3: size 7, constant:
allocation 4: size 400, maybe-live-out:
allocation 5: size 60, color 0, preallocated-temp:
"""
    found = read_memory(text)
    assert (found.arguments, found.temporaries, found.outputs) == (1000, 67, 400)
    assert found.needed == 1467


@pytest.mark.parametrize(
    ("message", "offered"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
            "Used 60.42G of 15.75G hbm. Exceeded hbm capacity by 44.67G.",
            round(15.75 * GIB),
        ),
        ("RESOURCE_EXHAUSTED: the program's size (16.2G) exceeds available HBM (15.75G)", round(15.75 * GIB)),
        ("Used 900.0M of 512.5K hbm.", round(512.5 * 1024)),
        ("RESOURCE_EXHAUSTED: vmem", None),
        ("", None),
    ],
)
def test_what_a_refusal_offers(message, offered):
    assert available_bytes(message) == offered


def dump(folder: Path, module: str, *, size: int = 10, ends=(MODULE_END, BUFFERS_END, LAST_END)) -> None:
    for end in ends:
        (folder / f"{module}.{end}").write_text("x" * size)


def test_the_files_of_the_largest_step(tmp_path):
    assert dump_files(tmp_path) is None
    dump(tmp_path, "module_0001.jit_zeros.sm_9.0_gpu", size=5)
    dump(tmp_path, "module_0002.jit__step.sm_9.0_gpu")
    dump(tmp_path, "module_0003.other", size=99)
    found = dump_files(tmp_path)
    assert set(found) == {MODULE_END, BUFFERS_END, LAST_END}
    assert {path.name.split(".")[1] for path in found.values()} == {"jit__step"}


@pytest.mark.parametrize("missing", [MODULE_END, BUFFERS_END, LAST_END])
def test_files_that_are_not_there_yet(tmp_path, missing):
    dump(tmp_path, "module_0002.jit__step", ends={MODULE_END, BUFFERS_END, LAST_END} - {missing})
    assert dump_files(tmp_path) is None
    (tmp_path / f"module_0002.jit__step.{missing}").touch()  # there, and still empty
    assert dump_files(tmp_path) is None


def test_the_program(tmp_path):
    assert read_program(tmp_path) == ""
    (tmp_path / "module_0001.jit_zeros.before_optimizations.txt").write_text("small")
    (tmp_path / "module_0002.jit__step.before_optimizations.txt").write_text("the larger one")
    assert read_program(tmp_path) == "the larger one"
