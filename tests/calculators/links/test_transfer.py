"""Legs of a transfer: their text, their times, and how they add up."""

import pytest

from meshwright.calculators.links.transfer import TransferLeg, array_bytes, parse_leg, transfer_times
from meshwright.core.errors import InputError
from meshwright.spec.chip import chip

V5E = chip("v5e-book")


def leg(name, amount, rate, **figures):
    return TransferLeg(name=name, channel="ici", amount=amount, rate=rate, **figures)


def test_one_leg():
    """How to Scale Your Model, exercise 2.5: six hops of 1 us, two links of 45 GB/s."""
    one = leg("way", 2 * 8 * 128 * 8192, 45e9, lanes=2, hops=6, latency_s=6e-6)
    moved = transfer_times([one])
    assert moved["first_byte_s"] == pytest.approx(6e-6)
    assert moved["slowest_leg_s"] == pytest.approx(186.4e-6, rel=1e-3)
    assert moved["time_s_pipelined"] == moved["time_s_in_turn"] == pytest.approx(192.4e-6, rel=1e-3)
    assert moved["bound_by"] == "ici"


def test_several_legs_work_at_once_or_in_turn():
    legs = [leg("a", 10.0, 1.0, latency_s=2.0), leg("b", 10.0, 0.5), leg("c", 6.0, 1.0, lanes=2)]
    moved = transfer_times(legs)
    assert [one.send_s for one in legs] == [10, 20, 3]
    assert moved["slowest_leg"] == "b"
    assert (moved["first_byte_s"], moved["time_s_pipelined"], moved["time_s_in_turn"]) == (2, 22, 35)
    assert transfer_times([leg("a", 1.0, 1.0, latency_s=2.0)])["bound_by"] == "latency"
    with pytest.raises(InputError, match="a transfer needs a leg"):
        transfer_times([])


def test_legs_as_text():
    read = parse_leg("15GB@ici*2:6hops", V5E, num_bytes=1.0)
    assert (read.amount, read.rate, read.lanes, read.hops) == (15e9, 45e9, 2, 6)
    assert read.latency_s == pytest.approx(6e-6)
    hbm = parse_leg("hbm", V5E, num_bytes=16e9)
    assert hbm.send_s == pytest.approx(16e9 / 8.1e11)
    assert parse_leg("pcie*16", V5E, num_bytes=16e9).send_s == pytest.approx(16e9 / 16 / 1.5e10)
    assert parse_leg("275GFLOP@compute", V5E, num_bytes=1.0).send_s == pytest.approx(275e9 / 1.97e14)
    assert parse_leg("275e9@compute", V5E, num_bytes=1.0, dtype="int8").rate == 3.94e14
    assert parse_leg("dcn:1", V5E, num_bytes=1.0).latency_s == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pci", "'pci' is no channel of a leg. Did you mean 'pcie'"),
        ("ici*0", "has no lane"),
        ("ici 2", "is not .AMOUNT@.CHANNEL"),
        ("compute", "needs its FLOPs"),
        ("nvlink", "nvlink_bytes_per_s of v5e-book is not known"),
        ("5XB@hbm", "unknown unit"),
    ],
)
def test_faults_of_legs(text, message):
    with pytest.raises(InputError, match=message):
        parse_leg(text, V5E, num_bytes=1e9)


def test_bytes_of_an_array():
    assert array_bytes("bf16[8,128,8192]") == 2 * 8 * 128 * 8192
    assert array_bytes("int8[128Ki,128Ki]") == 2**34
    assert array_bytes("int4[3, 2]") == 3
    assert array_bytes("16 GiB") == 2**34
    with pytest.raises(InputError, match="unknown dtype 'bf17'"):
        array_bytes("bf17[4]")
    with pytest.raises(InputError, match="not a number"):
        array_bytes("bf16[4,x]")
