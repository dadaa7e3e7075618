"""Quantities read and printed."""

import pytest

from meshwright.core import units
from meshwright.core.errors import InputError, nearest


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4Mi", 4 * 2**20),
        ("15T", 15 * 10**12),
        ("1e6", 10**6),
        ("4096", 4096),
        ("1.5k", 1500),
        ("32.8B", 32_800_000_000),
    ],
)
def test_counts(text, value):
    assert units.parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1e-9", "not a whole number"),
        ("1e16", "larger than 1e.15"),
        ("4Qi", "unknown suffix 'Qi'"),
        ("1.5", "not a whole number"),
        ("-3", "is below 0"),
        ("", "is not a number"),
    ],
)
def test_counts_refused(text, words):
    with pytest.raises(InputError, match=words):
        units.parse_count(text)


def test_counts_in_words():
    assert [units.counted(n, "chip") for n in (0, 1, 2048)] == ["0 chips", "1 chip", "2,048 chips"]
    assert [units.counted(n, "microbatch") for n in (1, 1.5, 16.0)] == [
        "1 microbatch",
        "1.5 microbatches",
        "16 microbatches",
    ]


def test_bytes_of_both_kinds():
    assert units.parse_bytes("80 GB") == 80e9
    assert units.parse_bytes("15.75 GiB") == 15.75 * 2**30
    assert units.parse_bytes("12 B") == 12
    assert [units.parse_rate(text) for text in ("1Gbit/s", "10 Mbit/s", "25GB/s", "8bit/s")] == [125e6, 1.25e6, 25e9, 1]
    assert [units.format_bit_rate(rate) for rate in (125e6, 1.25e6, 25e9, 1.0)] == [
        "1Gbit/s",
        "10Mbit/s",
        "200Gbit/s",
        "8bit/s",
    ]
    for text in ("1", "1Gbit", "1Gb/s", "0Gbit/s", "-1GB/s", "1 GiB/s", "nanbit/s"):
        with pytest.raises(InputError, match=r"is not a rate\. Write for example 1Gbit/s, 10Mbit/s or 25GB/s"):
            units.parse_rate(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (11.6e-6, "11.6 us"),
        (0.0012, "1.2 ms"),
        (999.7e-6, "1 ms"),
        (3.4, "3.4 s"),
        (0, "0 ns"),
        (7200, "2 h"),
        (86400, "1 day"),
        (365 * 86400 * 3, "3 years"),
        (1.23e12, "39,003 years"),
        (44 * 86400, "44 days"),
        (float("inf"), "never"),
    ],
)
def test_seconds(seconds, text):
    assert units.format_seconds(seconds) == text


def test_the_other_units():
    assert units.format_bytes(95e9) == "95 GB"
    assert units.format_flops(459e12) == "459 TFLOP/s"
    assert units.format_flops(65536, unit="FLOP") == "65.5 kFLOP"
    assert units.format_flops(6.3e24, unit="FLOP") == "6300000 EFLOP"
    assert units.format_count(4 * 2**20) == "4 Mi"
    assert units.format_count(4_000_000) == "4 M"
    assert units.format_params(2**30) == "1.07 B"
    assert units.format_params(70_553_706_496) == "70.6 B"


def test_the_unit_in_a_name_says_how_it_is_printed():
    shown = {"time_s_lower": "2 s", "hbm_bytes_per_chip": "2 B", "link.bytes_per_s": "2 B/s", "peak_flops": "2 FLOP/s"}
    assert {name: units.shown_by_name(name)(2) for name in shown} == shown
    assert not any(map(units.shown_by_name, ("tokens_per_s", "per_s", "sms", "rays")))


def test_nearest_names_or_lists():
    assert nearest("fspd", ["fsdp", "tensor"]) == " Did you mean 'fsdp'?"
    assert nearest("zzz", ["a", "b"]) == " Known: a, b."
