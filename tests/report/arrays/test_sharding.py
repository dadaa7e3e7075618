import msgspec
import pytest

from meshwright.report.arrays.sharding import COPIES, DEVICE_COLORS, SUMS, ShardingPanel, devices_text, sharding_figure
from meshwright.report.figure import save
from tests.charts import marks, panels


def sharded(num_rows, num_cols, holders, title="A[I_X, J_Y]"):
    """An array of num_rows x num_cols blocks; ``holders(row, col)`` are the devices of a block."""
    return ShardingPanel(
        title=title,
        row_labels=tuple(f"I{row}" for row in range(num_rows)),
        col_labels=tuple(f"J{col}" for col in range(num_cols)),
        cells=tuple(tuple(tuple(holders(row, col)) for col in range(num_cols)) for row in range(num_rows)),
    )


def drawn(array):
    """The rows of the blocks of one device, of those of several devices, and of the texts of one array."""
    split, *shared, texts, _ = marks(sharding_figure([array], subtitle="s"))
    return split["rows"], [row for mark in shared for row in mark["rows"]], texts["rows"]


def test_every_block_has_its_device_and_place():
    split, shared, texts = drawn(sharded(4, 2, lambda row, col: [row * 2 + col]))
    assert {(block["x"] // 1, block["y"] // 1): block["device"] for block in split} == {
        (col, row): row * 2 + col for row in range(4) for col in range(2)
    }
    assert shared == []
    assert [text["text"] for text in texts] == [[str(device)] for device in range(8)]


def test_a_replicated_block_is_one_block_without_a_devices_colour_and_lists_its_devices():
    array = sharded(1, 2, lambda _, col: [col, col + 2])
    split, shared, texts = drawn(array)
    assert split == []
    assert [(block["x"] // 1, block["kind"]) for block in shared] == [(0, COPIES), (1, COPIES)]
    assert [text["text"] for text in texts] == [["0,2"], ["1,3"]]
    fill = marks(sharding_figure([array], subtitle="s"))[1]["encoding"]["fill"]
    assert fill["scale"] == {"domain": [COPIES], "range": ["#DADADA"]}
    assert fill["legend"]["orient"] == "bottom"
    assert "#DADADA" not in DEVICE_COLORS
    assert len(set(DEVICE_COLORS)) == 8


def test_split_copied_and_partial_blocks_share_one_legend():
    """A[I_X, J_Y] B[J_Y, K] on X=2, Y=2: split, copied over X, then partial sums over Y."""
    arrays = [
        sharded(2, 2, lambda row, col: [2 * row + col]),
        sharded(2, 1, lambda row, _: [row, row + 2]),
        msgspec.structs.replace(sharded(2, 1, lambda row, _: [2 * row, 2 * row + 1]), is_sum=True),
    ]
    found = panels(sharding_figure(arrays, subtitle="s"))
    kinds = [[row["kind"] for mark in marks(panel, "rect") for row in mark["rows"]] for panel in found]
    assert kinds == [[""] * 4, [COPIES] * 2, [SUMS] * 2]
    legends = [marks(panel)[1]["encoding"]["fill"]["scale"]["domain"] for panel in found]
    assert legends == [[COPIES, SUMS]] * 3


def test_partial_sums_are_marked():
    array = ShardingPanel(title="A{U_Z}", row_labels=("",), col_labels=("0",), cells=(((0, 1),),), is_sum=True)
    assert [text["text"] for text in drawn(array)[2]] == [["\u03a3 0,1"]]


def test_a_device_has_one_colour_in_all_panels():
    arrays = [sharded(8, 1, lambda row, _: [row]), sharded(1, 1, lambda *_: range(4))]
    scales = [marks(panel)[0]["encoding"]["color"]["scale"] for panel in panels(sharding_figure(arrays, subtitle="s"))]
    assert scales[0] == scales[1]
    assert scales[0]["domain"] == list(range(8))
    assert len(set(scales[0]["range"])) == 8


def test_a_large_array_shows_its_ends():
    split, _, texts = drawn(sharded(64, 32, lambda row, col: [row * 32 + col]))
    assert len(split) == 15 * 15
    shown = [text["text"][0] for text in texts]
    assert shown.count("…") == 2 * 16 - 1
    assert {"0", "31", "2016", "2047"} <= set(shown)


def test_the_picture_is_written(tmp_path):
    array = ShardingPanel(
        title="bias[F_XY]",
        row_labels=("",),
        col_labels=("0", "1"),
        cells=(((0, 1), (2, 3)),),
        col_title="F",
        note="4 bytes per device",
    )
    content = save(sharding_figure([array], title="bias", subtitle="s"), tmp_path / "sharding.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 5_000


@pytest.mark.parametrize(
    ("devices", "max_characters", "lines"),
    [
        ([3], 3, ["3"]),
        ([1, 0], 10, ["0,1"]),
        ([0, 1, 2, 3], 10, ["0-3"]),
        ([0, 2, 3, 4, 6, 7], 10, ["0,2-4,6,7"]),
        ([0, 2, 4, 6], 5, ["0,2,", "4,6"]),
        (list(range(0, 64, 2)), 8, ["0…62", "(32)"]),
        (list(range(0, 64, 2)), 3, []),
        ([1234], 3, []),
    ],
)
def test_devices_text(devices, max_characters, lines):
    assert devices_text(devices, max_characters) == lines
