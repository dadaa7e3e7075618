"""The fused-tick form: its length, what it keeps alive, and its time in lockstep."""

import pytest

from meshwright.algebra.schedules.fused import fused, fused_seconds
from meshwright.algebra.schedules.registry import build, default_chunks, schedule_names
from meshwright.algebra.schedules.simulation import peak_stash


def made(name, stages, microbatches, chunks=None):
    return build(name, stages=stages, microbatches=microbatches, chunks=chunks or default_chunks(name))


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 8), (8, 32)])
def test_1f1b_has_a_tick_per_microbatch_and_the_way_there_and_back(stages, microbatches):
    table = fused(made("1f1b", stages, microbatches))
    assert table.num_ticks == microbatches + 2 * (stages - 1)
    for tick, row in enumerate(table.ticks):
        for device, slots in enumerate(row):
            forward, backward = tick - device, tick - 2 * (stages - 1) + device
            assert (slots.forward.microbatch if slots.forward else None) == within(forward, microbatches)
            assert (slots.backward.microbatch if slots.backward else None) == within(backward, microbatches)


def within(number, count):
    return number if 0 <= number < count else None


def test_1f1b_keeps_a_microbatch_alive_for_a_tick_each_way():
    stashes = peak_stash(fused(made("1f1b", 4, 16)).in_order)
    assert stashes == tuple(2 * (4 - 1 - device) + 1 for device in range(4))


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_has_a_tick_per_pass_through_a_chunk(chunks):
    stages, microbatches = 4, 8
    table = fused(made("interleaved", stages, microbatches, chunks))
    assert table.num_ticks == microbatches * chunks + 2 * (stages - 1) + (chunks - 1) * stages


def test_gpipe_and_naive_stay_what_they_are():
    assert peak_stash(fused(made("gpipe", 4, 8)).in_order) == (8,) * 4
    assert fused(made("gpipe", 4, 8)).num_ticks == 2 * (8 + 4 - 1) - 1
    assert peak_stash(fused(made("naive", 4, 3)).in_order) == (1,) * 4


@pytest.mark.parametrize("name", schedule_names())
def test_no_more_is_alive_than_twice_the_peak_less_one(name):
    schedule = made(name, 4, 12)
    for before, after in zip(peak_stash(schedule), peak_stash(fused(schedule).in_order), strict=True):
        assert after <= 2 * before - schedule.piece_share + 1e-12


def efficiency(name, *, chunks=None, backward=2.0):
    """Work over time in lockstep, 8 stages and 32 microbatches."""
    schedule = made(name, 8, 32, chunks)
    share = schedule.piece_share
    step = fused_seconds(fused(schedule), forward_s=share, backward_s=(backward - 1) * share, weight_s=share)
    return 32 * (1 + backward) / step


@pytest.mark.parametrize("backward", [2.0, 3.0])
def test_lockstep_costs_the_interleaved_schedules_nothing(backward):
    """The shares of a step without lockstep: M / (M + (stages - 1) / chunks)."""
    assert efficiency("gpipe", backward=backward) == pytest.approx(32 / 39)
    assert efficiency("1f1b", backward=backward) == pytest.approx(32 / 39)
    assert efficiency("interleaved", chunks=2, backward=backward) == pytest.approx(32 / 35.5)
    assert efficiency("interleaved", chunks=4, backward=backward) == pytest.approx(32 / 33.75)


def test_lockstep_takes_most_of_the_gain_of_split_backward_passes():
    """32 / 34.33 without lockstep for both; zb-h2's forward passes in advance gain nothing in it."""
    assert efficiency("zb-h1") == pytest.approx(96 / 110)
    assert efficiency("zb-h2") == pytest.approx(96 / 117)


def test_every_tick_waits_for_its_messages():
    """14 ticks have 13 gaps; the longest path begins and ends on device 0, so that one of them it stays there."""
    table = fused(made("1f1b", 4, 8))
    alone = fused_seconds(table, forward_s=1, backward_s=2)
    assert alone == 33
    assert fused_seconds(table, forward_s=1, backward_s=2, send_s=0.1) == pytest.approx(alone + 12 * 0.1)
