"""Every named schedule can run; tables that cannot are told why."""

import re

import pytest

from meshwright.algebra.schedules.check import check
from meshwright.algebra.schedules.forms import is_legal
from meshwright.algebra.schedules.registry import build, default_chunks, schedule_names
from meshwright.algebra.schedules.table import PLACEMENTS, Schedule, StagePass
from meshwright.core.errors import InputError


def parsed(*orders):
    """A schedule of texts such as "F0 B0"."""
    parsed_op = re.compile(r"([FBW])(\d+)/?(\d*)").fullmatch
    words = ((parsed_op(word).groups() for word in order.split()) for order in orders)
    made = tuple(tuple(StagePass(kind, int(m), int(chunk or 0)) for kind, m, chunk in row) for row in words)
    count = 1 + max(op.microbatch for order in made for op in order)
    routes = PLACEMENTS["looped"].routes(len(made), 1)
    return Schedule(name="mine", routes=routes, route_of=(0,) * count, orders=made)


@pytest.mark.parametrize("name", schedule_names())
def test_every_named_schedule_can_run(name):
    chunk_counts = (2, 3) if name == "interleaved" else (default_chunks(name),)
    checked = 0
    for stages in (1, 2, 3, 4, 6):
        for microbatches in (1, 2, 3, 6, 8, 12, 13):
            for chunks in chunk_counts:
                if is_legal(name, stages=stages, microbatches=microbatches, chunks=chunks):
                    made = build(name, stages=stages, microbatches=microbatches, chunks=chunks)
                    assert check(made) is made
                    checked += 1
    assert checked >= 6


BROKEN = [
    (("F0 F1 B0", "F0 B0 F1 B1"), "B1 is missing on device 0. Every microbatch needs F and B"),
    (("F0 B0 F0", "F0 B0"), "device 0, op 3: F0 occurs twice (first at device 0, op 1)"),
    (("F0 B0", "B0 F0"), "device 1, op 1: B0 comes before F0. Write F0 earlier."),
    (("F0 W0 B0", "F0 B0"), "device 0, op 2: W0 comes before B0."),
    (("F0 B0/1", "F0 B0"), "device 0, op 2: B0/1 cannot run on device 0: microbatch 0 does not pass chunk 1 there"),
    # each device wants the other's second microbatch first
    (("F0 B0 F1 B1", "F0 F1 B0 B1"), "devices wait for each other (device 0 before B0, device 1 before F1)"),
]


@pytest.mark.parametrize(("orders", "message"), BROKEN)
def test_tables_that_cannot_run(orders, message):
    with pytest.raises(InputError) as error:
        check(parsed(*orders))
    assert message in str(error.value)


def test_weight_gradients_may_be_split_for_some_microbatches_only():
    check(parsed("F0 F1 B0 B1 W1", "F0 B0 W0 F1 B1"))
