"""Tick tables, replayed with named values in the slots: every read finds what it should, and no write hits one."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.algebra.schedules.file import format_schedule, read_schedule
from meshwright.algebra.schedules.registry import build, default_chunks, schedule_names
from meshwright.algebra.schedules.simulation import peak_stash
from meshwright.algebra.schedules.table import PLACEMENTS, Schedule, StagePass
from meshwright.algebra.schedules.ticks import forward_tables, lockstep_seconds, tick_tables
from tests.traffic import num_permutes

BUFFERS = ("x", "dx", "stash", "head", "handed")
SIZES = [(name, stages, m) for name in schedule_names() for stages, m in ((2, 4), (4, 8), (4, 12), (6, 12))]


def made(name, stages, microbatches, chunks=None):
    return build(name, stages=stages, microbatches=microbatches, chunks=chunks or default_chunks(name))


class Replay:
    """The tables as the devices run them. A slot holds what was put there until it is read."""

    def __init__(self, tables):
        self.tables, self.schedule, self.slots = tables, tables.schedule, {}
        self.stages = self.schedule.virtual_stages()
        self.ran, self.most = Counter(), Counter()
        for tick in range(tables.num_ticks):
            self.tick(tick)
        assert not self.slots, f"never read: {self.slots}"

    def put(self, buffer, device, slot, value):
        assert 0 <= slot < getattr(self.tables.slots, buffer)
        assert (buffer, device, slot) not in self.slots, f"{value} hits {self.slots[buffer, device, slot]}"
        self.slots[buffer, device, slot] = value
        alive = sum(key[:2] == (buffer, device) for key in self.slots)
        self.most[buffer, device] = max(self.most[buffer, device], alive)

    def take(self, buffer, device, slot, wanted):
        assert self.slots.pop((buffer, device, slot)) == wanted

    def stage(self, device, row):
        return self.stages[self.schedule.route_of[row.microbatch], device, row.chunk]

    def row(self, columns, tick, device):
        return type(columns)(*(int(column[tick, device]) for column in columns))

    def tick(self, tick):
        columns, last = self.tables.columns, self.schedule.num_virtual_stages - 1
        x_sent, dx_sent = {}, {}
        for device in range(self.schedule.num_devices):
            x_sent[device] = self.forward(device, self.row(columns.forward, tick, device), last)
            dx_sent[device] = self.backward(device, self.row(columns.backward, tick, device), last)
            self.weight(device, self.row(columns.weight, tick, device))
        for buffer, channels, arrivals, sent in (
            ("x", self.tables.x_channels, columns.x_arrivals, x_sent),
            ("dx", self.tables.dx_channels, columns.dx_arrivals, dx_sent),
        ):
            for channel, slots in zip(channels, arrivals, strict=True):
                for source, device in channel.pairs:
                    assert (device - source) % self.schedule.num_devices == channel.offset
                    if slots[tick, device] >= 0:
                        self.put(buffer, device, int(slots[tick, device]), sent[source])

    def forward(self, device, row, last):
        if row.microbatch < 0:
            return None
        stage, m = self.stage(device, row), row.microbatch
        self.ran["F", stage, m] += 1
        assert (row.x_slot < 0) == (stage == 0)
        if stage:
            self.take("x", device, row.x_slot, (stage, m))
        assert row.is_last == (stage == last)
        if self.tables.has_backward:
            self.put("stash", device, row.stash_slot, (stage, m))
            assert (row.head_slot >= 0) == (stage == last)
            if stage == last:
                self.put("head", device, row.head_slot, m)
        return stage + 1, m

    def backward(self, device, row, last):
        if row.microbatch < 0:
            return None
        stage, m = self.stage(device, row), row.microbatch
        self.ran["B", stage, m] += 1
        assert (row.dx_slot < 0) == (stage == last)
        if stage == last:
            self.take("head", device, row.head_slot, m)
        else:
            self.take("dx", device, row.dx_slot, (stage, m))
        self.take("stash", device, row.stash_slot, (stage, m))
        assert row.is_first == (stage == 0)
        if row.handed_slot >= 0:
            self.put("handed", device, row.handed_slot, (stage, m))
        return stage - 1, m

    def weight(self, device, row):
        if row.microbatch >= 0:
            stage, m = self.stage(device, row), row.microbatch
            self.ran["W", stage, m] += 1
            self.take("handed", device, row.handed_slot, (stage, m))


def check(tables, kinds=("F", "B", "W")):
    """Every op ran once, with what it needs in its slots; and no buffer is larger than what is alive at once."""
    replay, schedule = Replay(tables), tables.schedule
    stages = schedule.virtual_stages()
    wanted = Counter(
        (op.kind, stages[schedule.route_of[op.microbatch], device, op.chunk], op.microbatch)
        for device, order in enumerate(schedule.orders)
        for op in order
        if op.kind in kinds
    )
    assert replay.ran == wanted
    for buffer in BUFFERS:
        alive = tuple(replay.most[buffer, device] for device in range(schedule.num_devices))
        assert tables.live[buffer] == alive
        assert getattr(tables.slots, buffer) == max(alive)


@pytest.mark.parametrize(("name", "stages", "microbatches"), SIZES)
def test_every_read_finds_its_value_and_no_write_hits_one(name, stages, microbatches):
    check(tick_tables(made(name, stages, microbatches)))


@pytest.mark.parametrize(("name", "stages", "microbatches"), SIZES)
def test_forward_passes_alone(name, stages, microbatches):
    tables = forward_tables(made(name, stages, microbatches))
    check(tables, kinds=("F",))
    assert (tables.has_backward, tables.has_split, tables.dx_channels) == (False, False, ())
    assert tables.slots.stash == tables.slots.head == 0


@st.composite
def any_schedule(draw):
    """Any order that can run: op after op, each one that has what it needs, on routes of every form."""
    devices, microbatches = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    routes = PLACEMENTS[draw(st.sampled_from(sorted(PLACEMENTS)))].routes(devices, draw(st.integers(1, 3)))
    route_of = tuple(draw(st.integers(0, len(routes) - 1)) for _ in range(microbatches))
    last, orders = len(routes[0]) - 1, [[] for _ in range(devices)]
    ready = [("F", 0, m) for m in range(microbatches)]
    while ready:
        kind, stage, m = ready.pop(draw(st.integers(0, len(ready) - 1)))
        place = routes[route_of[m]][stage]
        orders[place.device].append(StagePass(kind, m, place.chunk))
        if kind == "F":
            ready.append(("F", stage + 1, m) if stage < last else ("B", stage, m))
        elif kind == "B":
            ready.extend([("B", stage - 1, m)] if stage else [])
            ready.extend([("W", stage, m)] if draw(st.booleans()) else [])
    return Schedule(name="any", routes=routes, route_of=route_of, orders=tuple(map(tuple, orders)))


@settings(max_examples=60, deadline=None)
@given(any_schedule())
def test_any_schedule_that_can_run(schedule):
    check(tick_tables(schedule))


def test_a_schedule_that_a_person_wrote(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("placement = v\n0: F0 F1 F0/1 B0/1 F1/1 B0 W0 B1/1 B1\n1: F0 F0/1 F1 B0/1 W0/1 F1/1 B0 B1/1 B1\n")
    own = read_schedule(path)
    check(tick_tables(own))
    for name in schedule_names():
        path.write_text(format_schedule(made(name, 4, 8)))
        assert tick_tables(read_schedule(path)).slots == tick_tables(made(name, 4, 8)).slots


def test_1f1b_keeps_a_microbatch_for_a_tick_each_way_and_gpipe_all():
    """Lockstep needs 2 (stages - 1 - device) + 1 where the order alone would need stages - device."""
    tables = tick_tables(made("1f1b", 4, 16))
    assert tables.live["stash"] == (7, 5, 3, 1)
    assert peak_stash(made("1f1b", 4, 16)) == (4, 3, 2, 1)
    assert (tables.slots.x, tables.slots.dx, tables.slots.head, tables.slots.handed) == (1, 1, 1, 0)
    everything = tick_tables(made("gpipe", 4, 16))
    assert everything.live["stash"] == (16,) * 4
    assert everything.live["head"] == (0, 0, 0, 16)
    assert tick_tables(made("naive", 4, 16)).slots.stash == 1


@pytest.mark.parametrize("microbatches", [8, 16, 32])
def test_what_waits_for_w_does_not_grow_with_microbatches(microbatches):
    assert tick_tables(made("zb-h1", 4, microbatches)).slots.handed == 4
    assert tick_tables(made("zb-h2", 4, microbatches)).slots.handed == 7


def test_channels_are_the_ways_between_devices():
    """Round and round: one way for x, the other for dx. In a V both go both ways, and stay at home at the turn."""
    ring = tick_tables(made("1f1b", 4, 8))
    assert [(c.offset, c.pairs) for c in ring.x_channels] == [(1, ((0, 1), (1, 2), (2, 3)))]
    assert [(c.offset, c.pairs) for c in ring.dx_channels] == [(3, ((1, 0), (2, 1), (3, 2)))]
    loop = tick_tables(made("interleaved", 4, 8))
    assert loop.x_channels[0].pairs == ((0, 1), (1, 2), (2, 3), (3, 0))
    turn = tick_tables(made("dualpipe-v", 4, 8))
    assert [c.offset for c in turn.x_channels] == [c.offset for c in turn.dx_channels] == [0, 1, 3]
    assert turn.x_channels[0].pairs == ((3, 3),)
    dual = tick_tables(made("dualpipe", 4, 8))
    assert [num_permutes(one) for one in (ring, loop, turn, dual)] == [2, 2, 4, 4]


def test_columns_are_small_integers():
    tables = tick_tables(made("1f1b", 2, 4))
    assert tables.columns.forward.microbatch.dtype == np.int32
    assert tables.columns.forward.microbatch.tolist() == [[0, -1], [1, 0], [2, 1], [3, 2], [-1, 3], [-1, -1]]
    assert tables.columns.backward.microbatch.tolist() == [[-1, -1], [-1, 0], [0, 1], [1, 2], [2, 3], [3, -1]]


@pytest.mark.parametrize("name", schedule_names())
def test_whether_passes_are_split_is_read_off_the_rows(name):
    tables = tick_tables(made(name, 4, 8))
    assert tables.has_split == made(name, 4, 8).is_split
    assert tables.has_whole == (name not in ("zb-h1", "zb-h2"))


# -- the length of the tables, what they keep alive, and their time in lockstep ----------------------------------


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 8), (8, 32)])
def test_1f1b_has_a_tick_per_microbatch_and_the_way_there_and_back(stages, microbatches):
    tables = tick_tables(made("1f1b", stages, microbatches))
    assert tables.num_ticks == microbatches + 2 * (stages - 1)
    for tick, row in enumerate(tables.ticks):
        for device, slots in enumerate(row):
            forward, backward = tick - device, tick - 2 * (stages - 1) + device
            found = {task.makes.kind: task.makes.microbatch for task in slots}
            assert found.get("F") == within(forward, microbatches)
            assert found.get("B") == within(backward, microbatches)


def within(number, count):
    return number if 0 <= number < count else None


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_has_a_tick_per_pass_through_a_chunk(chunks):
    stages, microbatches = 4, 8
    tables = tick_tables(made("interleaved", stages, microbatches, chunks))
    assert tables.num_ticks == microbatches * chunks + 2 * (stages - 1) + (chunks - 1) * stages


def test_gpipe_and_naive_stay_what_they_are():
    assert tick_tables(made("gpipe", 4, 8)).peak_stash == (8,) * 4
    assert tick_tables(made("gpipe", 4, 8)).num_ticks == 2 * (8 + 4 - 1) - 1
    assert tick_tables(made("naive", 4, 3)).peak_stash == (1,) * 4


@pytest.mark.parametrize("name", schedule_names())
def test_no_more_is_alive_than_twice_the_peak_less_one(name):
    schedule = made(name, 4, 12)
    for before, after in zip(peak_stash(schedule), tick_tables(schedule).peak_stash, strict=True):
        assert after <= 2 * before - schedule.piece_share + 1e-12


def efficiency(name, *, chunks=None, backward=2.0):
    """Work over time in lockstep, 8 stages and 32 microbatches."""
    schedule = made(name, 8, 32, chunks)
    share = schedule.piece_share
    step = lockstep_seconds(tick_tables(schedule), forward_s=share, backward_s=(backward - 1) * share, weight_s=share)
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
    tables = tick_tables(made("1f1b", 4, 8))
    alone = lockstep_seconds(tables, forward_s=1, backward_s=2)
    assert alone == 33
    assert lockstep_seconds(tables, forward_s=1, backward_s=2, send_s=0.1) == pytest.approx(alone + 12 * 0.1)
