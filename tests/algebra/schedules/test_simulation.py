"""The simulator: worked examples, what the papers say of their schedules, and stages that are not alike."""

import pytest

from meshwright.algebra.schedules.registry import build, default_chunks, definition, schedule_names
from meshwright.algebra.schedules.simulation import peak_stash, simulate
from meshwright.core.errors import InputError
from tests.speed import took

GRID = [(2, 8), (4, 8), (4, 16), (8, 16), (8, 32)]


def step(name, stages, microbatches, *, forward=1.0, backward=1.0, weight=1.0, chunks=None, **more):
    """One step, times of one device's layers."""
    made = build(name, stages=stages, microbatches=microbatches, chunks=chunks or default_chunks(name))
    share = made.piece_share
    return simulate(made, forward_s=forward * share, backward_s=backward * share, weight_s=weight * share, **more)


def test_by_hand():
    """Two devices, two microbatches: F 1, B 2, and what is sent takes 0.5."""
    made = build("1f1b", stages=2, microbatches=2)
    found = simulate(made, forward_s=1, backward_s=2, send_s=0.5)
    # device 0: F0 F1 B0 B1; device 1: F0 B0 F1 B1
    assert found.start_s == ((0, 1, 5, 8), (1.5, 2.5, 4.5, 5.5))
    assert found.end_s == ((1, 2, 7, 10), (2.5, 4.5, 5.5, 7.5))
    assert (found.makespan_s, found.busy_s, found.idle_s) == (10, (6, 6), (4, 4))
    assert found.span_s == (10, 6)
    assert (found.bubble_s, found.bubble_share, found.bubble_without_barrier_s) == (4, 0.4, 4)
    assert found.peak_stash == (2, 1)


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_bubble_share(name, stages, microbatches):
    """(K - 1) / (M + K - 1), whatever a backward pass costs. Source: GPipe; Scaling systems for LLMs."""
    for backward in (1, 2, 3):
        found = step(name, stages, microbatches, backward=backward)
        assert found.bubble_share == pytest.approx((stages - 1) / (microbatches + stages - 1), rel=1e-12)


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(stages, microbatches, chunks):
    """Source: Narayanan et al. (2021), section 2.2."""
    found = step("interleaved", stages, microbatches, chunks=chunks)
    assert found.bubble_s == pytest.approx((stages - 1) * 3 / chunks, rel=1e-12)


@pytest.mark.parametrize(("stages", "microbatches"), [(p, m) for p, m in GRID if m >= 2 * p - 1])
@pytest.mark.parametrize(("forward", "backward", "weight"), [(1, 1, 1), (2, 3, 2), (3, 4, 2), (5, 5, 4)])
def test_zero_bubble_papers_bubbles(stages, microbatches, forward, backward, weight):
    """(p-1)(F + B - W) and (p-1)(F + B - 2W), of the largest span, with 1F1B's memory and twice as much.

    B makes input gradients only. Source: Qi et al. (2023), table 2. Theirs hold where no B waits for another.
    """
    times = {"forward": forward, "backward": backward, "weight": weight}
    h1, h2 = (step(name, stages, microbatches, **times) for name in ("zb-h1", "zb-h2"))
    assert h1.bubble_without_barrier_s == pytest.approx((stages - 1) * (forward + backward - weight))
    assert h2.bubble_without_barrier_s == pytest.approx((stages - 1) * (forward + backward - 2 * weight))
    assert h1.peak_stash == (stages,) * stages
    assert h2.peak_stash == (2 * stages - 1,) * stages
    assert max(step("1f1b", stages, microbatches).peak_stash) == stages


@pytest.mark.parametrize(("stages", "microbatches"), [(p, m) for p, m in GRID if m >= 2 * p - 1])
def test_a_barrier_takes_the_gain_of_zb_h2(stages, microbatches):
    """The last device cannot start before stages - 1 forward passes, so that with F = B = W both wait as long."""
    h1, h2 = (step(name, stages, microbatches) for name in ("zb-h1", "zb-h2"))
    assert h2.bubble_without_barrier_s == 0
    assert h1.bubble_s == h2.bubble_s == stages - 1


PUBLISHED = {
    # GPipe (2019), PipeDream-2BW (2021), Narayanan et al. (2021): (p - 1)(F + B), B the whole backward pass
    "gpipe": (lambda p, f, b, w: (p - 1) * (f + b), 1),
    "1f1b": (lambda p, f, b, w: (p - 1) * (f + b), 1),
    "interleaved": (lambda p, f, b, w: (p - 1) * (f + b) / 2, 1),
    # Qi et al. (2023), table 2, at F = B = W, whose B is half of the whole; a barrier takes the gain of ZB-H2
    "zb-h1": (lambda p, f, b, w: (p - 1) * (f + (b - w) - w), 1),
    "zb-h2": (lambda p, f, b, w: (p - 1) * (f + (b - w) - 2 * w), None),
    # DeepSeek-V3 (2024), table of bubbles; dualpipe-v has two stages a device, each half as long
    "dualpipe": (lambda p, f, b, w: (p / 2 - 1) * ((f + b) + b - 3 * w), 1 / 2),
    "dualpipe-v": (lambda p, f, b, w: (p - 1) * ((f + b) + b - 3 * w) / 2, 1 / 2),
}
"""Schedule -> its published bubble of p devices, for the seconds F, B and W of a device where B holds W; and the share
of it that its rows have."""


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (6, 24), (8, 16), (8, 32)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_bubbles(name, stages, microbatches):
    """A published F&B hands the results of both passes on together. As rows one after the other each is sent when it is
    ready, which halves the bubbles of DualPipe where F&B takes F + B."""
    formula, share = PUBLISHED[name]
    found, published = step(name, stages, microbatches), formula(stages, 1.0, 2.0, 1.0)
    if share is None:
        assert (found.bubble_without_barrier_s, found.bubble_s) == (published, stages - 1)
        return
    assert found.bubble_s == pytest.approx(share * published)
    other = definition(name).published
    assert (other is None) == (share == 1)
    if other:
        assert other.seconds(stages, microbatches, 1, 1.0, 1.0, 1.0) == pytest.approx(published)


def bubble_in_pairs(stages, microbatches, forward, backward, weight):
    """The bubble of dualpipe where F and the B after it, of the other direction, are one pass: it waits for the inputs
    of both, and its results leave together."""
    made = build("dualpipe", stages=stages, microbatches=microbatches)
    done, busy, at, left = {}, [], [0.0] * stages, []
    for device, order in enumerate(made.orders):
        split, units = {(one.microbatch, one.chunk) for one in order if one.kind == "W"}, []
        for one in order:
            whole = one.kind == "B" and (one.microbatch, one.chunk) not in split
            seconds = {"F": forward, "B": backward + weight * whole, "W": weight}[one.kind]
            route = made.routes[made.route_of[one.microbatch]]
            stage = next(n for n, place in enumerate(route) if (place.device, place.chunk) == (device, one.chunk))
            last = stage == len(route) - 1
            needs = {"F": ("F", stage - 1), "B": ("F" if last else "B", stage + (not last)), "W": ("F", -1)}[one.kind]
            entry = ((one.kind, stage, one.microbatch), (*needs, one.microbatch), seconds)
            before = units[-1] if units else []
            if whole and len(before) == 1 and before[0][0][0] == "F" and before[0][0][2] != one.microbatch:
                before.append(entry)
            else:
                units.append([entry])
        left.append(units)
        busy.append(sum(seconds for unit in units for _, _, seconds in unit))
    while any(left):
        for device, units in enumerate(left):
            while units and all(needs[1] < 0 or needs in done for _, needs, _ in units[0]):
                unit = units.pop(0)
                start = max(at[device], *(done.get(needs, 0.0) for _, needs, _ in unit))
                at[device] = start + sum(seconds for _, _, seconds in unit)
                done |= {what: at[device] for what, _, _ in unit}
    return max(at) - busy[0]


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 2), (2, 2, 1)])
@pytest.mark.parametrize(("stages", "microbatches"), [(4, 10), (8, 20), (8, 32)])
def test_dualpipe_in_pairs_has_the_published_bubble(stages, microbatches, times):
    """What makes the difference is that F&B is one pass."""
    published = definition("dualpipe").published.seconds(stages, microbatches, 1, *times)
    assert bubble_in_pairs(stages, microbatches, *times) == published


def test_every_schedule_with_a_published_bubble_is_compared():
    """Stages of the naive schedule run one at a time, which no paper proposes."""
    assert set(PUBLISHED) == set(schedule_names()) - {"naive"}


def test_dualpipe_holds_one_microbatch_more_than_stages():
    assert step("dualpipe", 8, 20).peak_stash == (9,) * 8


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 10), (4, 16)])
def test_dualpipe_v_is_half_of_a_dualpipe_of_twice_the_devices(stages, microbatches):
    """Its pieces are half as large: the same steps, on half as many devices."""
    half = step("dualpipe-v", stages, microbatches, backward=2.0)
    both = step("dualpipe", 2 * stages, 2 * microbatches, backward=2.0)
    assert half.bubble_s == pytest.approx(both.bubble_s / 2)
    assert half.peak_stash == pytest.approx([stash / 2 for stash in both.peak_stash[:stages]])


def test_what_is_kept_for_weight_gradients_counts():
    assert peak_stash(build("zb-h1", stages=4, microbatches=8)) == (4, 4, 4, 4)


def test_a_slow_last_stage_is_the_bottleneck():
    """A head that doubles the last stage: its work, the way there and the way back."""
    made = build("1f1b", stages=4, microbatches=8)
    found = simulate(made, forward_s=(1, 1, 1, 2), backward_s=(2, 2, 2, 4))
    assert found.busy_s == (24, 24, 24, 48)
    assert found.makespan_s == 8 * (2 + 4) + 3 * (1 + 2)
    assert found.bubble_share == pytest.approx((3 * (57 - 24) + 9) / (4 * 57))


def test_uneven_pieces_of_an_interleaved_schedule():
    """Times go by virtual stage: the second chunk's pieces are those after all first ones."""
    made = build("interleaved", stages=2, microbatches=2, chunks=2)
    found = simulate(made, forward_s=(1, 2, 4, 8), backward_s=(1, 2, 4, 8))
    assert found.busy_s == (2 * 2 * (1 + 4), 2 * 2 * (2 + 8))


def test_sends_are_hidden_by_passes_in_advance():
    """Per step of F + B + W = 3, what sends of 0.1 add: 1F1B waits in every round, schedules that run ahead do not."""
    added = {
        name: [step(name, 8, m, send_s=0.1).bubble_s - step(name, 8, m).bubble_s for m in (32, 64)]
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1")
    }
    assert added["gpipe"] == pytest.approx([1.4, 1.4])
    assert added["1f1b"] == pytest.approx([6.8, 12.4])
    assert added["interleaved"] == pytest.approx([3.0, 3.0])
    assert added["zb-h1"] == pytest.approx([2.8, 2.8])


@pytest.mark.parametrize("name", schedule_names())
def test_no_device_is_busier_than_its_ops(name):
    found = step(name, 4, 8, backward=2.0, send_s=0.3)
    assert found.busy_s == pytest.approx([8 * 4.0] * 4)
    for starts, ends in zip(found.start_s, found.end_s, strict=True):
        assert all(end <= start + 1e-12 for end, start in zip(ends, starts[1:], strict=False))


def test_times_that_do_not_match_are_refused():
    made = build("1f1b", stages=4, microbatches=8)
    with pytest.raises(InputError, match=r"3 forward times for 4 virtual stages. Give one, or one for each"):
        simulate(made, forward_s=(1, 1, 1), backward_s=2)
    with pytest.raises(InputError, match="must be numbers of at least 0"):
        simulate(made, forward_s=1, backward_s=-2)


def test_a_large_table_takes_about_a_second():
    with took() as cpu:
        found = step("1f1b", 64, 512)
    assert found.bubble_s == pytest.approx(63 * 3)
    assert cpu.yardsticks < 15
