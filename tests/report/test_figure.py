import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import save, si_scale, themed
from meshwright.report.marks import plot

ROWS = [{"x": 1, "y": 2}, {"x": 2, "y": 3}]


def line(rows):
    return themed(plot(rows).mark_line().encode(x="x:Q", y="y:Q"), "a line", width=200, height=100)


FIGURE = line(ROWS)
SPEC = json.loads(json.dumps(FIGURE.to_dict()))


def png_size(path: Path) -> tuple[int, int]:
    """Width and height from the header of a PNG file; fails when it is none."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_the_title_the_theme_and_the_rows_are_said():
    assert SPEC["title"] == {"text": "a line"}
    assert SPEC["config"]["font"] == "sans-serif"
    assert list(SPEC["datasets"].values()) == [ROWS]


def test_altair_is_loaded_for_pictures_alone():
    """Planning and printing start without it, though their modules import those that draw."""
    code = "import sys; import meshwright.cli.verbs.plan, meshwright.cli.verbs.sweep, meshwright.report.marks;"
    code += "print('altair' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_more_rows_than_altair_takes_from_a_table():
    assert len(*line([{"x": n, "y": n} for n in range(6_000)]).to_dict(validate=False)["datasets"].values()) == 6_000


def test_a_png_is_written_at_double_scale(tmp_path):
    width, height = png_size(save(FIGURE, tmp_path / "line.png"))
    assert width > 2 * 200
    assert height > 2 * 100


def test_an_svg_and_the_spec_are_written(tmp_path):
    assert save(FIGURE, tmp_path / "line.SVG").read_text().startswith("<svg")
    assert json.loads(save(FIGURE, str(tmp_path / "line.json")).read_text()) == SPEC


def test_nothing_but_the_picture_is_left_behind(tmp_path):
    save(FIGURE, tmp_path / "line.json")
    assert [path.name for path in tmp_path.iterdir()] == ["line.json"]
    assert (tmp_path / "line.json").stat().st_mode & 0o400


@pytest.mark.parametrize("name", ["line.pdf", "line", "png"])
def test_another_suffix_is_refused(tmp_path, name):
    with pytest.raises(InputError, match=r"ends in \.png, \.svg or \.json"):
        save(FIGURE, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_made(tmp_path):
    assert save(FIGURE, tmp_path / "new" / "line.json").parent.is_dir()


def test_a_failed_write_leaves_the_old_picture(tmp_path):
    path = save(FIGURE, tmp_path / "line.json")
    with pytest.raises(ValueError, match="JSON"):
        save(line([{"x": 1, "y": float("nan")}]), path)
    assert json.loads(path.read_text()) == SPEC


@pytest.mark.parametrize(
    ("largest", "unit", "expected"),
    [
        (0.02, "s", (1e-3, "ms")),
        (1.0, "s", (1.0, "s")),
        (999.9e-6, "s", (1e-6, "us")),
        (1e-12, "s", (1e-9, "ns")),
        (95e9, "B", (1e9, "GB")),
        (0.5, "B", (1.0, "B")),
        (1.6e6, "", (1e6, "M")),
        (0.0, "s", (1.0, "s")),
        (float("inf"), "s", (1.0, "s")),
    ],
)
def test_si_scale(largest, unit, expected):
    scale, name = si_scale(largest, unit)
    assert (pytest.approx(scale), name) == expected
