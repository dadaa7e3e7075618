import json
import struct
from pathlib import Path

import pytest

from meshwright.core.errors import InputError
from meshwright.report.figure import save, si_scale, themed

SPEC = themed(
    {
        "data": {"values": [{"x": 1, "y": 2}, {"x": 2, "y": 3}]},
        "mark": "line",
        "width": 200,
        "height": 100,
        "encoding": {
            "x": {"field": "x", "type": "quantitative"},
            "y": {"field": "y", "type": "quantitative"},
        },
    }
)


def png_size(path: Path) -> tuple[int, int]:
    """Width and height from the header of a PNG file; fails when it is none."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_a_png_is_written_at_double_scale(tmp_path):
    width, height = png_size(save(SPEC, tmp_path / "line.png"))
    assert width > 2 * 200
    assert height > 2 * 100


def test_an_svg_and_the_spec_are_written(tmp_path):
    assert save(SPEC, tmp_path / "line.SVG").read_text().startswith("<svg")
    assert json.loads(save(SPEC, str(tmp_path / "line.json")).read_text()) == SPEC


def test_nothing_but_the_picture_is_left_behind(tmp_path):
    save(SPEC, tmp_path / "line.json")
    assert [path.name for path in tmp_path.iterdir()] == ["line.json"]
    assert (tmp_path / "line.json").stat().st_mode & 0o400


@pytest.mark.parametrize("name", ["line.pdf", "line", "png"])
def test_another_suffix_is_refused(tmp_path, name):
    with pytest.raises(InputError, match=r"ends in \.png, \.svg or \.json"):
        save(SPEC, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"does not exist\. Make it first"):
        save(SPEC, tmp_path / "nowhere" / "line.png")


def test_a_failed_write_leaves_the_old_picture(tmp_path):
    path = save(SPEC, tmp_path / "line.json")
    with pytest.raises(ValueError, match="JSON"):
        save({"data": float("nan")}, path)
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
