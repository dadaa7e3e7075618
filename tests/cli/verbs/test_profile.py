"""`profile` and `train --profile` from the command line, on a tiny plan; the timeline against its format."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.cli.main import run
from meshwright.profile import summary
from tests.cli.made_rates import SMALL, write_rates


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    rates, plan = str(write_rates(folder)), folder / "plan.toml"
    axes = ["--axes", "fsdp=4,tensor=2", "--calibration", rates, "--set", "strategy.remat=none", "-o", str(plan)]
    assert run(["plan", "tiny", *SMALL, *axes]) == 0
    return plan


@pytest.fixture(scope="module")
def profiled(plan_file, tmp_path_factory):
    """The folder of one profile, and what was said."""
    folder = tmp_path_factory.mktemp("profile")
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("click.echo", lambda text="", err=False, **_: said.append((text, err)))
        assert run(["profile", str(plan_file), "--steps", "2", "--warmup", "2", "--out", str(folder), "--json"]) == 0
    return SimpleNamespace(folder=folder, result=json.loads(next(text for text, err in said if not err)))


def test_the_parts_of_the_step_are_all_of_it(profiled):
    found = profiled.result
    for partition in [found["partition"], *found["devices"].values()]:
        assert sum(partition.values()) == pytest.approx(found["step_s_profiled"], rel=1e-6)
    assert len(found["devices"]) == 8
    assert found["partition"]["compute_s"] + found["partition"]["memory_s"] > 0
    assert 0 <= found["overlap"] <= 1
    assert sum(row["wall_s"] for row in found["classes"]) <= found["step_s_profiled"]
    # on cores that devices share, kinds of work and what nobody does are all of the step, and so are the parts
    nothing = next(row["measured_s"] for row in found["terms"] if row["name"] == "nothing runs")
    for table, beside in (("terms", 0.0), ("parts", nothing), ("steps", nothing)):
        known = sum(row["measured_s"] or 0 for row in found[table])
        assert known + beside == pytest.approx(found["step_s_profiled"], rel=1e-6)
    # CPUs overlap nothing, so the price is whole too
    assert sum(row["predicted_s"] or 0 for row in found["terms"]) == pytest.approx(found["step_s_predicted"])


def test_the_program_does_the_derived_flops(profiled):
    assert profiled.result["flops"] == pytest.approx(profiled.result["flops_predicted"], rel=1e-6)
    assert profiled.result["platform"] == "cpu"
    assert profiled.result["float32_products"]
    attended = next(row for row in profiled.result["classes"] if row["kind"] == "attention")
    assert attended["flops"] > 0


def test_measured_steps_are_the_derived_ones(profiled):
    """Every derived step that takes time is found in the program, but those that a fusion took in."""
    steps = {row["name"]: row for row in profiled.result["steps"]}
    for name in ("layer:forward:q=einsum", "layer:backward:dw_up=einsum", "layer:forward:o=attention"):
        assert steps[name]["predicted_s"] > 0
        assert steps[name]["measured_s"] > 0
    gathered = [n for n, row in steps.items() if n.endswith("=all_gather") and row["predicted_s"] and row["measured_s"]]
    assert gathered
    assert steps["optimizer:update:weights=optimizer"]["measured_s"] > 0


def parse_time(text):
    number, unit = text.split()
    return float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]


def test_rows_have_the_worst_first(profiled):
    for table in ("terms", "parts", "steps"):
        sizes = [abs((row["measured_s"] or 0) - (row["predicted_s"] or 0)) for row in profiled.result[table]]
        assert sizes == sorted(sizes, reverse=True)


def test_memory_has_a_peak_and_owners(profiled):
    memory = profiled.result["memory"]
    assert memory["counted"] == "process"
    assert memory["peak_bytes"] is None or memory["peak_bytes"] > memory["temporaries_bytes"]
    assert {owner["kind"] for owner in memory["owners"]} <= {"weights", "optimizer", "batch", "temporary"}
    assert memory["live_bytes"] == pytest.approx(memory["temporaries_bytes"], rel=0.5)


def test_the_report_has_its_pictures(profiled):
    page = (profiled.folder / "profile.md").read_text()
    for name in ("where.png", "parts.png"):
        assert f"]({name})" in page
        assert (profiled.folder / name).read_bytes().startswith(b"\x89PNG")
    assert "| exposed communication |" in page
    assert "share the cores of one machine" in page
    assert re.search(r"The process kept \d+\.\d of \d+ cores busy in these steps", page)


def test_a_trace_from_elsewhere_says_the_same(profiled, plan_file, call):
    (trace,) = profiled.folder.rglob("*.xplane.pb")
    (hlo,) = profiled.folder.rglob("*.hlo.txt")
    said = call("profile", str(plan_file), "--trace", str(trace), "--hlo", str(hlo), "--out", "again", "--json")
    assert said.code == 0, said.err
    assert said.json["partition"] == profiled.result["partition"]
    assert said.json["step_s"] == said.json["step_s_profiled"]
    assert said.json["steps"] == profiled.result["steps"]
    text = call("profile", str(plan_file), "--trace", str(trace), "--hlo", str(hlo), "--out", "again")
    first = text.out[: text.out.index("the five parts")]
    seconds = dict(re.findall(r"^(\S.*?) {2,}\S+ \w+ {2,}(\S+ \w+)", first, re.MULTILINE))
    assert list(seconds)[:1] == ["step"]
    parts = ("compute", "memory-bound", "exposed communication", "overhead", "idle")
    measured = {name: parse_time(seconds[name]) for name in ("step under the profiler", *parts)}
    assert sum(measured[name] for name in parts) == pytest.approx(measured["step under the profiler"], rel=0.01)
    assert "worst first" in text.out
    assert len(text.out.splitlines()) <= 40
    assert max(map(len, text.out.splitlines())) <= 80


def test_files_of_other_programs_are_refused(profiled, plan_file, call, tmp_path):
    """Another trace's instructions, another number of devices, other widths."""
    (trace,) = profiled.folder.rglob("*.xplane.pb")
    (hlo,) = profiled.folder.rglob("*.hlo.txt")
    renamed = tmp_path / "renamed.hlo.txt"
    renamed.write_text(re.sub(r"%(\w*fusion)\.(\d)", r"%\1.9\2", hlo.read_text()))
    files = ("--trace", str(trace), "--hlo")
    call("profile", str(plan_file), *files, str(renamed)).assert_refused(2, "are not in the text, such as")
    wide = ("--set", "model.d_ff=4096", "--axes", "fsdp=4,tensor=2", "--set", "strategy.remat=none")
    of_others = ("--calibration", str(write_rates(tmp_path)))
    other = call("profile", "tiny", *SMALL, *wide, *of_others, *files, str(hlo))
    other.assert_refused(2, "is not the program of this plan: it has 26.2 kB of weights on a device, and the plan")


def test_a_utilisation_above_one_is_called_impossible():
    on_tpu = (0.1, 0.1, SimpleNamespace(platform="tpu"), None)
    (said,) = summary._warnings(*on_tpu, 4.1)
    assert said.startswith("An MFU of 410% is impossible: the trace, the program and the plan do not belong together")
    assert not [*summary._warnings(*on_tpu, 0.8)]


# -- the timeline -----------------------------------------------------------------------------------------


def test_the_timeline_is_a_chrome_trace(profiled):
    document = json.loads(gzip.decompress((profiled.folder / "trace.json.gz").read_bytes()))
    events = document["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M"}
    for event in slices:
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid"} <= set(event)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in slices} <= named
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes[1] == "predicted"
    assert sum("measured" in name for name in processes.values()) == 8
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert min(order, key=order.__getitem__) == 1


def test_slices_of_a_thread_nest(profiled):
    document = json.loads(gzip.decompress((profiled.folder / "trace.json.gz").read_bytes()))
    threads = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"], event["name"]))
    for slices in threads.values():
        open_until = []
        for start, less, name in sorted(slices):
            while open_until and open_until[-1] <= start + 1e-4:
                open_until.pop()
            assert not open_until or start - less <= open_until[-1] + 1e-4, name
            open_until.append(start - less)


def test_the_predicted_timeline_takes_as_long_as_predicted(profiled):
    document = json.loads(gzip.decompress((profiled.folder / "trace.json.gz").read_bytes()))
    ends = [e["ts"] + e["dur"] for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    assert max(ends) == pytest.approx(profiled.result["step_s_predicted"] * 1e6, rel=1e-3)


# -- a training run ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_run_profiles_its_own_steps(plan_file, tmp_path, capsys):
    arguments = ["train", str(plan_file), "--steps", "7", "--runs", str(tmp_path), "--json", "--profile", "2"]
    assert run(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    profile = result["profile"]
    assert len(result["losses"]) == 7
    assert sum(profile["partition"].values()) == pytest.approx(profile["step_s_profiled"], rel=1e-6)
    assert profile["flops"] == pytest.approx(profile["flops_predicted"], rel=1e-6)
    assert (Path(result["run"]) / "profile" / "profile.md").exists()
    assert any("between the ends of two" in note for note in profile["notes"])
    assert [path.name for path in tmp_path.iterdir()] == [Path(result["run"]).name]


# -- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (("--step", "decode"), "decode"),
        (("--step", "prefill", "--weights", "int8", "--cache-dtype", "int8"), "prefill"),
    ],
)
def test_a_step_that_generates(plan_file, call, tmp_path, asked, kind):
    """As a training step: every derived step is found, the FLOPs are the derived ones, work has its classes."""
    said = call("profile", str(plan_file), "--steps", "2", "--warmup", "2", "--out", str(tmp_path), *asked, "--json")
    assert said.code == 0, said.err
    assert f"tiny on cpu:8, {kind}: 2 steps to warm up" in said.err
    found = said.json
    assert 0 < found["host_s"] < found["step_s_profiled"]
    # rows of a prompt are multiplied with the masked part of a tile of the cache too
    few = kind == "decode"
    assert found["flops_predicted"] <= found["flops"] * (1 + 1e-6)
    assert found["flops"] == pytest.approx(found["flops_predicted"], rel=1e-6 if few else 0.15)
    assert found["step_s_predicted"] > 0
    if kind == "prefill":
        row = next(row for row in found["steps"] if row["name"].replace(":", " ") == "layer forward o=cached_attention")
        assert row["predicted_s"] > 0
        assert row["measured_s"] > 0
    both = {row["name"] for row in found["terms"] if row["predicted_s"] and row["measured_s"]}
    assert {"contraction", "attention", "collectives over fsdp", "collectives over tensor"} <= both
    assert {part["name"] for part in found["parts"] if part["predicted_s"]} == {
        *("embed forward", "layer forward", "head forward")
    }
    assert found["memory"]["predicted"]["kv_cache"] > 0
    assert "optimizer" not in found["memory"]["predicted"]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    rates, plan = str(write_rates(folder)), folder / "plan.toml"
    assert run(["plan", "tiny", *SMALL[:-1], "cpu:1", "--calibration", rates, "-o", str(plan)]) == 0
    return plan


def test_a_server_decodes(one_device, call, tmp_path):
    """On one device the engine's step is the priced one: products and attention are found, and the host is apart."""
    asked = ("--step", "decode", "--steps", "2", "--warmup", "2")
    said = call("profile", str(one_device), *asked, "--out", str(tmp_path), "--json")
    assert said.code == 0, said.err
    found = said.json
    assert found["flops"] == pytest.approx(found["flops_predicted"], rel=1e-6)
    steps = {row["name"].replace(":", " "): row for row in found["steps"]}
    for name in ("layer forward o=cached_attention", "layer forward y=einsum", "head forward logits=einsum"):
        assert steps[name]["predicted_s"] > 0
        assert steps[name]["measured_s"] > 0
    assert {"weights", "cache"} <= {owner["kind"] for owner in found["memory"]["owners"]}
    text = call("profile", str(one_device), *asked, "--out", str(tmp_path), "--notes").out
    assert re.search(r"^host: [\d.]+ [mu]s of CPU time a step in the thread that dispatches it$", text, re.M)


def test_a_server_needs_room_to_decode(one_device, call):
    said = call("profile", str(one_device), "--step", "decode", "--steps", "40")
    said.assert_refused(2, "45 steps need sequences of more than 47 positions")


def test_training_stores_nothing_otherwise(plan_file, call):
    call("profile", str(plan_file), "--cache-dtype", "int8").assert_refused(2, "Take --step generate")


def test_jobs_that_generate_are_not_planned_or_trained(plan_file, call, tmp_path):
    path = tmp_path / "decode.toml"
    path.write_text(plan_file.read_text().replace('kind = "train"', 'kind = "decode"').partition("\n")[2])
    for verb in (("train", str(path)), ("explain", str(path)), ("plan", "tiny", *SMALL, "--set", "job.kind=decode")):
        message = f"{verb[0]} takes jobs of kind train, but this job is of kind decode"
        call(*verb).assert_refused(2, message)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps '0' is below 1. Give a number of at least 1."),
        (["--warmup", "0"], "--warmup '0' is below 1."),
        (["--out", __file__], "test_profile.py: File exists. Name another file or folder."),
        (["--trace", "x.xplane.pb"], "--trace and --hlo go together"),
        (["--trace", "x.xplane.pb", "--hlo", "none.txt"], "none.txt cannot be read"),
    ],
)
def test_bad_input_is_one_line(plan_file, call, arguments, words):
    call("profile", str(plan_file), *arguments).assert_refused(2, words)


def test_a_run_with_too_few_steps_is_refused(plan_file, call):
    message = "--profile 3 needs 5 steps to warm up and 3 more, and the run has 4. Give --steps 8 or more."
    call("train", str(plan_file), "--steps", "4", "--profile").assert_refused(2, message)
    call("train", str(plan_file), "--profile", "0").assert_refused(2, "--profile '0' is below 1.")
