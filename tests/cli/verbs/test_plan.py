"""`meshwright plan`: the ranked strategies, the whole run, the plan file."""

import csv
from io import StringIO
from pathlib import Path

import msgspec
import pytest

from meshwright.cli.verbs.plan_words import overlap_words
from meshwright.cost.breakdown import PricedOverlap
from meshwright.cost.setting import Setting
from meshwright.plan.plan_file import load_plan
from meshwright.spec.assumptions import AS_RUN, Assumptions
from meshwright.spec.calibration import Calibration, CollectiveRate, save_calibration
from meshwright.spec.catalogue import load_model
from meshwright.spec.cluster import parse_cluster
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy, make_mesh
from tests.tier import sampled

LLAMA = ("plan", "llama3-70b", "--batch", "4Mi", "--seq", "4096")
SMALL = ("plan", "llama3-8b", "--on", "v5e:4x4", "--batch", "128seq", "--seq", "4096")


@pytest.mark.slow
def test_tables_for_other_programs(call):
    """The ranked strategies and the tables of every question, as raw figures and as a person reads them."""
    small = ("plan", "tiny", "--on", "v5e:2x2", "--batch", "64seq", "--seq", "512", "--top", "2")
    asked = ("--pareto", "--why-not", "tensor=4", "--what-if", "chips=2x")
    said = call(*small, *asked, "--format", "csv")
    best = said.printed("json").json["strategies"]
    ranked, *others = said.out.split("\n\n")
    rows = list(csv.DictReader(StringIO(ranked)))
    assert [float(row["step_s"]) for row in rows] == [one["step_s"] for one in best]
    assert [row["offload"] for row in rows] == ["", ""]
    assert [text.split(",")[0].strip() for text in others] == ["number", "num_chips", "name", "plan"]
    drawn = said.printed("markdown").out
    assert sum(line.startswith("| --") for line in drawn.splitlines()) == 5
    assert drawn.startswith("tiny on v5e:2x2 (4 chips), ")


def test_the_whole_run(call):
    said = call(*LLAMA, "--on", "v5p:16x16x32", "--tokens", "15T", "--top", "3")
    found = said.printed("json").json
    assert (found["model"], found["cluster"], len(found["strategies"])) == ("llama3-70b", "v5p:16x16x32", 3)
    assert (found["job"]["batch_seqs"], found["job"]["train_tokens"]) == (1024, 15 * 10**12)
    best, run = found["strategies"][0], found["training"]
    assert run["flops"] == pytest.approx(6 * 69501714432 * 15e12)
    assert run["steps"] == pytest.approx(15e12 / 2**22)
    assert run["days"] == pytest.approx(best["train_days"])
    assert run["cost_usd"] == pytest.approx(best["cost_usd"])
    assert run["petaflop_days"] == pytest.approx(run["flops"] / 1e15 / 86400)
    assert run["one_chip_years"] == pytest.approx(run["flops"] / 459e12 / 86400 / 365)
    assert run["chip_hours"] == pytest.approx(run["days"] * 24 * 8192)
    assert run["mfu_6nd"] == pytest.approx(run["flops"] / (run["chip_hours"] * 3600 * 459e12))
    assert 0.9 * best["mfu"] < run["mfu_6nd"] < best["mfu"]
    assert run["energy_kwh"] is None
    text = said.words
    assert f"15 T tokens in 3,576,279 steps: {run['days']:.3g} days" in text
    assert "6 x parameters x tokens = 6.26e+24 FLOPs = 72,398 petaflop-days" in text


def test_energy_where_the_power_is_known(call):
    args = ("plan", "llama3-8b", "--on", "h100:8x4", "--batch", "1Mi", "--seq", "4096", "--tokens", "1T")
    said = call(*args)
    run = said.printed("json").json["training"]
    assert run["power_w"] == 32 * 700
    assert run["energy_kwh"] == pytest.approx(32 * 0.7 * 24 * run["days"])
    assert "power 22.4 kW for 32 chips alone" in said.words


def test_no_tokens_no_run(call):
    said = call(*SMALL)
    found = said.printed("json").json
    assert found["training"] is None
    assert found["strategies"][0]["train_days"] is None
    assert "the run" not in said.out


def test_the_table(call):
    """A row for each strategy, best first; no number is cut, whatever the width."""
    for width in (80, 120):
        said = call(*LLAMA, "--on", "v5p:16x16x32", width=width)
        text, found = said.out, said.printed("json").json["strategies"]
        rows = [line for line in text.splitlines() if "%  " in line]
        assert len(rows) == len(found) == 5
        for row, one in zip(rows, found, strict=True):
            words = ", ".join(f"{axis} {size}" for axis, size in one["axes"].items() if size > 1)
            mesh = row.split("  ")[0]
            assert words == mesh or words.startswith(mesh if width == 120 else mesh.rstrip(",") + ",")
            assert f" {one['mfu']:.0%} " in row
            assert row.endswith(one["bound_by"])
    assert "llama3-70b on v5p:16x16x32 (8,192 chips), 4 Mi tokens a step = 1,024 sequences of 4,096" in text
    assert "the best" in text
    assert "numbers fitted on published training steps" in text
    assert "datasheet peaks" in call(*SMALL, "--calibration", "datasheet").out


def test_choices_that_differ_stand_below_the_mesh(call):
    said = call(*SMALL)
    lines, found = said.out.splitlines(), said.printed("json").json["strategies"]
    assert len({one["num_microbatches"] for one in found}) > 1
    told = [line.split("  ")[1].rstrip(",") for line in lines if line.startswith("  ") and "microbatch" in line]
    counts = [one["num_microbatches"] for one in found]
    assert [int(text.split()[0]) for text in told] == counts


def test_chips_that_do_not_divide_the_work(call):
    """32 sequences have no factor 3, nor do eight layers share out over three stages: eight chips, or 36 sequences."""
    args = ("plan", "tiny", "--on", "v5e:4x3", "--batch", "32seq", "--seq", "512")
    said = call(*args)
    found = said.printed("json").json
    assert {one["num_chips"] for one in found["strategies"]} == {8}
    near = found["nearest_batch"]
    assert (near["batch_seqs"], near["strategy"]["num_chips"]) == (36, 12)
    axes = {axis: size for axis, size in near["strategy"]["axes"].items() if size > 1}
    assert any(size % 3 == 0 for size in axes.values())
    text = said.words
    assert "cannot be divided over all 12 chips of v5e:4x3 in a way that fits: the plan uses v5e:4x2, 8 chips" in text
    assert "all 12 chips run with 36 sequences" in text
    assert f"(--batch 36seq): {' x '.join(f'{axis} {size}' for axis, size in axes.items())} takes " in text


def test_axes_and_fields_that_are_given(call):
    by_axes = call(*SMALL, "--axes", "tensor=4", "--json").json["strategies"]
    by_field = call(*SMALL, "--set", "strategy.tensor=4", "--json").json["strategies"]
    assert by_axes == by_field
    assert {one["axes"]["tensor"] for one in by_axes} == {4}
    kept = call(*SMALL, "--set", "strategy.remat=block", "--set", "model.num_layers=8", "--json").json
    assert {one["remat"] for one in kept["strategies"]} == {"block"}
    named = call(*SMALL, "--set", "strategy.remat=['g', 'u']", "--json").json["strategies"]
    assert named[0]["remat"] == ["g", "u"]


def test_the_plan_file_holds_the_best(call):
    best = call(*SMALL, "--tokens", "1G", "-o", "deep/plan.toml", "--json").json["strategies"][0]
    plan = load_plan(Path("deep/plan.toml"))
    assert plan.strategy.mesh == best["axes"]
    assert plan.predicted.step_s == best["step_s"]
    assert plan.predicted.train_days == best["train_days"]
    assert plan.job.train_tokens == 10**9


@pytest.mark.parametrize(
    "cluster",
    sampled(
        ["v5e:1x1", "h100:1", "h100:8x2", "2*v5e:4x4", "v5p:2x2x2", "gb200:72"], "v5e:1x1", "h100:8x2", "2*v5e:4x4"
    ),
)
def test_every_kind_of_cluster(call, cluster):
    args = ("plan", "tiny", "--on", cluster, "--batch", "144seq", "--seq", "512", "--tokens", "1G")
    said = call(*args)
    assert said.code == 0
    assert said.printed("json").json["strategies"]


def test_this_machine_by_measured_rates(call, tmp_path):
    """A plan for emulated devices, and its explanation: no links in closed form, only what fits."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
    rates = Calibration(
        name="test",
        chip="cpu",
        date="2026-01-02",
        matmul_flops_per_s={"fp32": 1e10},
        memory_bytes_per_s=1e10,
        memory_bytes=2e9,
        collectives=tuple(CollectiveRate(kind=k, group_size=8, latency_s=1e-4, bytes_per_s=1e9) for k in kinds),
    )
    save_calibration(rates, tmp_path / "rates.toml")
    args = ("plan", "tiny", "--on", "cpu:8", "--batch", "16Ki", "--seq", "512", "--calibration", "rates.toml")
    said = call(*args, "-o", "plan.toml")
    assert said.code == 0
    assert "times rest on calibration 'test', 2026-01-02" in said.out
    assert "the training state is fp32" in said.printed("text").out
    told = call("explain", "plan.toml", "--all")
    assert told.code == 0
    assert "What fits" in told.out
    assert "Compute-bound" not in told.out
    wrong = call(*args[:3], "v5e:4x4", *args[4:])
    assert wrong.code == 2
    assert "rates.toml has rates of cpu, but the chips of the cluster are v5e" in wrong.err


@pytest.mark.slow
def test_overlap_that_matters_is_said(call):
    """Where the price hides a tenth of the step; `explain` says the same of the plan."""
    asked = ("plan", "llama3-8b", "--on", "h100:8x4", "--batch", "64seq", "--seq", "4096", "--top", "1")
    said = call(*asked, "-o", "plan.toml")
    found, step_s = said.printed("json").json["overlap"], load_plan(Path("plan.toml")).predicted.step_s
    assert found["step_s"] == pytest.approx(step_s)
    assert 0.1 * step_s < found["hidden_s"] < found["alone_s"]
    assert found["exposed_step_s"] == pytest.approx(step_s + found["hidden_s"])
    words = f"a step takes {1e3 * found['exposed_step_s']:.0f} ms (MFU {found['exposed_mfu']:.0%})"
    assert f"without it {words}" in said.words
    assert f"with all of it exposed {words}" in call("explain", "plan.toml").words
    assert "overlap" not in call("plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "2Mi", "--seq", "4096").words


@pytest.mark.parametrize(
    ("on", "fields", "named"),
    [
        ("h100:8x4", {}, True),
        ("h100:8x4", {"assumptions": Assumptions(software="eager")}, False),
        ("h100:8x4", {"precision": "fp8"}, False),
        ("mi300x:8x4", {}, False),
        ("v5p:3x5x1", {}, False),
        ("v5e:4x4", {}, True),
    ],
)
def test_the_line_about_overlap_names_verify_where_that_runs(on, fields, named):
    fields = dict(fields)
    assumed = fields.pop("assumptions", AS_RUN)
    setting = Setting(load_model("llama3-8b"), parse_cluster(on), Job(batch_seqs=60, seq_len=4096), assumptions=assumed)
    overlap = PricedOverlap(step_s=1.0, alone_s=0.5, hidden_s=0.4, exposed_step_s=1.4, exposed_mfu=0.25)
    words = overlap_words(overlap, setting, Strategy(mesh=make_mesh({}), **fields))
    assert words.startswith("hides 400 ms of 500 ms of communication")
    assert ("meshwright verify" in words) == named
    assert words.endswith("without it a step takes 1.4 s (MFU 25%)")
    little = msgspec.structs.replace(overlap, hidden_s=0.09)
    assert overlap_words(little, setting, Strategy(mesh=make_mesh({}), **fields)) == ""


def test_verify_of_a_slice_that_is_not_compiled_says_what_plan_has(call):
    said = call("plan", "tiny", "--on", "v5p:3x5x1", "--batch", "60seq", "--seq", "512", "--top", "1", "--verify")
    assert said.code == 3
    assert "Name another slice." in said.err
    assert "plan without --verify" in said.err
