"""Files that an earlier version wrote, read by this one: a plan, a calibration, a finished run, its checkpoint."""

import json
import shutil
from pathlib import Path

import pytest

from tests.golden import product

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the files, as the working folder."""
    shutil.copytree(FIXTURES, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "old"


def result(*arguments):
    said = product.call([*arguments, "--json"])
    assert said.code == 0, said.err
    return json.loads(said.out), said.err


def test_a_plan_is_explained_as_it_was_predicted(folder):
    """Without the words that it was changed by hand, or by another version."""
    found, messages = result("explain", "plan.toml")
    assert messages == ""
    assert found["axes"]["fsdp"] == 2


@pytest.mark.slow
def test_a_plan_is_verified(folder):
    found, _ = result("verify", "plan.toml")
    assert (found["runs"], found["collectives"]["remainder"]) == (True, 0)


@pytest.mark.parametrize("file", ["cpu-8.toml", "rates.toml"])
def test_a_calibration_prices_a_plan(folder, file):
    found, _ = result("plan", "tiny", "--on", "cpu:8", "--batch", "16seq", "--seq", "64", "--calibration", file)
    assert found["strategies"]


def test_a_finished_run_says_so(folder):
    found, messages = result("train", "--resume", "run")
    assert (found["steps"], len(found["losses"])) == (4, 4)
    assert "finished after 4 steps" in messages


def test_a_checkpoint_is_gone_on_from(folder):
    before = json.loads((folder / "run" / "summary.json").read_text())["losses"]
    trusting = ["--set", "train.trust_checkpoints=true"]
    found, messages = result("train", "plan.toml", "--resume", "run", "--steps", "6", *trusting)
    assert "goes on after step 4" in messages
    assert (found["resumed_from"], found["losses"][:4]) == (4, before)
    assert len(found["losses"]) == 6


def test_a_run_writes_on_and_becomes_a_folder_of_weights(folder):
    found, _ = result("generate", "run", "--prompt", "the", "--max-tokens", "3", "--on", "cpu:2", "--axes", "data=2")
    assert len(found["completions"][0]["tokens"]) == 3
    said = product.call(["convert", "run", "out", "--step", "4"])
    assert said.code == 0
    assert "has no SHA256SUMS: whether it is whole is not known" in " ".join(said.err.split())
    assert (folder / "out" / "model.safetensors").exists()
