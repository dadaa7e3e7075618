"""Segments of a window, and the partition of a step's wall time, on made-up events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.profile.events import DeviceTrace, OpEvent, Window
from meshwright.profile.hlo import parse_program
from meshwright.profile.times import LAUNCH_GAP_S, measure_times, segments, shared_seconds, working

TEXT = """HloModule made, is_scheduled=true

%body (p: f32[256,256]) -> f32[256,256] {
  %p = f32[256,256]{1,0} parameter(0)
  ROOT %inner = f32[256,256]{1,0} negate(%p), metadata={op_name="jit(f)/layer:forward:x=add/neg"}
}

ENTRY %main (a: f32[256,256], b: f32[256,256]) -> f32[256,256] {
  %a = f32[256,256]{1,0} parameter(0)
  %b = f32[256,256]{1,0} parameter(1)
  %dot.1 = f32[256,256]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/layer:forward:q=einsum/dot_general"}
  %add.1 = f32[256,256]{1,0} add(%dot.1, %b), metadata={op_name="jit(f)/layer:forward:x=add/add"}
  %all-gather.1 = f32[512,256]{1,0} all-gather(%add.1), dimensions={0}, metadata={op_name="jit(f)/layer:forward:wq=all_gather/all_gather"}
  ROOT %call.1 = f32[256,256]{1,0} call(%add.1), to_apply=%body
}
"""  # noqa: E501
PROGRAM = parse_program(TEXT, ridge=10.0)
OPS = ("dot.1", "add.1", "all-gather.1", "call.1", "inner")

spans = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)).map(lambda p: (min(p), max(p))), max_size=12)


def trace_of(*events, end=10.0, platform="gpu"):
    found = tuple(sorted(events, key=lambda e: (e.device, e.start_s, -e.end_s)))
    return DeviceTrace(
        platform=platform, events=found, windows=(Window(0.0, end),), by_thread=False, found_steps="annotations"
    )


def event(op, start, end, *, device=0, waits=()):
    return OpEvent(op, device, "lane", start, end, tuple(Window(*w) for w in waits))


@given(spans, st.tuples(st.floats(0, 10), st.floats(0, 10)).map(lambda p: (min(p), max(p))))
def test_segments_are_the_window_in_order_with_what_covers_each(intervals, window):
    found = list(segments([(start, end, number) for number, (start, end) in enumerate(intervals)], Window(*window)))
    edges = [edge for piece, _ in found for edge in piece]
    assert edges == sorted(edges)
    assert edges[1:-1:2] == edges[2::2]
    assert (edges[:1], edges[-1:]) == (([window[0]], [window[1]]) if window[0] < window[1] else ([], []))
    for (start, end), names in found:
        middle = (start + end) / 2
        covering = [n for n, (first, last) in enumerate(intervals) if first <= middle <= last and first < last]
        assert start < end
        assert middle in (start, end) or sorted(names) == covering


made = st.builds(
    lambda op, device, start, seconds: event(op, start, start + seconds, device=device),
    st.sampled_from(OPS),
    st.integers(0, 2),
    st.floats(-2, 11),
    st.one_of(st.floats(0, 6), st.floats(0, LAUNCH_GAP_S)),
)


@given(st.lists(made, min_size=1, max_size=25))
def test_the_parts_of_a_step_are_its_wall_time(events):
    times = measure_times(trace_of(*events), PROGRAM)
    for partition in [times.mean, *times.devices.values()]:
        assert partition.total_s == pytest.approx(10.0)
        assert min(partition.parts.values()) >= 0
    busy = times.mean.compute_s + times.mean.memory_s + times.mean.exposed_s
    # what instructions have of the wall time is the time in which any runs
    assert sum(op.wall_s for op in times.ops) == pytest.approx(busy)
    sent = [[e for e in events if e.device == device and e.op == "all-gather.1"] for device in times.devices]
    pieces = [segments([(e.start_s, e.end_s, e) for e in own], Window(0.0, 10.0)) for own in sent]
    flown = sum(piece.seconds for own in pieces for piece, flying in own if flying)
    assert times.communication_s == pytest.approx(flown / len(sent))
    assert times.hidden_s == pytest.approx(times.communication_s - times.mean.exposed_s)


def test_each_instant_is_the_first_of_the_five_that_holds():
    times = measure_times(
        trace_of(
            event("dot.1", 1, 3),
            event("all-gather.1", 2, 5),
            event("add.1", 4, 6),
            event("add.1", 6 + LAUNCH_GAP_S / 2, 7),
            event("add.1", 8, 9),
        ),
        PROGRAM,
    )
    found = times.mean
    assert found.compute_s == pytest.approx(2)  # 1-3
    assert found.memory_s == pytest.approx(4 - LAUNCH_GAP_S / 2)  # 4-7 without the gap, 8-9
    assert found.exposed_s == pytest.approx(1)  # 3-4
    assert found.overhead_s == pytest.approx(2 + LAUNCH_GAP_S / 2)  # 0-1, the gap, 9-10
    assert found.idle_s == pytest.approx(1)  # 7-8
    assert times.communication_s == pytest.approx(3)
    assert times.overlap == pytest.approx(2 / 3)
    assert {op.name: op.count for op in times.ops} == {"dot.1": 1, "all-gather.1": 1, "add.1": 3}


def test_containers_are_no_work():
    times = measure_times(trace_of(event("call.1", 1, 9), event("inner", 2, 4)), PROGRAM)
    assert times.mean.memory_s == pytest.approx(2)
    assert [op.name for op in times.ops] == ["inner"]


def test_means_are_over_devices():
    times = measure_times(trace_of(event("dot.1", 0, 10), event("dot.1", 0, 4, device=1)), PROGRAM)
    assert times.mean.compute_s == pytest.approx(7)
    assert times.devices[1].compute_s == pytest.approx(4)
    assert times.ops[0].own_s == pytest.approx(7)


def test_an_asynchronous_collective_flies_between_its_halves():
    text = TEXT.replace("all-gather.1 = f32[512,256]{1,0} all-gather(", "s = (f32[256,256]) all-gather-start(").replace(
        "  ROOT %call.1", "  %d = f32[512,256]{1,0} all-gather-done(%s)\n  ROOT %call.1"
    )
    program = parse_program(text, ridge=10.0)
    events = (event("s", 1, 1.1), event("dot.1", 1.1, 4), event("d", 4, 5))
    times = measure_times(trace_of(*events, platform="tpu"), program)
    assert times.communication_s == pytest.approx(4)
    assert times.overlap == pytest.approx(2.9 / 4)
    assert times.mean.exposed_s == pytest.approx(1.1)


# -- shared cores ---------------------------------------------------------------------------------------


def test_waiting_is_no_work():
    assert list(working(event("all-gather.1", 0, 10, waits=[(1, 3), (3, 9)]))) == [(0, 1), (9, 10)]
    found = shared_seconds(
        trace_of(event("all-gather.1", 0, 10, waits=[(1, 9)]), event("dot.1", 1, 9, device=1)), PROGRAM
    )
    assert found == {"all-gather.1": pytest.approx(2), "dot.1": pytest.approx(8)}


@given(st.lists(made, min_size=1, max_size=25))
def test_shared_seconds_are_the_time_in_which_anyone_works(events):
    found = shared_seconds(trace_of(*events), PROGRAM)
    work = [(e.start_s, e.end_s, e.op) for e in events if PROGRAM.is_work(e.op)]
    anyone = sum(piece.seconds for piece, ops in segments(work, Window(0.0, 10.0)) if ops)
    assert sum(found.values()) == pytest.approx(anyone, abs=1e-9)
