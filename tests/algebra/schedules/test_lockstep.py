"""What a schedule comes to in lockstep: the closed forms against the tables that run and their simulated time."""

import msgspec
import numpy as np
import pytest

from meshwright.algebra.schedules.forms import is_legal, lockstep_forms, stage_forms
from meshwright.algebra.schedules.registry import build, default_chunks, schedule_names
from meshwright.algebra.schedules.ticks import Slots, lockstep_seconds, tick_tables

TIMES = ((1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.25, 0.75), (1.5, 1.0, 0.25))
"""Seconds of F, B and W of all layers of a device."""


def sizes(name, most_stages=6):
    for stages in range(2, most_stages + 1):
        for microbatches in (1, 2, 3, 4, 6, 8, 9, 12, 16, 20):
            for chunks in (2, 3) if name == "interleaved" else (default_chunks(name),):
                if is_legal(name, stages=stages, microbatches=microbatches, chunks=chunks):
                    yield np.array([stages, microbatches, chunks])


def tables_of(name, size):
    stages, microbatches, chunks = map(int, size)
    return tick_tables(build(name, stages=stages, microbatches=microbatches, chunks=chunks))


def slots(name, size):
    return {buffer: int(getattr(lockstep_forms(name), buffer)(*size)) for buffer in Slots.__struct_fields__}


@pytest.mark.parametrize("name", schedule_names())
def test_slots_and_ticks_are_those_of_the_tables(name):
    for one in sizes(name):
        tables = tables_of(name, one)
        assert lockstep_forms(name).ticks(*one) == tables.num_ticks, one
        assert slots(name, one) == msgspec.structs.asdict(tables.slots), one


@pytest.mark.parametrize("name", schedule_names())
def test_idle_time_is_the_simulation_s(name):
    for one in sizes(name):
        tables, (p, m, v) = tables_of(name, one), one
        for forward, backward, weight in TIMES:
            given = (forward, backward, weight)
            run = lockstep_seconds(tables, forward_s=forward / v, backward_s=backward / v, weight_s=weight / v)
            found, idle = lockstep_forms(name).bubble_s(*one, *given), run - m * sum(given)
            assert found >= idle - 1e-9, (one, given)
            if name != "zb-h2" or not p < m < 2 * p - 1:
                assert found == pytest.approx(idle), (one, given)


@pytest.mark.parametrize("name", schedule_names())
def test_lockstep_is_never_faster(name):
    """Equal where nothing runs ahead; what fills bubbles with weight gradients loses by it."""
    for one in sizes(name):
        alone, together = (forms(name).bubble_s(*one, 1.0, 1.25, 0.75) for forms in (stage_forms, lockstep_forms))
        assert together >= alone - 1e-9
        if name in ("naive", "gpipe", "1f1b", "interleaved"):
            assert together == pytest.approx(alone)


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "naive"])
def test_the_messages_of_every_tick_are_waited_for(name):
    """But for those of the first and the last, which some device does not wait for; the naive schedule is one chain."""
    for one in sizes(name, most_stages=4):
        v, tables = one[2], tables_of(name, one)
        passes = {"forward_s": 1.0 / v, "backward_s": 2.0 / v, "weight_s": 1.0 / v}
        free, short = (lockstep_seconds(tables, **passes, send_s=send) for send in (0.0, 1e-4))
        assert (short - free) / 1e-4 == pytest.approx(lockstep_forms(name).sends(*one), abs=2.01), one
