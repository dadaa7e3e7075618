"""No damage to a file that meshwright wrote gives other numbers without a word, or an internal error."""

import pytest

from tests.corruption.trial import run_trial


def held(count, seed, capsys):
    wrong = []
    found = run_trial(count, seed, show=wrong.append)
    assert not wrong
    assert found["refused"] >= count // 8, found  # damages are looked for at all
    assert sum(found.values()) == count


def test_damaged_files_are_noticed(capsys):
    held(24, 3, capsys)


@pytest.mark.slow
def test_five_hundred_damaged_files_are_noticed(capsys):
    held(500, 0, capsys)
