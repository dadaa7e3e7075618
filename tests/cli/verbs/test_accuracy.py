"""`meshwright accuracy`: the table and the JSON, what is refused, the picture, and a fit of its own."""

import re
import tomllib

import pytest

from meshwright.cli.verbs.accuracy import BEGIN, END, HEADINGS
from meshwright.spec.efficiency import FILE
from tests.accuracy.recorded import LLAMA, PUBLISHED, published, row, write

KERNELS = PUBLISHED.parent / "kernels"
FIGURES = {"n", "mape", "median", "bias", "coverage"}


@pytest.fixture
def some(tmp_path):
    """The published steps of two small groups, and one of each kind that cannot be predicted."""
    groups = ("nemo-24.07", "maxtext-a3", "megatron-2020")
    lines = PUBLISHED.read_text(encoding="utf-8").splitlines()
    kept = [line for line, one in zip(lines, published(), strict=True) if one.group in groups]
    path = write(tmp_path / "some.jsonl", row(id="gone", measured={}), row(id="served", kind="decode", group="x"))
    path.write_text("\n".join([*kept, path.read_text()]))
    return path


def test_json_and_the_table(call, some):
    narrow, said = (call("accuracy", str(some), width=width) for width in (80, 120))
    assert (narrow.code, said.code) == (0, 0)
    assert max(map(len, narrow.out.splitlines())) <= 80
    assert max(map(len, said.out.splitlines())) <= 120
    for one in (narrow, call("accuracy", str(some), "--notes", width=120)):
        assert one.words.startswith("fitted numbers: errors")
        for text in ("nemo-24.07 8 ", "maxtext-a3 5 ", "megatron-2020 11 ", "core training ", "all 24 "):
            assert text in one.words
        assert "not predicted: 1, kind decode: only training is predicted in this version (served)" in one.words
        assert "not predicted: 1, no step time, throughput or utilisation was measured (gone)" in one.words
        assert "data-sheet" not in one.out
    found = said.printed("json").json
    assert set(found) == {
        *("overall", "core_train", "pick", "records", "unpredicted"),
        *("nemo-24.07", "maxtext-a3", "megatron-2020", "made-up", "x"),
    }
    counted = {name: one for name, one in found.items() if name not in ("pick", "records", "unpredicted")}
    assert all(set(one) == FIGURES for one in counted.values())
    assert (found["overall"]["n"], found["made-up"]["n"]) == (24, 0)
    assert found["nemo-24.07"]["mape"] < 0.2
    assert sorted(id for ids in found["unpredicted"].values() for id in ids) == ["gone", "served"]


def test_the_published_file_at_80_columns(call):
    """All groups in lines of 80; what is not predicted is named, and counted where it is much."""
    said = call("accuracy", str(PUBLISHED), "--all", "--notes")
    assert all(len(line) <= 80 for line in said.out.splitlines())
    groups = {one.group for one in published()} - {"korthikanti-fig1-mem"}
    assert all(f" {group} " in f" {said.words} " for group in groups)
    assert "(korthikanti-fig1-mem-22B-none and 7 more)" in said.words


def test_one_group(call, some):
    found = call("accuracy", str(some), "--group", "maxtext-a3", "--json").json
    assert set(found) == {"overall", "core_train", "maxtext-a3", "pick", "records", "unpredicted"}
    assert found["overall"] == found["maxtext-a3"]
    message = "has no group 'maxtext-a4'. Did you mean 'maxtext-a3'?"
    call("accuracy", str(some), "--group", "maxtext-a4").assert_refused(2, message)


def test_the_worst(call, some):
    """The largest error first, whatever its sign."""
    said = call("accuracy", str(some), "--worst", "3", width=120)
    rows = said.out.split("worst")[1].splitlines()[2:5]
    errors = [abs(int(line.split()[-1].rstrip("%"))) for line in rows]
    assert errors == sorted(errors, reverse=True)
    assert len(errors) == 3
    assert "--worst" in call("accuracy", str(some), "--worst", "-1").err


def test_data_sheet_rates(call, some):
    fitted, sheet = (call("accuracy", str(some), *more, "--json").json for more in ((), ("--datasheet",)))
    assert sheet["overall"]["mape"] > 2 * fitted["overall"]["mape"]
    assert sheet["overall"]["bias"] < -0.2
    assert sheet["overall"]["coverage"] is None
    assert call("accuracy", str(some), "--datasheet").words.startswith("data-sheet rates: errors")


def test_chips_that_nothing_is_fitted_for_are_named(call, tmp_path):
    path = write(tmp_path / "a.jsonl", row(), row(id="two", hardware="MI300X"), row(id="three", hardware="MI300X"))
    assert "by data-sheet rates: 2, nothing is fitted for mi300x" in call("accuracy", str(path)).words


def test_the_picture(call, some, tmp_path):
    said = call("accuracy", str(some), "--png", "fit.png", "--json")
    assert said.json["overall"]["n"] == 24
    assert "wrote fit.png" in said.err
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("lines", "args", "message"),
    [
        (["{oops"], (), "a.jsonl:1: JSON is malformed"),
        ([""], (), "a.jsonl has no records"),
        (['{"id": "x", "kind": "decode"}'], ("--png", "x.png"), "a FILE of serving goes with --group"),
        (['{"id": "x", "kind": "decode"}'], ("-o", "x.toml"), "0 records can be predicted; a fit needs at least 10"),
    ],
)
def test_refused(call, tmp_path, lines, args, message):
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    call("accuracy", "a.jsonl", *args).assert_refused(2, message)


def test_no_such_file(call):
    call("accuracy", "none.jsonl").assert_refused(2, "none.jsonl cannot be read (No such file or directory)")


def test_places_to_write_are_checked_before_the_fit(call, tmp_path):
    path = write(tmp_path / "a.jsonl", *(row(id=str(n), group="ab"[n % 2]) for n in range(12)))
    (tmp_path / "page.md").write_text("no marks")
    for args, message in (
        (("--page", "none.md"), "cannot read none.md"),
        (("--page", "page.md"), "page.md has no place for the table 'cross-validation'"),
    ):
        call("accuracy", str(path), *args).assert_refused(2, message)


def test_a_fit_of_its_own(call, tmp_path):
    """Twelve steps that take 0.8 of what the product predicts: numbers, three tables and a page."""
    sizes = [(chips, length, group) for chips in (8, 16, 32) for length in (1024, 4096) for group in ("a", "b")]
    rows = [
        row(
            id=f"{chips}-{length}-{group}",
            group=f"maxtext-{group}",
            model=LLAMA | {"layers": 16 if group == "a" else 32},
            n_chips=chips,
            seq_len=length,
            global_batch_seqs=4 * chips,
            parallelism={"dp": chips, "zero_stage": 3},
        )
        for chips, length, group in sizes
    ]
    first = {one["id"]: one for one in rows}
    from meshwright.accuracy.errors import accuracy
    from meshwright.accuracy.records import read_records

    adapters = row(id="adapters", group="lora", lora={"rank": 8, "alpha": 16, "targets": "attention"})
    path = write(tmp_path / "a.jsonl", *rows)
    for one in accuracy(read_records(path)).predictions:
        first[one.id]["measured"] = {"step_s": 0.8 * one.predicted_s}
    write(path, *rows, adapters)
    page = tmp_path / "page.md"
    page.write_text(
        "# kept\n" + "".join(f"{BEGIN.format(name)}\nREPLACED\n{END}\n" for name in HEADINGS) + "kept too\n"
    )
    before = FILE.read_bytes()
    said = call("accuracy", str(path), "-o", "own.toml", "--page", "page.md", "--json")
    assert said.code == 0, said.err
    assert "fitting on 12 records; left out: 1 that train adapters" in said.err
    assert "all: with 1 run of adapters, in no fit; the other 12 have MAPE" in call("accuracy", str(path)).words
    found = said.json
    write(path, *rows)
    assert found["fitted"]["overall"]["mape"] < 0.1 < call("accuracy", str(path), "--json").json["overall"]["mape"]
    assert {name: found[name]["overall"]["n"] for name in HEADINGS} == dict.fromkeys(HEADINGS, 12)
    stored = tomllib.loads((tmp_path / "own.toml").read_text())
    assert stored["numbers"] == found["numbers"]
    assert len(stored["numbers"]) <= 40
    assert stored["numbers"]["low"] < stored["numbers"]["high"]
    assert "12 published training steps" in stored["source"]
    text = re.sub(" +", " ", page.read_text())
    assert text.startswith("# kept\n<!-- table: cross-validation -->\n| group | records |")
    assert text.endswith("kept too\n")
    assert text.count("| all | 12 |") == 3
    assert "REPLACED" not in text
    assert FILE.read_bytes() == before, "the product's own numbers stay unless their file is named"


@pytest.mark.slow
def test_kernels_have_a_table_of_their_own_and_are_fitted(call, tmp_path):
    out, page = tmp_path / "kernels.toml", tmp_path / "page.md"
    page.write_text(f"# Page\n{BEGIN.format('kernels')}\n{END}\n")
    said = call("accuracy", str(KERNELS), "--kernels", "-o", str(out), "--page", str(page))
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= 80
    for text in (
        "attention backward h100 26 ",
        "28 numbers, fitted on 9,347 measured kernels",
        "left out: 288, fp8 with",
    ):
        assert text in said.words
    assert set(said.printed("json").json) == {"kernels", "left_out", "numbers"}
    assert len(tomllib.loads(out.read_text())["numbers"]) == 28
    assert "| attention forward | v5p " in re.sub(" +", " ", page.read_text())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "benchmarks/data/kernels, the default, is in a checkout of meshwright"),
        ([str(KERNELS), "--worst", "3"], "--kernels goes with -o, --page and --json alone"),
        (["no/such/folder"], "no/such/folder/gemm_bf16.csv cannot be read"),
        ([str(KERNELS), "--page", str(FILE)], "has no place for the table 'kernels'"),
    ],
)
def test_kernels_refuse_what_they_cannot_use(call, more, message):
    call("accuracy", "--kernels", *more).assert_refused(2, message)
