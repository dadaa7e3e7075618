"""What a schedule comes to in lockstep: the closed forms against the tables that run and their simulated time."""

import numpy as np
import pytest

from meshwright.algebra.schedules.forms import bubble_seconds, is_legal
from meshwright.algebra.schedules.fused import fused, fused_seconds
from meshwright.algebra.schedules.lockstep import lockstep_bubble_seconds, lockstep_slots, lockstep_ticks
from meshwright.algebra.schedules.registry import build, default_chunks, schedule_names
from meshwright.algebra.schedules.ticks import Slots, tick_tables
from meshwright.core.errors import InputError

TIMES = ((1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.25, 0.75), (1.5, 1.0, 0.25))
"""Seconds of F, B and W of all layers of a device."""


def sizes(name, most_stages=6):
    for stages in range(2, most_stages + 1):
        for microbatches in (1, 2, 3, 4, 6, 8, 9, 12, 16, 20):
            for chunks in (2, 3) if name == "interleaved" else (default_chunks(name),):
                one = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
                if is_legal(name, **one):
                    yield one


@pytest.mark.parametrize("name", schedule_names())
def test_slots_and_ticks_are_those_of_the_tables(name):
    for one in sizes(name):
        tables = tick_tables(fused(build(name, **one)))
        assert lockstep_ticks(name, **one) == tables.num_ticks, one
        assert {n: int(lockstep_slots(name, n, **one)) for n in Slots.__struct_fields__} == {
            n: getattr(tables.slots, n) for n in Slots.__struct_fields__
        }, one


@pytest.mark.parametrize("name", schedule_names())
def test_idle_time_is_the_simulation_s(name):
    for one in sizes(name):
        table = fused(build(name, **one))
        v, m = one["chunks"], one["microbatches"]
        for forward, backward, weight in TIMES:
            given = {"forward_s": forward, "backward_s": backward, "weight_s": weight}
            run = fused_seconds(table, forward_s=forward / v, backward_s=backward / v, weight_s=weight / v)
            found, idle = lockstep_bubble_seconds(name, **one, **given), run - m * (forward + backward + weight)
            assert found >= idle - 1e-9, (one, given)
            if name != "zb-h2" or not one["stages"] < m < 2 * one["stages"] - 1:
                assert found == pytest.approx(idle), (one, given)


@pytest.mark.parametrize("name", schedule_names())
def test_lockstep_is_never_faster(name):
    """Equal where nothing runs ahead; what fills bubbles with weight gradients loses by it."""
    given = {"forward_s": 1.0, "backward_s": 1.25, "weight_s": 0.75}
    for one in sizes(name):
        alone, together = bubble_seconds(name, **one, **given), lockstep_bubble_seconds(name, **one, **given)
        assert together >= alone - 1e-9
        if name in ("naive", "gpipe", "1f1b", "interleaved"):
            assert together == pytest.approx(alone)


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "naive"])
def test_the_messages_of_every_tick_are_waited_for(name):
    """But for those of the first and the last, which some device does not wait for; the naive schedule is one chain."""
    for one in sizes(name, most_stages=4):
        v, table = one["chunks"], fused(build(name, **one))
        passes = {"forward_s": 1.0 / v, "backward_s": 2.0 / v, "weight_s": 1.0 / v}
        free, short = (fused_seconds(table, **passes, send_s=send) for send in (0.0, 1e-4))
        assert (short - free) / 1e-4 == pytest.approx(lockstep_ticks(name, **one) - 2, abs=2.01), one


def test_many_at_once():
    given = {"stages": np.array([2, 4, 8]), "microbatches": np.array([4, 8, 32])}
    for name in ("1f1b", "zb-h2", "dualpipe"):
        for index in range(3):
            one = {key: int(values[index]) for key, values in given.items()}
            assert int(lockstep_ticks(name, **given)[index]) == int(lockstep_ticks(name, **one))
            for buffer in Slots.__struct_fields__:
                assert int(lockstep_slots(name, buffer, **given)[index]) == int(lockstep_slots(name, buffer, **one))


def test_an_unknown_schedule():
    with pytest.raises(InputError, match="schedule '1f2b' is not known"):
        lockstep_ticks("1f2b", stages=2, microbatches=2)
