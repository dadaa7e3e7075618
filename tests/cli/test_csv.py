"""The tables of every verb as CSV: raw numbers under names that JSON has too and that say the unit."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import VERBS
from meshwright.report.answer import Table

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "data" / "published_training.jsonl"
HLO = str(ROOT / "tests" / "data" / "hlo" / "v5e_forward.hlo")
PRODUCT = "bf16[B,D] * int8[D,F] -> bf16[B,F]"
SHARDED = ("In[B_X,D_Y] * Win[D_X,F_Y] -> Tmp[B_X,F_Y]", "--mesh", "X=4,Y=2", "--dims", "B=1024,D=4096,F=16384")
TINY = ("tiny", "--on", "v5e:2x2", "--batch", "64seq", "--seq", "512")
COMMANDS = [
    ("plan", *TINY, "--tokens", "1M", "--top", "2", "--pareto", "--why-not", "tensor=4", "--what-if", "chips=2x"),
    ("plan", *TINY, "--breakdown"),
    ("service", "tiny", "--on", "v5e:2x2", "--prompt", "64", "--output", "8", "--why-not", "tensor=2"),
    ("explain", *TINY),
    ("sweep", "tiny", "--on", "h100:8x1", "batch=64seq", "seq_len=512"),
    ("sweep", "tiny", "--on", "h100:8x1", "micro=1", "seq_len=512", "--figure", "memory"),
    ("sweep", "batch", "mlp:8192x32768", "--on", "v5p:4x4x4"),
    ("sweep", "batch", "llama3-8b", "--on", "v5p:4x4x4", "--axes", "tensor=4"),
    ("sweep", "bandwidth", "--on", "h100:8x2"),
    ("sweep", "streams", "tiny", "--on", "h100:8x1", "--batch", "8seq", "--seq", "512"),
    ("limits", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "1Mi", "--seq", "4096"),
    ("roofline", PRODUCT, "--on", "v5e", "--dims", "B=128,D=8192,F=32768"),
    ("roofline", PRODUCT, "--on", "v5e", "--dims", "D=8192,F=32768", "--sweep", "B=64..1024"),
    ("roofline", "--on", "h100", "--attention", "llama3-8b", "--sweep", "T=1Ki,64Ki"),
    ("shard", *SHARDED, "--on", "v5e:4x4", "--all"),
    ("shard", "A[I_X,J]{U_Y} -> A[I_XY,J]", "--mesh", "X=4,Y=2", "--dims", "I=64,J=64"),
    ("chain", "A[I,J] * B[J,K] -> C[I,K]", "--mesh", "X=4", "--dims", "I=512,J=512,K=512", "--on", "v5e:2x2"),
    ("transfer", "15GB", "--on", "v5e:4x4", "--from", "0,0", "--to", "3,3", "--leg", "275GFLOP@compute"),
    ("transfer", "15GB", "--on", "v5e:4x4", "--axis", "x"),
    ("transfer", "15GB", "--on", "h100:8x4", "--axis", "domain,nodes"),
    ("schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--forward", "1.2ms", "--compare"),
    ("schedule", "interleaved", "--stages", "24", "--microbatches", "24", "--sweep-stages"),
    ("show", "models"), ("show", "chips"), ("show", "llama3-8b", "--seq", "4096"), ("show", "v5p"), ("show", "h100"),
    ("show", "v5p:16x20x28"), ("show", "h100:8x128"), ("show", "v5p:64chips"),
    ("budget", "1e24", "--on", "h100:8x128", "--model", "llama3-8b", "--failures-per-1000-node-days", "10", "--years"),
    ("batch", "--batch", "1024seq", "--seq", "4096", "--on", "v5e:16x16", "--micro", "1"),
    ("compare", "llama3-8b", "deepseek-v3"), ("compare", "llama3-8b", "--zero"), ("compare", "llama3-8b", "--bytes"),
    ("compare", "llama3-8b", "--hold", "--on", "h100", "--chips", "64"), ("compare", "llama3-8b", "--activations"),
    ("formats",), ("formats", "fp8", "--bits", "0x7e"), ("formats", "--value", "0.1", "--value", "6e4"),
    ("formats", "bf16", "--dot", "4096"),
    ("systolic", "8x8", "--input", "16"),
    ("stream", "flash-backward", "--seq", "512", "--causal", "--on", "v5e"),
    ("mask", "causal", "--seq", "1024"),
    ("mask",),
    ("serving", "llama3-8b", "--on", "v5e:4x4", "--contexts", "2Ki,8Ki", "--accept", "0.8", "--prefixes", "100"),
    ("serving", "deepseek-v3", "--on", "h200:8x2", "--batch", "1..64"),
    ("simulate", "fleet", *TINY, "--set", "train_tokens=1000000000", "--days", "3", "--seeds", "2"),
    ("accuracy", "FILE", "--worst", "2", "--datasheet"),
    ("hlo", HLO), ("hlo", HLO, "--op", "fusion.42"),
]  # fmt: skip
ELSEWHERE = {"bench", "verify", "train", "profile", "convert", "launch", "generate", "serve", "compile", "demo"}
"""Verbs that need devices, a compiler or a run: they answer through the same tables."""
LABELS = {"figure", "fact", "value", "source", "text", "plan", "terms", "formula", "phase", "assignment", "array",
          "sold", "die", "split", "stage", "state", "remat", "more_s", "number",
          "usd_per_billion_tokens", "given", "doubled", "engines", "prefill_engines", "batch",
          "prompts_at_once"}  # fmt: skip
"""Names of columns that JSON has as names of fields, or that follow from two others."""
AMOUNT = re.compile(
    r"[-+~<>$]?\s?\d[\d,]*(\.\d+)?(e[+-]?\d+)?\s?([kMGTPE]?(B|FLOP|B/s|FLOP/s|Wh?)|[mun]?s|h|days|[kMBT]|%)?"
)
UNIT = re.compile(
    r"bytes|flops|_s\b|_s_|_w\b|kwh|usd|tokens|params|share|mfu|goodput|points|bias|mape|median|coverage|error|scaling|recompute"
)
"""What says the unit in a name, and names of shares, which have none."""


@pytest.fixture
def args(request, tmp_path):
    """The command; the records of published steps are few of them."""
    few = tmp_path / "records.jsonl"
    if "FILE" in request.param:
        few.write_text("".join(RECORDS.read_text().splitlines(keepends=True)[:40]))
    return [str(few) if word == "FILE" else word for word in request.param]


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join, indirect=True)
def test_tables_are_raw_and_named_as_in_json(call, args):
    said = call(*args, "--format", "csv")
    assert said.code == 0, said.err
    keys = set(_keys(said.printed("json").json)) | LABELS
    tables = [list(csv.reader(text.splitlines())) for text in said.out.split("\n\n")]
    assert tables
    for header, *rows in tables:
        assert rows
        assert all(header)
        assert len(set(header)) == len(header)
        assert [name for name in header if not _named(name, keys)] == []
        assert {len(row) for row in rows} == {len(header)}
        cells = [cell for row in rows for cell in row if AMOUNT.fullmatch(cell)]
        assert [cell for cell in cells if not _parses(cell)] == []
    unnamed = [name for table in said.answer.tables() for name in _with_units(table) if not UNIT.search(name)]
    assert unnamed == []
    assert [line for line in said.printed("text").out.splitlines() if len(line) > 80] == []
    assert said.printed("markdown").out


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inside in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys(inside)


def _named(header: str, keys: set[str]) -> bool:
    """True for the name of a field of JSON, or a path to it."""
    return bool({header, *header.split(".")} & keys)


def _parses(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _with_units(table: Table) -> Iterator[str]:
    """The names of the columns that a person reads with units."""
    for column, cells in zip(table.heads, zip(*table.shown(), strict=True), strict=True):
        known = [str(cell) for cell in cells if cell is not None]
        if known and all(AMOUNT.fullmatch(cell) and not _parses(cell) for cell in known):
            yield column.name or column.title


def test_every_verb_is_walked():
    assert {command[0] for command in COMMANDS} | ELSEWHERE == set(VERBS)


def test_one_way_to_print_at_a_time(call):
    call("formats", "--json", "--format", "csv").assert_refused(2, "--json and --format csv both say how to print")
    assert call("formats", "--json", "--format", "json").json == call("formats", "--json").json
