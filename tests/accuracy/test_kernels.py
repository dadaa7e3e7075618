"""The table of measured kernels: rows chosen, folds by shape, the fit, and the table of docs/accuracy.md."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from meshwright.accuracy import kernels
from meshwright.core.errors import InputError
from meshwright.spec.efficiency import KERNEL_NUMBERS, fitted_numbers

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "benchmarks/data/kernels"


@pytest.fixture(scope="module")
def measured():
    return kernels.read_kernels(TABLES)


def test_every_row_is_chosen_or_left_out_with_a_reason(measured):
    groups, left = measured
    files = dict.fromkeys(choice.file for choice in kernels.CHOICES)
    rows = sum(len((TABLES / f"{name}.csv").read_text().splitlines()) - 1 for name in files)
    assert sum(len(one.measured_s) for one in groups) + sum(left.values()) == rows
    assert left["attention backward with heads of 256 on h100"] == 12


def test_a_chip_and_an_operation_have_one_kernel(measured):
    names = [(one.choice.operation, one.chip) for one in measured[0]]
    assert len(set(names)) == len(names)


def test_one_shape_is_in_one_fold_on_all_chips(measured):
    """Whether software copies something first is no part of a shape: it differs by chip."""
    for operation, sizes in (("products", "MNK"), ("grouped products", "MNKG")):
        folds = {}
        for one in (group for group in measured[0] if group.choice.operation == operation):
            shapes = zip(*(one.sizes[size] for size in sizes), strict=True)
            for shape, fold in zip(shapes, one.folds, strict=True):
                assert folds.setdefault(shape, fold) == fold
        assert set(folds.values()) == {0, 1, 2, 3, 4}


def test_the_shipped_numbers_are_what_the_fit_finds(measured):
    shipped = fitted_numbers(KERNEL_NUMBERS).numbers
    assert len(shipped) <= kernels.MOST_NUMBERS
    assert set(shipped) == set(kernels.PRIORS)
    assert kernels.fit_kernels(measured[0]) == pytest.approx(shipped, rel=0.02)


def test_numbers_that_made_the_times_come_back(measured):
    """Times that the formulas made themselves, with other numbers than the fit starts at."""
    true = kernels.PRIORS | {"compute.gpu": 0.6, "start_s": 8e-6, "softmax": 1000.0, "link": 0.6}
    made = [msgspec.structs.replace(one, measured_s=kernels.predicted_s(one, true)) for one in measured[0]]
    assert kernels.fit_kernels(made) == pytest.approx(true, rel=0.02)


@pytest.mark.slow
def test_the_page_has_the_table_of_this_command(measured):
    """Held-out medians as they stand in the page, to a point; each due row is marked by whether it reaches the goal."""
    lines = (ROOT / "docs/accuracy.md").read_text().partition("<!-- table: kernels -->")[2].partition("<!-- end -->")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.strip().splitlines()[2:]]
    found = kernels.kernel_errors(measured[0], fitted_numbers(KERNEL_NUMBERS).numbers)
    assert [row[:3] for row in cells] == [[one.operation, one.chip, str(one.rows)] for one in found]
    medians = np.array([float(row[3].rstrip("%")) for row in cells])
    assert medians == pytest.approx([100 * one.median for one in found], abs=1.0)
    assert all((one.goal == "") == (one.rows < kernels.FEWEST_ROWS) for one in found)


def test_a_damaged_table_is_named_by_line(tmp_path):
    folder = tmp_path / "kernels"
    shutil.copytree(TABLES, folder)
    table = folder / "gemm_bf16.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([lines[0], lines[1].replace("512", "wide", 1), *lines[2:]]))
    with pytest.raises(InputError, match=r"gemm_bf16.csv:2: could not convert string to float: 'wide'"):
        kernels.read_kernels(folder)
    table.write_text("\n".join([lines[0], lines[1].replace("512", "-5", 1), *lines[2:]]))
    with pytest.raises(InputError, match=r"gemm_bf16.csv:2: a size or a time is not a positive number"):
        kernels.read_kernels(folder)


def test_a_folder_without_tables_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"gemm_bf16.csv"):
        kernels.read_kernels(tmp_path)
