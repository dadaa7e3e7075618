"""Files of measurements: what is read, what is only counted, and what a fault says."""

import json

import pytest

from meshwright.accuracy.records import ExpertShape, Measured, Parallelism, read_records
from meshwright.core.errors import InputError
from tests.accuracy.recorded import LLAMA, published, row, write


def test_a_record(tmp_path):
    (one,) = read_records(write(tmp_path / "a.jsonl", row(slices=2, extra={"ignored": 1})))
    assert (one.id, one.group, one.core, one.n_chips, one.slices) == ("one", "made-up", True, 16, 2)
    assert one.parallelism == Parallelism(dp=16, zero_stage=3)
    assert one.measured == Measured(step_s=2.0)
    assert (one.model.layers, one.model.moe) == (32, None)


def test_fields_that_are_not_known_are_ignored(tmp_path):
    model = LLAMA | {"rope": 1e4, "moe": {"experts": 8, "top_k": 2, "d_ff_expert": 64, "router": "softmax"}}
    measured = {"tokens_per_s": 10, "loss": "low", "hfu": 0.4}
    (one,) = read_records(write(tmp_path / "a.jsonl", row(model=model, measured=measured)))
    assert one.model.moe == ExpertShape(experts=8, top_k=2, d_ff_expert=64)
    assert one.measured == Measured(tokens_per_s=10.0)


def test_other_kinds_are_counted_and_not_read(tmp_path):
    """Serving measurements have models and figures of other shapes: nothing of them is taken for training's."""
    decode = row(id="two", kind="decode", core=True, model={"name": "x"}, measured={"step_s": "n/a"}, n_chips="8")
    one, two, three = read_records(write(tmp_path / "a.jsonl", row(), decode, {"id": "three", "kind": "new-kind"}))
    assert one.model is not None
    assert (two.kind, two.group, two.core, two.model, two.n_chips) == ("decode", "made-up", True, None, 0)
    assert two.measured == Measured()
    assert (three.kind, three.group) == ("new-kind", "")


def test_blank_lines_keep_the_count_of_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n{json.dumps(row())}\n\n{{oops\n")
    with pytest.raises(InputError, match=r"a\.jsonl:4: JSON is malformed"):
        read_records(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "expected `object`, got `array`"),
        ('{"kind": "train"}', "missing required field `id`"),
        ('{"id": "x"}', "missing required field `kind`"),
        (json.dumps(row(n_chips="many")), r"Expected `int`, got `str` - at `\$.n_chips`"),
        (json.dumps(row(model={"name": "x"})), r"missing required field `layers` - at `\$.model`"),
        (json.dumps(row(measured={"step_s": -1.0})), r"Expected `float` > 0.0 - at `\$.measured.step_s`"),
        (json.dumps(row(model=LLAMA | {"moe": {"experts": 8, "top_k": 2, "d_ff_expert": 1, "interleave": 0}})), ">= 1"),
        (json.dumps(row(measured={"step_s": "fast"})), r"Expected `float \| null`, got `str`"),
    ],
)
def test_faults_name_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(row())}\n{line}\n")
    with pytest.raises(InputError, match=rf"a\.jsonl:2: .*{message}.*docs/accuracy\.md"):
        read_records(path)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": "\xff\xfe"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl is not text in UTF-8"):
        read_records(path)


def test_no_file_and_no_records(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl cannot be read \(No such file"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(InputError, match=r"empty\.jsonl has no records"):
        read_records(tmp_path / "empty.jsonl")


def test_the_published_records():
    """Every one is training with a source and an id of its own; the core is what the collection marks."""
    records = published()
    assert len({one.id for one in records}) == len(records) > 1000
    assert {one.kind for one in records} == {"train"}
    assert all(one.source and one.group and one.model for one in records)
    assert sum(one.core for one in records) > 200
