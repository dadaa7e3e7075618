"""How verbs speak: widths, ranges, units, and JSON without what JSON lacks."""

import json

import numpy as np
import pytest

from meshwright.cli.output import (
    busy_words,
    emit_json,
    format_energy,
    format_flop_count,
    format_power,
    format_range,
    four_digits,
    width,
)
from tests.tier import sampled

TEXTS = [
    ("show", "llama3-8b"), ("show", "deepseek-v3"), ("show", "v5p"), ("show", "h100"), ("show", "models"),
    ("show", "v5p:16x20x28"), ("show", "chips"),
    ("roofline", "bf16[B,D] * int8[D,F] -> bf16[B,F]", "--dims", "B=128,D=8192,F=32768", "--on", "v5e"),
    ("shard", "In[B_X,D_Y] * Win[D_X,F_Y] -> Tmp[B_X,F_Y]", "--mesh", "X=4,Y=2", "--dims", "B=1024,D=4096,F=16384",
     "--on", "v5e:4x4", "--all"),
    ("plan", "llama3-70b", "--on", "v5p:16x20x28", "--batch", "1120seq", "--seq", "4096", "--tokens", "15T"),
    ("plan", "llama3-70b", "--on", "4*v5e:16x16", "--batch", "4Mi", "--seq", "4096"),
]  # fmt: skip


def test_what_was_measured_on_a_busy_machine_is_called_too_long(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert [busy_words(1.0), busy_words(3.14)] == [[], ["measured at load 3.1 on 2 cores: times are too long"]]
    monkeypatch.setattr("meshwright.cli.output.START_LOAD", 1.2)
    assert busy_words() == ["measured at load 1.2 on 2 cores: times are too long"]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("args", TEXTS, ids=lambda args: " ".join(args[:2]) if isinstance(args, tuple) else None)
def test_no_line_is_wider_than_the_terminal(call, args, columns):
    said = call(*args, width=columns)
    assert said.code == 0
    assert [line for line in said.out.splitlines() if len(line) > columns] == []


@pytest.mark.parametrize("cluster", sampled(["v5p:16x16x32", "h100:8x128"], "h100:8x128"))
def test_explanations_fit_too(call, cluster):
    call("plan", "llama3-70b", "--on", cluster, "--batch", "4Mi", "--seq", "4096", "--tokens", "1T", "-o", "p.toml")
    for columns in (80, 120):
        lines = call("explain", "p.toml", "--all", "--notes", width=columns).out.splitlines()
        assert [line for line in lines if len(line) > columns] == []


def test_width_is_bounded(monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    assert width() == 120


@pytest.mark.parametrize(
    ("lower", "upper", "text"),
    [
        (0.543, 1.168, "0.54-1.17 s"),
        (0.507, 0.999, "507-999 ms"),
        (5.7, 12.1, "5.7-12.1 s"),
        (14.0, 26.0, "14.0-26.0 s"),
        (3600.0, 9000.0, "1.00-2.50 h"),
        (1e-6, 2.5e-6, "1.00-2.50 us"),
        (1.0, float("inf"), "1 s or more"),
    ],
)
def test_ranges_are_one_quantity(lower, upper, text):
    assert format_range(lower, upper) == text


def test_power_and_energy():
    assert [format_power(w) for w in (700, 22400, 1.4336e6)] == ["700 W", "22.4 kW", "1.43 MW"]
    assert [format_energy(e) for e in (16.8, 34400, 1.2e6)] == ["16.8 kWh", "34.4 MWh", "1.2 GWh"]


def test_json_has_plain_numbers_and_null_for_what_is_not_finite(capsys):
    emit_json({"a": np.float64(1.5), "b": np.int64(2), "c": float("inf"), "d": [float("nan"), (1, "x")], 3: None})
    assert json.loads(capsys.readouterr().out) == {"a": 1.5, "b": 2, "c": None, "d": [None, [1, "x"]], "3": None}


def test_json_names_a_type_that_it_cannot_write():
    with pytest.raises(NotImplementedError, match="range"):
        emit_json({"a": range(3)})


def test_numbers_are_exact_or_have_four_digits():
    """2 x 2x3x4x5x6x7x8 = 80,640 FLOPs are not 80.6 k, and 26,214.4 FLOPs a byte not 2.621e+04."""
    flops = [format_flop_count(n) for n in (80_640, 65_536, 999_999, 1e6, 1234.5, 2.47e15)]
    assert flops == ["80,640 FLOP", "65,536 FLOP", "999,999 FLOP", "1 MFLOP", "1.23 kFLOP", "2.47 PFLOP"]
    shown = [four_digits(n) for n in (1 / 3, 243.25, 26_214.4, -1_048_576)]
    assert shown == ["0.3333", "243.2", "26,214", "-1,048,576"]
