"""No damage to a file that meshwright wrote gives other numbers without a word, or an internal error."""

import pytest

from tests.corruption.trial import run_trial


def noticed(count, seed):
    wrong = []
    found = run_trial(count, seed, show=wrong.append)
    assert not wrong
    assert sum(found.values()) == count
    assert found["refused"] >= count // 8, found  # damages are looked for at all


def test_damaged_files_are_noticed():
    noticed(3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_five_hundred_damaged_files_are_noticed(seed):
    """In ten parts, which land in different parts of the slow tier."""
    noticed(50, seed)
