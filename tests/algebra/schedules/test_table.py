"""The table: placements, rows, and the orders of the named schedules."""

import pytest

from meshwright.algebra.schedules.registry import build, default_chunks, schedule_names
from meshwright.algebra.schedules.table import PLACEMENTS, StagePlace
from meshwright.core.errors import InputError


def order(name, device, *, stages, microbatches, chunks=1):
    made = build(name, stages=stages, microbatches=microbatches, chunks=chunks)
    return " ".join(map(str, made.orders[device]))


def test_placements():
    looped, v, bidirectional = (PLACEMENTS[name].routes for name in ("looped", "v", "bidirectional"))
    assert looped(2, 2) == ((StagePlace(0), StagePlace(1), StagePlace(0, 1), StagePlace(1, 1)),)
    assert v(2, 2) == ((StagePlace(0), StagePlace(1), StagePlace(1, 1), StagePlace(0, 1)),)
    down, up = bidirectional(3, 1)
    assert down == (StagePlace(0), StagePlace(1), StagePlace(2))
    assert up == (StagePlace(2, 1), StagePlace(1, 1), StagePlace(0, 1))


def held(schedule):
    """Device, chunk and virtual stage of every op."""
    rows = enumerate(zip(schedule.orders, schedule.tasks, strict=True))
    return {(device, op.chunk, task.makes.stage) for device, row in rows for op, task in zip(*row, strict=True)}


def test_tasks_say_which_virtual_stage_an_op_is():
    made = build("interleaved", stages=2, microbatches=2, chunks=3)
    assert held(made) == {(device, chunk, chunk * 2 + device) for device in range(2) for chunk in range(3)}
    made = build("dualpipe-v", stages=3, microbatches=6, chunks=2)
    assert held(made) == {
        *((device, 0, device) for device in range(3)),
        *((device, 1, 5 - device) for device in range(3)),
    }


def test_dualpipe_holds_two_stages_per_device():
    made = build("dualpipe", stages=4, microbatches=8)
    stages = {(d, task.makes.microbatch < 4): task.makes.stage for d in range(4) for task in made.tasks[d]}
    assert stages == {(d, first): d if first else 3 - d for d in range(4) for first in (True, False)}
    assert (made.weight_copies, made.piece_share, made.num_virtual_stages) == (2, 1.0, 4)


ORDERS = [
    ("naive", 1, {"stages": 2, "microbatches": 2}, "F0 B0 F1 B1"),
    ("gpipe", 1, {"stages": 2, "microbatches": 2}, "F0 F1 B0 B1"),
    ("1f1b", 0, {"stages": 3, "microbatches": 4}, "F0 F1 F2 B0 F3 B1 B2 B3"),
    ("1f1b", 2, {"stages": 3, "microbatches": 4}, "F0 B0 F1 B1 F2 B2 F3 B3"),
    ("1f1b", 0, {"stages": 4, "microbatches": 2}, "F0 F1 B0 B1"),
    # Megatron: 2 (stages - 1 - device) + (chunks - 1) stages forward passes first, in groups of `stages` microbatches
    (
        "interleaved",
        0,
        {"stages": 2, "microbatches": 4, "chunks": 2},
        "F0 F1 F0/1 F1/1 F2 B0/1 F3 B1/1 F2/1 B0 F3/1 B1 B2/1 B3/1 B2 B3",
    ),
    (
        "interleaved",
        1,
        {"stages": 2, "microbatches": 4, "chunks": 2},
        "F0 F1 F0/1 B0/1 F1/1 B1/1 F2 B0 F3 B1 F2/1 B2/1 F3/1 B3/1 B2 B3",
    ),
    # the paper's figure 3: W begins when as many microbatches are alive as there are devices
    ("zb-h1", 0, {"stages": 3, "microbatches": 5}, "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4"),
    ("zb-h1", 2, {"stages": 3, "microbatches": 5}, "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4"),
    ("zb-h2", 0, {"stages": 2, "microbatches": 4}, "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"),
    ("zb-h2", 1, {"stages": 2, "microbatches": 4}, "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"),
    # the shortest step of the published code: 4 devices, 4 microbatches each way
    ("dualpipe", 0, {"stages": 4, "microbatches": 8}, "F0 F1 F2 F4/1 B4/1 W4/1 F5/1 F3 B5/1 F6/1 B0 B6/1 F7/1 B1 "
     "B7/1 B2 W2 B3 W3"),
    ("dualpipe", 1, {"stages": 4, "microbatches": 8}, "F0 F4/1 F1 F5/1 F2 B4/1 F6/1 B0 F3 B5/1 F7/1 B1 B6/1 B2 "
     "B7/1 B3 W7/1 W3"),
    ("dualpipe-v", 1, {"stages": 2, "microbatches": 4, "chunks": 2}, "F0 F0/1 F1 F1/1 F2 B0/1 F2/1 B0 F3 B1/1 F3/1 B1 "
     "B2/1 B2 B3/1 B3 W3/1 W3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "device", "sizes", "expected"), ORDERS)
def test_orders(name, device, sizes, expected):
    assert order(name, device, **sizes) == expected


def test_the_two_directions_of_dualpipe_mirror_each_other():
    made = build("dualpipe", stages=8, microbatches=20)
    for device in range(8):
        mirrored = [(op.kind, (op.microbatch + 10) % 20, 1 - op.chunk) for op in made.orders[7 - device]]
        assert [(op.kind, op.microbatch, op.chunk) for op in made.orders[device]] == mirrored


REFUSED = [
    ("1fb1", {}, "schedule '1fb1' is not known. Did you mean '1f1b'?"),
    ("1f1b", {"stages": 0}, "stages=0 must be at least 1"),
    ("1f1b", {"chunks": 2}, "chunks=2 is not for 1f1b, whose devices hold 1. Use chunks=1, or the interleaved"),
    ("interleaved", {"chunks": 1}, "needs chunks=2 or more, not 1. Use chunks=2, or 1f1b."),
    (
        "interleaved",
        {"chunks": 2, "microbatches": 10},
        "microbatches that stages=4 divides, not 10. Use for example 8.",
    ),
    ("dualpipe", {"stages": 3}, "needs an even number of stages, not 3. Use 4"),
    ("dualpipe", {"microbatches": 6}, "at least 8 for 4 stages, not 6. Use for example 8."),
    ("dualpipe", {"microbatches": 11}, "not 11. Use for example 12."),
    ("dualpipe-v", {"microbatches": 7, "chunks": 2}, "at least 8 microbatches for 4 stages, not 7. Use 8."),
    ("dualpipe-v", {}, "chunks=1 is not for dualpipe-v, whose devices hold 2. Use chunks=2."),
]


@pytest.mark.parametrize(("name", "sizes", "message"), REFUSED)
def test_sizes_that_do_not_exist(name, sizes, message):
    with pytest.raises(InputError) as error:
        build(name, **{"stages": 4, "microbatches": 8, "chunks": 1, **sizes})
    assert message in str(error.value)


@pytest.mark.parametrize("name", schedule_names())
def test_rows_are_the_same_data_every_time(name):
    sizes = {"stages": 4, "microbatches": 8, "chunks": default_chunks(name)}
    assert build(name, **sizes) == build(name, **sizes)
    assert hash(build(name, **sizes)) == hash(build(name, **sizes))
