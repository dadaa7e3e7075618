"""Schedules written by a person: read back as they were, and broken ones told by file and line."""

import pytest

from meshwright.algebra.schedules.file import format_schedule, read_schedule
from meshwright.algebra.schedules.registry import build, default_chunks, schedule_names
from meshwright.algebra.schedules.ticks import tick_tables
from meshwright.core.errors import InputError


@pytest.mark.parametrize("name", schedule_names())
def test_named_schedules_come_back(name, tmp_path):
    made = build(name, stages=4, microbatches=12, chunks=default_chunks(name))
    path = tmp_path / f"{name}.txt"
    path.write_text(format_schedule(made), encoding="utf-8")
    assert read_schedule(path) == made
    assert max(map(len, path.read_text().splitlines())) <= 100


def test_a_small_one(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("# by hand\n\n0: F0 F1\n1: F0 B0 F1 W0  # W0 early\n1: B1\n0: B0 B1\n", encoding="utf-8")
    made = read_schedule(path)
    assert made.name == "mine"
    assert [" ".join(map(str, order)) for order in made.orders] == ["F0 F1 B0 B1", "F0 B0 F1 W0 B1"]


BROKEN = [
    ("hello\n", ":1: 'hello' is no line of a schedule. Write for example 0: F0 F1 B0 B1."),
    ("placment = v\n", ":1: unknown key 'placment'. Did you mean 'placement'?"),
    ("placement = V-shape\n", ":1: placement 'V-shape' is not known."),
    ("0: F0 B0\n2: F0 B0\n", ":2: device 2 comes before device 1. Number them from 0."),
    ("0: F0 D0\n", ":1: 'D0' is no op. Write F0, B0 or W0, and F0/1 for chunk 1."),
    ("0: F0 F1\n0: B0 B1 F0\n", ":2: F0 occurs twice (first at {path}:1). Leave one of them out."),
    ("0: F0 B0\n1: B0 F0\n", ":2: B0 comes before F0. Write F0 earlier."),
    ("0: F0 F1 B0\n\n1: F0 B0 F1 B1\n", "B1 is missing on device 0."),
    ("0: F0 B0 F2 B2\n", "microbatch 1 is missing. Number them from 0 without a gap."),
    ("placement = v\n0: F0 B0\n1: F0 B0\n", "F0/1 is missing on device 1"),
    ("placement = bidirectional\n0: F0 B0\n1: F0/1 B0/1\n", ":3: F0/1 cannot run on device 1: microbatch 0 does"),
    ("0: F0 B0 F1 B1\n1: F0 F1 B0 B1\n", "devices wait for each other (device 0 before B0, device 1 before F1)"),
    ("# nothing\n", "0 ops; a schedule has between 1 and 100,000"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_broken_ones(text, message, tmp_path):
    path = tmp_path / "broken.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_schedule(path)
    said = str(error.value)
    assert message.format(path=path) in said
    assert said.count("\n") == 0
    assert "broken" in said or "device" in said


def test_a_table_of_too_many_ticks_and_devices_is_refused(tmp_path):
    (tmp_path / "wide.txt").write_text("".join(f"{device}: F0 B0\n" for device in range(3000)))
    with pytest.raises(InputError, match=r"wide: more than 1,3\d\d ticks of 3,000 devices"):
        tick_tables(read_schedule(tmp_path / "wide.txt"))


def test_no_file(tmp_path):
    with pytest.raises(InputError, match=r"none.txt cannot be read \(No such file or directory\)"):
        read_schedule(tmp_path / "none.txt")
