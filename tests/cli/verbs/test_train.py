"""`train` and `demo` from the command line: what they print, what they leave, what they refuse."""

import json
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from meshwright.cli.asked import read_fields
from meshwright.cli.main import run
from meshwright.cli.verbs import demo, train
from meshwright.core.errors import InputError
from meshwright.nn.hf.weights import save_hf
from meshwright.nn.weights import init_params
from meshwright.plan.plan_file import load_plan
from meshwright.spec.calibration import load_calibration
from meshwright.spec.job import Job
from meshwright.train.settings import settings_from_table
from tests.cli.made_rates import SMALL, write_rates
from tests.train.small import MODEL


@pytest.fixture(scope="module")
def rates(tmp_path_factory):
    return str(write_rates(tmp_path_factory.mktemp("rates")))


@pytest.mark.parametrize(
    ("speed", "load", "said"),
    [
        (None, 0.0, []),
        (1.05, 0.0, []),
        (
            0.5,
            0.0,
            ["slower now than when its rates were measured: a product runs at 0.50 times its speed", "take 4 s"],
        ),
        (2.0, 0.0, ["faster now than", "at 2.00 times its speed then, and the predicted step would take 1 s"]),
        (1.0, 99.0, ["measured at load 99.0 on ", "times are too long"]),
    ],
)
def test_a_machine_of_another_speed_is_called_so(monkeypatch, speed, load, said):
    """A step predicted to take 2 s takes 4 s at half of the speed."""
    monkeypatch.setattr("meshwright.cli.output.START_LOAD", load)
    words = " ".join(train.speed_words(SimpleNamespace(predicted=SimpleNamespace(step_s=2.0)), speed))
    assert all(one in words for one in said)
    assert bool(words) is bool(said)


@pytest.mark.slow
def test_a_model_planned_on_the_way(rates, tmp_path, capsys):
    arguments = ["train", "tiny", *SMALL, "--axes", "fsdp=4,tensor=2", "--steps", "4", "--calibration", rates]
    assert run([*arguments, "--runs", str(tmp_path), "--json", "--set", "train.log_every=1"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert {"losses", "step_s", "step_s_predicted", "tokens_per_s", "mfu", "run"} <= set(result)
    assert len(result["losses"]) == 4
    assert result["step_s_predicted"] > 0
    assert "step 4/4  loss" in said.err
    assert "predicted" in said.err
    (folder,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == result["losses"]
    plan = load_plan(folder / "plan.toml")
    assert plan.strategy.mesh["fsdp"] == 4
    assert (folder / "resolved.toml").exists()


@pytest.mark.slow
def test_a_dense_model_in_stages_has_the_losses_of_one_device(rates, tmp_path, capsys):
    losses = {}
    for axes in ("pipeline=2,data=2,tensor=2", "data=1"):
        arguments = ["train", "tiny", *SMALL, "--axes", axes, "--steps", "2", "--calibration", rates, "--json"]
        arguments[arguments.index("cpu:8")] = "cpu:8" if "pipeline" in axes else "cpu:1"
        more = ["--set", "strategy.num_microbatches=2", "--set", "strategy.state=fp32", "--set", "train.log_every=1"]
        assert run([*arguments, *more, "--runs", str(tmp_path)]) == 0
        losses[axes] = json.loads(capsys.readouterr().out)["losses"]
    staged, alone = losses.values()
    assert staged == pytest.approx(alone, rel=1e-5)


def test_a_plan_file_and_a_changed_field(rates, tmp_path, capsys):
    plan_file = tmp_path / "plan.toml"
    plan = ["plan", "tiny", *SMALL, "--calibration", rates, "-o", str(plan_file), "--set", "strategy.remat=block"]
    assert run(plan) == 0
    train = ["train", str(plan_file), "--steps", "3", "--runs", str(tmp_path / "runs"), "--set", "strategy.remat=none"]
    capsys.readouterr()
    assert run(train) == 0
    said = capsys.readouterr()
    assert "3 steps: loss" in said.out
    assert "remat none" in said.err
    rows = {line.split("  ")[0].strip() for line in said.out.splitlines()}
    assert {"step", "MFU", "HFU", "memory of a device"} <= rows
    assert "predicted" in said.out
    assert re.search(r"goodput \d+%: .* of .* in steps, compiling", said.out)


@pytest.mark.slow
def test_a_folder_with_weights_from_scratch_on_records_of_which_some_are_bad(rates, tmp_path, capsys):
    folder = tmp_path / "mini"
    save_hf(MODEL, jax.jit(lambda: init_params(MODEL, 0))(), folder)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "record {number} of some"}}\n' for number in range(99)) + "{\n3\n")
    arguments = ["train", str(folder), "--on", "cpu:1", "--batch", "4seq", "--seq", "16", "--calibration", rates]
    arguments += ["--data", str(data), "--steps", "1", "--runs", str(tmp_path), "--set", "strategy.state=fp32"]
    assert run([*arguments, "--from-scratch"]) == 2
    assert "line 100 is not a JSON object" in (said := capsys.readouterr().err)
    assert "--skip-bad-records skips bad records and bytes" in said
    assert run([*arguments, "--from-scratch", "--skip-bad-records"]) == 0
    said = capsys.readouterr()
    assert "starts from random weights" in said.err
    assert "skipped 2 bad records of the data" in said.out
    assert json.loads((tmp_path / "mini-001" / "summary.json").read_text())["skipped_records"] == 2
    assert run([*arguments, "--skip-bad-records"]) == 2
    assert "has weights and no tokenizer.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_finished_run_says_so_and_goes_on_when_asked(rates, tmp_path, capsys):
    plan_file, runs = str(tmp_path / "plan.toml"), ["--runs", str(tmp_path / "runs")]
    assert run(["plan", "tiny", *SMALL, "--axes", "fsdp=8", "--calibration", rates, "-o", plan_file]) == 0
    assert run(["train", plan_file, "--steps", "3", "--set", "train.learning_rate=0.01", *runs]) == 0
    capsys.readouterr()
    assert run(["train", plan_file, "--resume", *runs]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"{tmp_path}/runs/tiny-001 is finished after 3 steps. Give more, such as --steps 6, or leave --resume out.\n"
    )
    assert run(["train", "--resume", plan_file, "--json", *runs]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    # Without a plan it takes its own; settings that are not given stay as they were.
    assert run(["train", "--resume", str(tmp_path / "runs" / "tiny-001"), "--steps", "5", "--json"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert (result["steps"], result["resumed_from"], len(result["losses"])) == (5, 3, 5)
    assert "goes on after step 3" in said.err
    resolved = tomllib.loads((tmp_path / "runs" / "tiny-001" / "resolved.toml").read_text())
    assert (resolved["train"]["steps"], resolved["train"]["learning_rate"]) == (5, 0.01)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny-001"]


@pytest.mark.parametrize("measured", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_loop_on_this_machine(measured, rates, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not measured:
        small = {"DEMO_MODEL": MODEL, "DEMO_JOB": Job(batch_seqs=8, seq_len=32), "SAMPLE_TOKENS": 4}
        for name, value in {**small, "measure": lambda *args, **kwargs: load_calibration(Path(rates))}.items():
            monkeypatch.setattr(demo, name, value)
    assert run(["demo", "--steps", "3", "--out", "here", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["losses"]) == 3
    assert isinstance(result["sample"], str)
    for picture in result["pictures"]:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    names = {picture.rsplit("/", 1)[-1] for picture in result["pictures"]}
    assert {"loss.png", "roofline.png", "sharding.png"} <= names


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "tiny", "--on", "cpu:8"], 2, "needs --batch"),
        (["train", "tiny", *SMALL, "--axes", "fsdp=3"], 3, "does not divide"),
        (["train", "tiny", *SMALL, "--axes", "fspd=4"], 2, "Did you mean 'fsdp'"),
        (["train", "tiny", *SMALL, "--set", "train.leraning_rate=1"], 2, "Did you mean 'learning_rate'"),
        (["train", "tiny", *SMALL, "--set", "strategy.remta=block"], 2, "remta"),
        (["train", "tiny", *SMALL, "--data", "/no/such/file"], 2, "/no/such/file"),
        (["train", "missing.toml"], 2, "missing.toml"),
        (["train"], 2, "train needs a plan or a model"),
        (["train", "tiny", *SMALL, "--resume"], 2, "there is no run of tiny"),
        (["train", "tiny", *SMALL, "--resume", "/no/such/run"], 2, "/no/such/run is not the folder of a run"),
        (["train", "--resume", "/no/such/run"], 2, "/no/such/run is not the folder of a run"),
        (["train", "tiny", *SMALL, "--set", "train.track=wandb"], 2, "pip install 'meshwright[wandb]'"),
    ],
)
def test_what_is_refused_in_one_line(arguments, code, words, rates, tmp_path, capsys, monkeypatch):
    if "train.track=wandb" in arguments:
        monkeypatch.setitem(sys.modules, "wandb", None)
    extra = ["--calibration", rates] if arguments[1:2] == ["tiny"] else []
    assert run([*arguments, *extra, "--runs", str(tmp_path)]) == code
    said = capsys.readouterr()
    assert said.out == ""
    last = said.err.strip().splitlines()[-1]
    assert last.startswith("meshwright: ")
    assert words in last
    assert "Traceback" not in said.err


def test_a_plan_for_chips_that_are_not_here(tmp_path, capsys):
    plan_file = tmp_path / "plan.toml"
    plan = ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "64seq", "--seq", "4096", "-o", str(plan_file)]
    assert run(plan) == 0
    capsys.readouterr()
    assert run(["train", str(plan_file), "--steps", "1", "--runs", str(tmp_path)]) == 3
    assert "64 v5p chips, but this machine has" in capsys.readouterr().err


def test_a_bound_on_slots_was_a_setting_of_training_once():
    def bound(*pairs):
        fields = read_fields(pairs)
        assert "capacity_factor" not in fields["train"]
        return fields["strategy"].get("capacity_factor")

    assert bound() is None
    assert bound("train.capacity_factor=1.25") == 1.25
    assert bound("train.capacity_factor=1.25", "strategy.capacity_factor=2.0") == 2.0
    assert bound("train.capacity_factor=0", "strategy.capacity_factor=2.0") == 2.0
    assert bound("assumptions.imbalance=2.0") is None
    with pytest.raises(InputError, match=r"train.capacity_factor is not a field. It is strategy.capacity_factor."):
        settings_from_table({"capacity_factor": 1.25})


def test_the_bound_of_an_older_run_is_its_strategy_s(rates, tmp_path, monkeypatch):
    assert run(["plan", "tiny", *SMALL, "--calibration", rates, "-o", str(tmp_path / "p.toml")]) == 0
    plan, found = load_plan(tmp_path / "p.toml"), []
    old = {"train": {"capacity_factor": 1.5, "steps": 4}}
    monkeypatch.setattr("meshwright.train.record.run_folder.read_resolved", lambda run: old)
    monkeypatch.setattr("meshwright.train.record.run_folder.finished_steps", lambda run: None)
    monkeypatch.setattr(train, "_run", lambda plan, settings, given, resume: found.append((plan, settings)))
    train._resumed(plan, {}, SimpleNamespace(resume="runs/tiny-001", runs=tmp_path))
    ((resumed, settings),) = found
    assert (resumed.strategy.capacity_factor, settings) == (1.5, {"steps": 4})


def test_a_plan_of_other_software_does_not_run(tmp_path, capsys):
    plan_file = tmp_path / "plan.toml"
    plan = ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "64seq", "--seq", "4096", "-o", str(plan_file)]
    assert run([*plan, "--set", "assumptions.software=eager"]) == 0
    assert 'software = "eager"' in plan_file.read_text().partition("[assumptions]")[2]
    capsys.readouterr()
    for verb in (["train", "--runs", str(tmp_path)], ["verify"], ["profile"]):
        assert run([verb[0], str(plan_file), *verb[1:]]) == 3
        assert capsys.readouterr().err.strip() == (
            "meshwright: software 'eager' is planned but not executed in this version. Use compiled."
        )
