"""How a tier runs: parts of it, the order of its files, and what the table at its end says."""

import sys
from types import SimpleNamespace

import pytest

from tests import tier


def test_parts_are_all_of_the_tests_and_nothing_twice():
    names = [f"tests/test_a.py::test_b[{number}]" for number in range(500)]
    parts = [[name for name in names if tier.in_part(name, f"{day}/7")] for day in range(740_000, 740_007)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(30 < len(part) < 120 for part in parts)
    assert parts[0] == [name for name in names if tier.in_part(name, f"{740_000 % 7}/7")]


def config_of(order, part=None):
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    return SimpleNamespace(stash={tier.TIER: {"order": order, "part": part}}, hook=hook)


def test_files_come_in_an_order_of_the_seed_and_tests_of_a_file_together():
    items = [
        SimpleNamespace(path=f"test_{file}.py", nodeid=f"test_{file}.py::{n}") for file in "abcdefgh" for n in "123"
    ]

    def ordered(seed):
        found = list(items)
        tier.pytest_collection_modifyitems(config_of(seed), found)
        return [item.nodeid for item in found]

    assert ordered(0) == [item.nodeid for item in items]
    assert ordered(5) == ordered(5) != ordered(6) != ordered(0)
    for start in range(0, len(items), 3):
        three = ordered(5)[start : start + 3]
        assert [name[-1] for name in three] == ["1", "2", "3"]
        assert len({name[:9] for name in three}) == 1


def test_what_is_not_kept_is_slow():
    (one,), (two,) = ([case for case in tier.sampled(["a", ("b", 1)], "a") if case.values[0] == n] for n in "ab")
    assert (one.values, one.marks) == (("a",), ())
    assert two.values == ("b", 1)
    assert [mark.name for mark in two.marks] == ["slow"]


def test_the_table_names_the_slowest_and_the_largest():
    usage = tier.Usage({"order": 7, "part": None})
    for number in range(20):
        for seconds in (1.0, number):
            report = SimpleNamespace(nodeid=f"t{number}.py::x", duration=seconds, peak_bytes=(20 - number) * 10**8)
            usage.pytest_runtest_logreport(report)
    *files, last = usage.lines()
    assert [line.split()[-1] for line in files] == [f"t{n}.py" for n in (*range(19, 9, -1), *range(5))]
    assert files[0].split() == ["20.0", "s", "0.10", "GB", "t19.py"]
    assert last.split() == ["210.0", "s", "2.00", "GB", "all;", "--order", "7"]


@pytest.mark.parametrize("value", ["first", "second"])
def test_a_module_that_a_test_wrote_is_gone_after_it(value, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "written_by_a_test.py").write_text(f"value = {value!r}\n")
    import written_by_a_test

    assert written_by_a_test.value == value
    assert "written_by_a_test" in sys.modules
