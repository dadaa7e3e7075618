"""`meshwright mask`: blocks, prediction, measurement, picture, masks of one's own."""

import csv
import io
import json
import sys

import pytest

from meshwright.cost.formulas.accounting import attention_work
from meshwright.masks.names import MASKS, SCORES
from meshwright.spec.chip import chip
from meshwright.spec.efficiency import fitted_calibration

SHORT = ("--seq", "512", "--block", "64", "--heads", "2", "--head-dim", "16")


def test_causal_counts_are_those_of_a_triangle(call):
    found = call("mask", "causal", "--seq", "1024", "--block", "128", "--json").json
    assert (found["full_blocks"], found["partial_blocks"], found["empty_blocks"]) == (28, 8, 28)
    assert found["sparsity"] == 28 / 64
    assert found["visible_pairs"] == 1024 * 1025 / 2
    assert (found["pairs_in_blocks"], found["pairs"]) == (36 * 128**2, 1024**2)
    assert found["measured"] is None


def test_the_prediction_is_flops_of_blocks_over_the_rate(call):
    """At a length where compute alone counts: the ratio is 1 - sparsity, and backward has 2.5 times the FLOPs."""
    found = call("mask", "causal", "--seq", "32768", "--block", "1024", "--on", "h100", "--json").json
    forward, both = found["predicted"]
    share = 1 - found["sparsity"]
    assert forward["ratio"] == pytest.approx(share, rel=0.01)
    assert both["ratio"] == pytest.approx(share, rel=0.01)
    assert both["dense_s"] / forward["dense_s"] == pytest.approx(3.5, rel=0.01)
    work = attention_work(queries=32768, keys=32768, heads=4, kv_heads=4, head_dim=128)
    rates = fitted_calibration(chip("h100")).efficiency
    rate = chip("h100").peak_flops["bf16"] * rates.attention / (1 + rates.head_half / 128)
    assert found["attention_flops_per_s"] == pytest.approx(rate)
    assert forward["dense_s"] == pytest.approx(work.flops / rate, rel=0.01)


def test_the_chip_and_the_shape_change_the_prediction(call):
    def seconds(*args):
        return call("mask", "causal", *args, "--json").json["predicted"][0]["blocks_s"]

    base = seconds("--heads", "16")
    assert seconds("--heads", "32") == pytest.approx(2 * base, rel=0.05)
    assert seconds("--heads", "16", "--on", "v5e") > 2 * base
    assert call("mask", "causal", "--on", "v5e", "--json").json["chip"] == "v5e"


def test_text_has_the_picture_and_says_what_is_predicted(call):
    said = call("mask", "sliding_window(100)", *SHORT)
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1:9] == [
        "░░··············", "░░░░············", "░░░░░░··········", "··░░░░░░········",
        "····░░░░░░······", "······░░░░░░····", "········░░░░░░··", "··········░░░░░░",
    ]  # fmt: skip
    for fact in ("sparsity 67.2% of blocks are empty", "blocks 43 empty ·, 21 partial ░, 0 full █",
                 "Predicted for h100", "visible pairs 46,250 of 262,144 (17.6%)", "prediction: FLOPs"):  # fmt: skip
        assert fact in said.words


def test_long_sequences_keep_to_the_width(call):
    said = call("mask", "causal & document", "--seq", "20000", "--block", "64")
    assert max(map(len, said.out.splitlines())) <= 80
    assert sum("░" in line for line in said.out.splitlines()[1:]) > 12


def test_without_a_name_the_catalogue_is_listed(call):
    said = call("mask")
    assert max(map(len, said.out.splitlines())) <= 80
    for name, entry in (MASKS | SCORES).items():
        assert name in said.out
        assert all(array in said.words for array in entry.data)
    rows = call("mask", "--json").json["catalogue"]
    assert [row["name"] for row in rows] == [*MASKS, *SCORES]
    assert next(row for row in rows if row["name"] == "graph") == {
        "kind": "mask", "name": "graph", "usage": "graph(reach)", "arrays": ["distances"],
        "is": "nodes at most REACH edges away",
    }  # fmt: skip


def test_csv_has_a_row_for_each_prediction(call):
    tables = call("mask", "causal", *SHORT, "--format", "csv").out.split("\n\n")
    rows = list(csv.DictReader(io.StringIO(tables[0])))
    assert [(row["source"], row["pass"]) for row in rows] == [
        ("predicted", "forward"),
        ("predicted", "forward + backward"),
    ]


def test_a_measurement_stands_beside_the_share_of_blocks(call):
    found = call("mask", "document & causal", *SHORT, "--run", "--score", "alibi + softcap(30)", "--json").json
    assert [row["pass"] for row in found["measured"]] == ["forward", "forward + backward"]
    assert all(row["ratio"] == pytest.approx(row["blocks_s"] / row["dense_s"]) for row in found["measured"])
    assert found["kernel_blocks"] == [256, 128]
    # two of four blocks for the first rows, three for the second, whose document begins later
    assert found["kernel_share"] == 5 / 8


def test_a_mask_of_ones_own(call, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "own_masks.py").write_text(
        "print('noise')\n\ndef dilated(b, h, q, kv):\n    return (q >= kv) & ((q - kv) % 2 == 0)\n"
    )
    found = call("mask", "own_masks:dilated", *SHORT, "--run", "--json").json
    assert found["visible_pairs"] == sum(n // 2 + 1 for n in range(512))
    assert len(found["measured"]) == 2
    said = call("mask", "own_masks:diluted", *SHORT)
    assert (said.code, said.out) == (2, "")
    assert "own_masks:diluted: there is no function 'diluted'. Did you mean 'dilated'?" in said.err


def drawn(call, tmp_path, *args):
    assert call("mask", *args, "--png", "mask.json").code == 0
    chart = json.loads((tmp_path / "mask.json").read_text())
    return chart, [chart["datasets"][layer["data"]["name"]] for layer in chart["layer"]]


def test_the_picture_has_blocks_by_kind_and_pairs_of_short_sequences(call, tmp_path):
    chart, rows = drawn(call, tmp_path, "sliding_window(100)", *SHORT)
    blocks, pairs, edges = rows
    kinds = [block["kind"] for block in blocks]
    assert (kinds.count("full"), kinds.count("partial"), kinds.count("empty")) == (0, 21, 43)
    assert {"x": 64, "x2": 128, "y": 192, "y2": 256, "kind": "partial"}.items() <= blocks[3 * 8 + 1].items()
    assert sum(run["x2"] - run["x"] for run in pairs) == 46_250
    assert all(run["x2"] - 1 <= run["y"] for run in pairs)
    assert edges == blocks
    encoding = chart["layer"][0]["encoding"]
    assert (encoding["x"]["axis"]["title"], encoding["y"]["axis"]["title"]) == ("keys", "queries")
    assert encoding["y"]["scale"]["reverse"]
    assert len(set(encoding["color"]["scale"]["range"])) == 4


def test_the_picture_of_a_long_sequence_has_few_blocks_and_no_pairs(call, tmp_path):
    chart, rows = drawn(call, tmp_path, "causal", "--seq", "20000", "--block", "100")
    blocks, _ = rows
    assert len(blocks) == 50**2
    assert blocks[0]["x2"] == 400
    assert max(block["x2"] for block in blocks) == max(block["y2"] for block in blocks) == 20_000
    assert "4 x 4 of them drawn as one" in chart["title"]["subtitle"]


def test_a_picture_is_written(call, tmp_path):
    assert "wrote mask.png" in call("mask", "prefix_lm", *SHORT, "--png", "mask.png").err
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("causl",), "a mask 'causl': there is no 'causl'. Did you mean 'causal'?"),
        (("local",), "local has other parameters. Write local(radius)."),
        (("neighbourhood(64, 8)",), "kernel=8 must be odd"),
        (("causal", "--seq", "0"), "--seq '0' is below 1"),
        (("causal", "--on", "h1000"), "unknown chip 'h1000'"),
        (("causal", "--score", "alibi"), "--score changes nothing here: it is for --run."),
        (("causal", "--score", "alib", "--run"), "Did you mean 'alibi'?"),
        (("causal", "--on", "cpu"), "cpu"),
        (("nowhere:mask",), "there is no module 'nowhere'"),
    ],
)
def test_refused(call, args, message):
    call("mask", *args).assert_refused(2, message)
