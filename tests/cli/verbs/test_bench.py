"""`meshwright bench` from the command line: tables, files, pictures and lines for what cannot be done."""

import re

import pytest

from meshwright.spec.calibration import load_calibration


def test_a_short_run_is_told_and_kept(call, tmp_path):
    said = call(
        *("bench", "overhead", "copy", "collectives", "--on", "cpu:2", "--mesh", "tensor=2", "--seconds", "40"),
        *("-o", "rates.toml", "--png", "pictures", "--all"),
    )
    assert said.code == 0, said.err
    assert "wrote pictures/collectives.png" in said.err
    assert re.search(r"AllReduce over 2 devices +\d.* us \+ bytes at \d.* GB/s", said.out)
    assert "Host time of a launch" in said.out
    assert "for each argument" in said.words
    assert "all_gather tensor=2" in said.words
    assert all(len(line) <= 80 for line in said.out.splitlines())
    found = load_calibration(tmp_path / "rates.toml")
    assert found.chip == "cpu"
    assert found.memory_bytes_per_s > 0
    assert {rate.group_size for rate in found.collectives} == {2}
    assert "plan needs rates that rates.toml lacks: matmul. Give" in said.err
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["collectives.png"]


@pytest.mark.slow
def test_plan_takes_a_calibration_of_emulated_devices(call, tmp_path):
    said = call("bench", "matmul", "copy", "collectives", "--on", "cpu:2", "--seconds", "30", "-o", "rates.toml")
    assert said.code == 0, said.err
    found = load_calibration(tmp_path / "rates.toml")
    assert {"attention", "silu_mul", "adamw"} <= set(found.host.ops)
    plan = call("plan", "tiny", "--on", "cpu:2", "--batch", "2Ki", "--seq", "128", "--calibration", "rates.toml")
    assert plan.code == 0, plan.err


def test_a_tiny_budget_is_kept_and_what_is_missing_is_named(call):
    said = call("bench", "matmul", "attention", "--on", "cpu:2", "--seconds", "0.5", "--dtypes", "fp32,int8")
    assert said.code == 0, said.err
    assert "not measured (no time left)" in said.words
    assert "Attention, fp32" in said.out


def test_one_object_for_programs(call):
    said = call("bench", "overhead", "--on", "cpu:2", "--seconds", "20", "--json")
    assert said.code == 0, said.err
    assert [launch["num_arguments"] for launch in said.json["overhead"]["launches"]] == [1, 16, 64, 256]
    assert said.json["matmul"] is None
    assert (said.json["num_devices"], bool(said.json["versions"]["jax"])) == (2, True)
    assert said.json["machine"].startswith("2 cpu devices")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["matmull", "--on", "cpu:2"], "bench has no part 'matmull'. Did you mean 'matmul'?"),
        (["--on", "h100:8x1"], "--on h100:8x1: bench measures the devices at hand."),
        (["--on", "cpu:2", "--dtypes", "fp33"], "'fp33' is no element type of products."),
        (["--on", "cpu:2", "--chip", "h2000"], "unknown chip 'h2000'. Did you mean 'h200'?"),
        (["overhead", "--on", "cpu:2", "-o", "x.toml"], "-o needs rates, and overhead has none."),
        (["--on", "cpu:2", "-o", "x.json"], "-o x.json: a calibration is a .toml file."),
        (["--on", "cpu:2", "--seconds", "0"], "'--seconds'"),
        (["--on", "cpu:2", "--mesh", "fsdp"], "fsdp"),
    ],
)
def test_bad_input_is_one_line(call, args, text):
    call("bench", *args).assert_refused(2, text)


def test_a_mesh_of_another_size_cannot_run(call):
    said = call("bench", "collectives", "--on", "cpu:2", "--mesh", "fsdp=4")
    said.assert_refused(3, "fsdp=4 has 4 devices and there are 2")


def test_nothing_measured_writes_nothing(call, tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.bench.run.PARTS", {"mlp": (1, _nothing)})
    said = call("bench", "mlp", "--on", "cpu:2", "--seconds", "1", "-o", "rates.toml")
    assert said.code == 3
    assert "rates.toml is not written: no rate was measured. Give more --seconds." in said.err
    assert not (tmp_path / "rates.toml").exists()


def _nothing(runner):
    from meshwright.bench.results import MlpPart

    runner.left_out.append("MLP: not today")
    return MlpPart()
