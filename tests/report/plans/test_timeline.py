"""The timeline of a schedule, drawn and in letters."""

import pytest

from meshwright.algebra.schedules.registry import build, default_chunks
from meshwright.algebra.schedules.simulation import simulate
from meshwright.core.errors import InputError
from meshwright.report.figure import save
from meshwright.report.plans.timeline import COLORS, IDLE, timeline_figure, timeline_text
from tests.charts import marks


def run(name, stages=4, microbatches=8):
    made = build(name, stages=stages, microbatches=microbatches, chunks=default_chunks(name))
    share = made.piece_share
    return made, simulate(made, forward_s=share, backward_s=share, weight_s=share)


def layers(figure):
    idle, boxes, numbers = marks(figure)
    return idle["rows"], boxes["rows"], numbers["rows"], boxes["encoding"]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "dualpipe", "dualpipe-v"])
def test_every_op_is_a_box_where_it_runs(name):
    made, found = run(name)
    idle, boxes, _, _ = layers(timeline_figure(made, found, unit="units"))
    drawn = sorted((box["device"], box["start"], box["end"]) for box in boxes)
    ran = sorted(
        (device, start, end)
        for device, (starts, ends) in enumerate(zip(found.start_s, found.end_s, strict=True))
        for start, end in zip(starts, ends, strict=True)
    )
    assert drawn == ran
    assert [(row["device"], row["start"], row["end"]) for row in idle] == [(d, 0, found.makespan_s) for d in range(4)]


def test_passes_have_their_colours_and_chunks_their_shades():
    color = layers(timeline_figure(*run("zb-h1")))[3]["color"]
    wanted = ["forward", "input gradients", "weight gradients"]
    assert dict(zip(color["scale"]["domain"], color["scale"]["range"], strict=True)) == {n: COLORS[n] for n in wanted}
    color = layers(timeline_figure(*run("interleaved")))[3]["color"]
    shades = dict(zip(color["scale"]["domain"], color["scale"]["range"], strict=True))
    assert list(shades) == [f"{what}, chunk {chunk}" for what in ("forward", "backward") for chunk in (0, 1)]
    assert shades["forward, chunk 0"] == COLORS["forward"]
    assert len(set(shades.values())) == 4
    assert IDLE not in shades.values()


def test_seconds_are_shown_in_one_unit(tmp_path):
    made = build("1f1b", stages=2, microbatches=2)
    figure = timeline_figure(made, simulate(made, forward_s=1e-3, backward_s=2e-3))
    _, boxes, _, encoding = layers(figure)
    assert encoding["x"]["title"] == "time (ms)"
    assert max(box["end"] for box in boxes) == pytest.approx(9)
    assert save(figure, tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_stand_where_they_fit():
    made, found = run("1f1b")
    assert len(layers(timeline_figure(made, found))[2]) == 2 * 4 * 8
    made, found = run("1f1b", 8, 32)
    assert len(layers(timeline_figure(made, found))[2]) == 2 * 8 * 32
    made, found = run("1f1b", 8, 128)
    fewer = layers(timeline_figure(made, found))[2]
    assert {len(row["text"]) for row in fewer} <= {1, 2}
    assert not layers(timeline_figure(*run("1f1b", 64, 64)))[2]


def test_too_many_passes_are_refused():
    with pytest.raises(InputError, match="65,536 passes are too many to draw; a picture shows at most 20,000"):
        timeline_figure(*run("1f1b", 64, 512))


def test_letters():
    """Three columns a unit: F 1, B 2; and in small letters what goes through the second chunk."""
    assert timeline_text(*run("1f1b", 2, 2), width=30) == (
        "0  F0-F1-......B0----...B1----\n"
        "1  ...F0-B0----F1-B1----......\n"
    )  # fmt: skip
    assert timeline_text(*run("dualpipe-v", 2, 4), width=50).splitlines()[1] == "1  .FfFfFb0fB0Fb1fB1b2B2bBwW"


def test_what_does_not_fit_is_left_out():
    made, found = run("1f1b", 8, 32)
    assert timeline_text(made, found, width=80) == ""
    assert len(timeline_text(made, found, width=120).splitlines()[0]) == 3 + 117
