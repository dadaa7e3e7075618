"""`meshwright stream`: steps, block sizes, what binds, the picture."""

import pytest

from meshwright.calculators.chips.stream import tiled_loop
from meshwright.calculators.verbs.stream import _figure
from meshwright.spec.chip import chip
from tests.charts import marks, panels


def test_larger_tiles_bind_compute(call):
    found = call("stream", "flash", "--seq", "8192", "--on", "v5e", "--json").json
    by_block = {row["block"]: row for row in found["blocks"]}
    # about b FLOPs a byte, 197e12 / 819e9 = 240.5 bind compute
    assert [by_block[b]["bound_by"] for b in (64, 128, 256, 512)] == ["hbm", "hbm", "compute", "compute"]
    for block, row in by_block.items():
        assert row["intensity"] == pytest.approx(block, rel=0.4 if block > 512 else 0.1)
        assert row["time_s"] >= max(row["math_s"], row["transfer_s"])
    assert found["hbm_bytes"] == by_block[128]["hbm_bytes"] == found["steps"][-1]["hbm_bytes"]
    assert found["steps"][-1]["end_s"] == found["time_s"]
    assert found["untiled"]["transfer_s"] > found["transfer_s"]


def test_what_is_printed(call):
    words = call("stream", "flash", "--seq", "512", "--causal", "--on", "v5e").words
    # k0 and v0 stay for the first step of the second row of tiles
    for fact in (
        "tiles of 128, causal, on v5e: 10 steps",
        "2 q1 164 kB",
        "compute-bound from 240.5 FLOPs/byte",
        "without tiles",
    ):
        assert fact in words
    assert "without tiles" not in call("stream", "matmul", "--seq", "512", "--on", "v5e").words


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("flash", "--seq", "500", "--on", "v5e"), 2, "tiles of 128 must divide 500"),
        (("flash", "--on", "h100"), 2, "vmem_bytes of h100 is not known"),
        (("matmul", "--seq", "8192", "--block", "8192", "--on", "v5e"), 3, "v5e has 134 MB. Use a smaller --block"),
        (
            ("flash", "--seq", "8192", "--block", "128", "--on", "v5e", "--png", "x.png"),
            2,
            "at most 16: a larger --block",
        ),
    ],
)
def test_refused(call, args, code, message):
    call("stream", *args).assert_refused(code, message)


def test_pictures(call, tmp_path):
    said = call("stream", "flash", "--seq", "256", "--on", "v5e", "--png", "x.png", "--roofline", "y.json")
    assert said.code == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    roofline = (tmp_path / "y.json").read_text()
    for point in ("b = 64", "b = 128", "b = 256", "without tiles"):
        assert f'"{point}"' in roofline
    assert '"b = 512"' not in roofline


def test_tiles_of_a_frame():
    """Step 5 of 16 starts the second row of tiles while the first result leaves."""
    loop = tiled_loop("flash", seq=512, width=128, block=128)
    drawn = panels(_figure(loop, chip("v5e"), ""))
    assert [panel["title"]["text"].split()[1] for panel in drawn] == ["1", "2", "3", "4", "5", "6", "15", "16"]
    tiles = marks(drawn[4], "rect")[1]["rows"]
    named = {(tile["text"], tile["kind"]) for tile in tiles if tile["text"]}
    assert named == {
        *((name, "in use") for name in ("q1", "k0", "v0")),
        *((name, "arriving") for name in ("k1", "v1")),
        *((name, "accumulating") for name in ("o1", "lse1", "m", "l")),
        *((name, "leaving") for name in ("o0", "lse0")),
        ("P", "in registers alone"),
    }
    in_hbm = [tile["kind"] for tile in tiles if not tile["text"]]
    assert len(in_hbm) == 5 * 4
    # scores are in no memory but registers
    assert {kind: in_hbm.count(kind) for kind in set(in_hbm)} == {
        "in use": 3,
        "arriving": 2,
        "leaving": 2,
        "in HBM": 7,
        "not in HBM yet": 6,
    }


def test_the_defaults_can_be_drawn(call, tmp_path):
    """4,096 rows in 16 tiles a side, the most of a picture, are tiles of 256."""
    said = call("stream", "matmul", "--on", "v5e", "--png", str(tmp_path / "x.svg"))
    assert "tiles of 256, on v5e: 4,096 steps" in said.words
    assert (tmp_path / "x.svg").exists()
    assert "tiles of 128, on v5e: 32,768 steps" in call("stream", "matmul", "--on", "v5e").words
