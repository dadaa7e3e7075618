import json
import math

import msgspec
import numpy as np
import pytest

from meshwright.core.errors import CannotRunError, InputError
from meshwright.train.record.metrics import EvaluationRecord, StepRecord, describe, typical_step_s
from meshwright.train.record.run_folder import RESOLVED, RunFolder, create_run_folder, newest_run

RECORD = StepRecord(
    step=3,
    tokens=300,
    loss=2.5,
    grad_norm=1.0,
    learning_rate=1e-3,
    step_s=0.25,
    tokens_per_s=400.0,
    mfu=0.5,
    predicted_step_s=0.2,
)


def test_runs_are_numbered_and_never_written_over(tmp_path):
    first = create_run_folder(tmp_path, "tiny")
    RunFolder(first, {"plan.toml": "x = 1\n"})._metrics.close()
    second = create_run_folder(tmp_path, "tiny")
    assert [first.name, second.name] == ["tiny-001", "tiny-002"]
    assert create_run_folder(tmp_path, "org/my model").name == "org-my-model-001"
    assert (first / "plan.toml").read_text() == "x = 1\n"
    with pytest.raises(FileExistsError):
        RunFolder(first, {})


def test_the_newest_run_is_one_that_got_as_far_as_its_settings(tmp_path):
    """A process killed while it makes its first weights leaves an empty folder; a restart takes the one before."""
    with pytest.raises(InputError, match="there is no run of tiny"):
        newest_run(tmp_path / "runs", "tiny")
    folders = [create_run_folder(tmp_path, "tiny") for _ in range(3)]
    with pytest.raises(InputError, match="there is no run of tiny"):
        newest_run(tmp_path, "tiny")
    for folder in folders[:2]:
        RunFolder(folder, {RESOLVED: "x = 1\n"})._metrics.close()
    assert newest_run(tmp_path, "tiny") == folders[1]


def test_a_root_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotRunError, match=r"no run folder can be made in .*file"):
        create_run_folder(tmp_path / "file", "tiny")


def test_metrics_are_there_after_every_step_and_nan_is_null(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        folder.record(RECORD)
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 2.5
        folder.record(msgspec.structs.replace(RECORD, step=4, loss=math.nan))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [2.5, None]
    assert set(lines[0]) == {*StepRecord.__struct_fields__, "crc32"}


def test_lines_that_are_damaged_or_missing_are_named(tmp_path):
    def resumed(at):
        folder = RunFolder(tmp_path, {}, step=at)
        folder._metrics.close()
        return folder

    with RunFolder(tmp_path, {}) as folder:
        for step in range(1, 7):
            folder.record(msgspec.structs.replace(RECORD, step=step, loss=float(step)))
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines) + lines[0][:20])  # killed while it wrote
    assert resumed(5).notes == []
    assert file.read_bytes() == b"".join(lines[:5])
    file.write_bytes(lines[0] + lines[1].replace(b'"loss":2.0', b'"loss":2.5') + lines[3])
    found = resumed(4)
    assert found.notes == [
        "metrics.jsonl: line 2 is not as it was written and left out",
        "metrics.jsonl has no line of steps 2, 3",
    ]
    np.testing.assert_array_equal(found.losses, [1, math.nan, math.nan, 4])
    file.write_bytes(lines[0] + b"\xff" + lines[1][1:])
    assert resumed(1).notes == ["metrics.jsonl: line 2 is not as it was written and left out"]
    file.write_bytes(b'{"step": 1, "loss": 1.0, "step_s": 1.0}\n{"step": 2, "step_s": "x", "loss": 1}\n')  # of before
    assert resumed(1).notes == ["metrics.jsonl: line 2 is not as it was written and left out"]
    file.write_bytes(b'{"step": 1, "loss": 1.0, "step_s": 1.0}\n')
    assert resumed(1).notes == []


def test_a_step_that_is_evaluated_again_stands_there_once(tmp_path):
    """A run that is killed between its last evaluation and its summary makes that evaluation again."""
    for start in (None, 4):
        with RunFolder(tmp_path, {}, step=start) as folder:
            for step in (2, 4) if start is None else (4,):
                folder.evaluated(EvaluationRecord(step=step, tokens=100 * step, loss=3.0 - step / 8))
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(2, 2.75), (4, 2.5)]


def test_a_summary_that_fails_leaves_none_behind(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        with pytest.raises(TypeError):
            folder.summarise({"bad": object()})
        assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]
        folder.summarise({"good": 1})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"good": 1}


def test_a_resumed_run_has_no_weights_of_its_earlier_end(tmp_path):
    """Whoever reads the folder meanwhile takes its newest checkpoint, and not weights of some step before."""
    RunFolder(tmp_path, {RESOLVED: "x = 1\n"})._metrics.close()
    last = ("summary.json", "config.json", "model.safetensors", "model.safetensors.index.json")
    for name in (*last, "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    RunFolder(tmp_path, {}, step=0, writes=False)
    assert all((tmp_path / name).is_file() for name in last)
    RunFolder(tmp_path, {}, step=0)._metrics.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", RESOLVED, "tokenizer.json"]


def test_the_line_says_what_is_known():
    assert describe(RECORD, 100) == ("step 3/100  loss 2.500  400 tokens/s  step 250 ms (predicted 200 ms)  MFU 50.0%")
    above = msgspec.structs.replace(RECORD, mfu=1.25, mfu_causal=0.75)
    assert describe(above, 100).endswith("MFU 125.0% (75.0% without masked scores)")
    assert describe(msgspec.structs.replace(above, mfu=0.9), 100).endswith("MFU 90.0%")
    bare = msgspec.structs.replace(RECORD, mfu=None, predicted_step_s=None)
    assert describe(bare, 100) == "step 3/100  loss 2.500  400 tokens/s  step 250 ms"


def test_the_typical_step_leaves_the_first_two_out():
    assert typical_step_s([9.0, 8.0, 1.0, 3.0, 2.0]) == 2.0
    assert typical_step_s([9.0, 7.0]) == 8.0
    assert typical_step_s([]) is None
