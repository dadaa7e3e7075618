"""The executor over real processes: each runs on its own time, and they meet only in their messages."""

import re

import pytest

from meshwright.algebra.schedule_rows import SCHEDULES
from tests.parallel.several import run_all


def assert_equal(names, **processes):
    """Every process finds its blocks of loss and gradients as one device has them, under each schedule."""
    for code, out, error in run_all(["-m", "tests.parallel.pipeline_child", *names], **processes):
        assert code == 0, error[-2000:]
        found = dict(re.findall(r"^error (\S+) (\S+)$", out, re.MULTILINE))
        assert set(found) == set(names)
        assert max(map(float, found.values())) <= 1e-5


def test_two_processes():
    assert_equal(("1f1b",), count=2)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 1)])
def test_every_schedule(count, devices):
    assert_equal(SCHEDULES, count=count, devices=devices)
