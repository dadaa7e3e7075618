"""Stages in real processes: each runs on its own time, and they meet only in their messages."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from meshwright.algebra.schedules.registry import schedule_names
from meshwright.train.loop import train
from tests.parallel.cases import DEEP, DEEP_MOE, RELATIVE, on_one_device
from tests.parallel.pipeline_train_child import DEEP as DEEPER
from tests.parallel.pipeline_train_child import chosen
from tests.parallel.several import run_all
from tests.train.small import JOB, strategy, write_text

ONE_EACH = [({"pipeline": 2}, "interleaved", 2, "deep"), ({"pipeline": 2}, "zb-h1", 1, "deep-moe")]
FOUR = [
    ({"pipeline": 2, "data": 2}, "1f1b", 1, "deep"),
    ({"pipeline": 2, "expert": 2}, "dualpipe-v", 2, "deep-moe"),
    ({"pipeline": 4}, "gpipe", 1, "deep"),
]
TWO_EACH = [
    ({"pipeline": 2, "fsdp": 2}, "1f1b", 1, "deep"),
    ({"pipeline": 2, "tensor": 2}, "dualpipe", 1, "deep"),
    ({"pipeline": 2, "context": 2}, "zb-h2", 1, "deep"),
]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """Loss and gradients of one device, in a file."""
    path = tmp_path_factory.mktemp("wanted") / "wanted.npz"
    found = {}
    for model in (DEEP, DEEP_MOE):
        one = on_one_device(model)
        found |= {f"{model.name}/{name}": value for name, value in one.gradients.items()}
        found[f"{model.name}/loss"] = np.float64(one.loss)
    np.savez(path, **found)
    return path


def assert_errors(arguments, names, **processes):
    """Every process finds its blocks of loss and gradients as one device has them, in each case."""
    for code, out, error in run_all(["-m", *arguments], **processes):
        assert code == 0, error[-2000:]
        found = dict(re.findall(r"^error (\S+) (\S+)$", out, re.MULTILINE))
        assert set(found) == set(names)
        assert max(map(float, found.values())) <= RELATIVE


def assert_as_one(wanted, cases, **processes):
    arguments = ["tests.parallel.pipeline_model_child", str(wanted), json.dumps(cases)]
    assert_errors(arguments, [str(number) for number in range(len(cases))], **processes)


@pytest.mark.slow  # the default tier trains with two processes in tests/cli/verbs/test_launch.py
def test_stages_of_two_processes(wanted):
    assert_as_one(wanted, ONE_EACH[:1], count=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "count", "devices"), [(ONE_EACH, 2, 1), (FOUR, 4, 1), (TWO_EACH, 2, 2)], ids=["2x1", "4x1", "2x2"]
)
def test_stages_beside_other_axes_in_processes(wanted, cases, count, devices):
    assert_as_one(wanted, cases, count=count, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 1)])
def test_every_schedule(count, devices):
    assert_errors(["tests.parallel.pipeline_child", *schedule_names()], schedule_names(), count=count, devices=devices)


def said_by_all(*arguments, **processes):
    """What each process of a run says."""
    found = []
    for code, out, error in run_all(["-m", "tests.parallel.pipeline_train_child", *map(str, arguments)], **processes):
        assert code == 0, error[-2000:]
        found += [json.loads(line[5:]) for line in out.splitlines() if line.startswith("said ")]
    return found


@pytest.mark.slow
def test_a_run_in_stages_goes_on_over_other_devices_and_processes(tmp_path, monkeypatch):
    """Three steps in two processes of a stage each, which hold layers 0 2 and 1 3; then one process without stages, on
    two devices; then the two again: the losses of a run on one device."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    text = write_text(tmp_path)
    whole = train(DEEPER, strategy(), JOB, chosen(text, 9), run_root=tmp_path / "whole")
    first = said_by_all(tmp_path / "runs", text, 3, count=2)
    assert [(one["from"], one["processes"]) for one in first] == [(None, 2)] * 2
    run = Path(first[0]["run"])
    second = train(DEEPER, strategy(fsdp=2), JOB, chosen(text, 6), run_root=tmp_path / "runs", resume=run)
    assert second.resumed_from == 3
    third = said_by_all(tmp_path / "runs", text, 9, run, count=2)
    assert [one["from"] for one in third] == [6, 6]
    assert [len(one["losses"]) for one in third] == [9, 3]  # the first process reads what the run wrote before
    for one in third:
        np.testing.assert_allclose(one["losses"], whole.losses[-len(one["losses"]) :], rtol=RELATIVE)
