"""`meshwright simulate fleet` from the command line: answers, files of rates, and refusals in one line."""

import json

import pytest

from meshwright.cli.main import run

ASKED = ("llama3-8b", "--on", "h100:8x512", "--batch", "16Mi", "--seq", "4096")
RATES = 'source = "ours"\n[[components]]\nname = "node"\nkind = "host"\nper_node_hour = 1e-4\n'


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    assert run(["plan", *ASKED, "--tokens", "1T", "--axes", "data=8,fsdp=512", "-o", str(path)]) == 0
    return str(path)


def test_four_policies_of_a_plan(call, plan_file, tmp_path):
    picture = tmp_path / "fleet.json"
    found = call("simulate", "fleet", plan_file, "--days", "30", "--seeds", "3", "--png", str(picture), "--json")
    assert found.code == 0, found.err
    rows = {row["policy"]: row for row in found.json["policies"]}
    assert list(rows) == ["stop", "elastic", "memory", "diloco"]
    assert found.json["rates"] == "llama3"
    assert found.json["mtbf_s"] / 3600 == pytest.approx(54 * 24 / 466 * 4)
    assert found.json["num_replicas"] == 8
    assert found.json["num_spares"] == 11
    for row in rows.values():
        assert sum(row["hours"].values()) == pytest.approx(30 * 24)
        assert row["goodput"]["p5"] <= row["goodput"]["mean"] <= row["goodput"]["p95"]
        assert row["days_p5"] <= row["days"] <= row["days_p95"]
    stop = rows["stop"]
    assert stop["goodput"]["mean"] == pytest.approx(found.json["goodput"], abs=0.01)
    assert stop["hours"]["productive"] == pytest.approx(720 * stop["goodput"]["mean"])
    assert rows["elastic"]["cost_usd"] < stop["cost_usd"]
    _, *areas = json.loads(picture.read_text())["vconcat"]
    assert [area["title"]["text"] for area in areas] == [
        f"{policy}: share that makes steps, over hours" for policy in rows
    ]


def test_the_text_says_whose_rates(call, plan_file):
    text = call("simulate", "fleet", plan_file, "--days", "2", "--seeds", "2", "--policy", "stop", "--notes").out
    assert "rates of failures: llama3, The Llama 3 Herd of Models" in " ".join(text.split())
    assert "middle of restart_s 300-600" in " ".join(text.split())
    assert "elastic" not in text.split("policy")[1].split("Hours of the fleet")[0]


def test_a_plan_of_outer_steps_has_their_period_and_their_time(call, plan_file, tmp_path):
    """Its steps have the exchange already, which is added to those of other plans; --time adds more."""
    asked = ("llama3-8b", "--on", "4*h100:8x16@100Gbit/s", "--batch", "4Mi", "--seq", "4096")
    path = str(tmp_path / "outer.toml")
    outer = ("--set", "strategy.islands_sync=diloco", "--set", "strategy.outer_every=30")
    assert call("plan", *asked, *outer, "--top", "1", "-o", path).code == 0
    brief = ("--days", "1", "--seeds", "1")
    for plan, more, said in (
        (plan_file, (), "diloco adds 1 s to every 100 steps"),
        (path, (), "diloco adds 0 s to every 30 steps"),
        (path, ("--outer-every", "50", "--time", "outer_s=2"), "diloco adds 2 s to every 50 steps"),
    ):
        assert said in " ".join(call("simulate", "fleet", plan, *brief, *more, "--notes").out.split())


def test_rates_of_a_file_times_and_intervals(call, plan_file, tmp_path):
    path = tmp_path / "rates.toml"
    path.write_text(RATES)
    given = ("--rates", str(path), "--time", "save_s=30", "--time", "startup_s=60,data_s=0", "--interval", "100steps")
    found = call("simulate", "fleet", plan_file, *given, "--seeds", "2", "--json").json
    assert found["source"] == "ours"
    assert (found["times"]["save_s"], found["times"]["startup_s"], found["times"]["data_s"]) == (30, 60, 0)
    assert found["checkpoint_steps"] == 100
    assert found["mtbf_s"] == pytest.approx(3600 / (512 * 1e-4))


def test_a_fleet_in_which_nothing_fails_keeps_all_but_what_it_saves(call, plan_file, tmp_path):
    path = tmp_path / "rates.toml"
    path.write_text(RATES.replace("1e-4", "0"))
    found = call("simulate", "fleet", plan_file, "--rates", str(path), "--seeds", "1")
    assert "none that stop the run" in " ".join(found.out.split())
    assert not {"nan", "inf"} & {*found.out.split()}
    found = call("simulate", "fleet", plan_file, "--rates", str(path), "--seeds", "1", "--json").json
    assert found["policies"][0]["goodput"]["mean"] == pytest.approx(1, abs=1e-3)
    assert found["goodput"] == pytest.approx(1, abs=1e-3)


def test_a_model_of_a_chip_without_rates(call):
    given = ("llama3-8b", "--on", "v5p:4x4x4", "--batch", "1Mi", "--seq", "4096", "--seeds", "1", "--days", "1")
    text = " ".join(call("simulate", "fleet", *given, "--notes").out.split())
    assert "llama3, as none of v5p are published" in text


@pytest.mark.parametrize(
    ("wrong", "code", "said"),
    [
        (("--rates", "lama3"), 2, "rates 'lama3' are not known. Did you mean 'llama3'?"),
        (("--rates", "nowhere.toml"), 2, "nowhere.toml"),
        (("--days", "-3"), 2, "--days -3.0: give a finite number that is not negative"),
        (("--days", "1e12"), 2, "--days 1e+12 have over 5,000,000 faults. Give at most"),
        (("--time", "save_s"), 2, "--time 'save_s' is not a time. Write save_s=5"),
        (("--days", "0"), 2, "--days 0 simulates nothing"),
        (("--spares", "120%"), 2, "--spares '120%' is not a share"),
        (("--spares", "many"), 2, "--spares 'many' is not a share"),
        (("--interval", "often"), 2, "--interval 'often' is not auto"),
        (("--time", "safe_s=3"), 2, "times.safe_s is not a field. Did you mean 'save_s'?"),
        (("--time", "save_s=-3"), 2, "at least 0"),
        (("--policy", "pray"), 2, "'pray' is not one of 'stop', 'elastic', 'memory', 'diloco'"),
        (("--interval", "0s"), 2, "--interval '0s' is not auto"),
        (("--interval", "0steps"), 2, "--interval '0steps' is not auto"),
        (("--replicas", "1000"), 2, "--replicas 1,000 do not divide the 512 hosts"),
        (("--policy", "elastic", "--replicas", "1"), 3, "--policy elastic needs parts that fail alone"),
        (("--seeds", "0"), 2, "--seeds"),
    ],
)
def test_what_is_refused(call, plan_file, wrong, code, said):
    call("simulate", "fleet", plan_file, *wrong).assert_refused(code, said)


@pytest.mark.parametrize("kind", ["host", "straggler"])
def test_days_that_have_too_many_faults(call, plan_file, tmp_path, kind):
    """Of any kind; as many as the refusal says are taken."""
    path = tmp_path / "rates.toml"
    path.write_text(RATES.replace("1e-4", "1e9").replace('"host"', f'"{kind}"'))
    given = ("simulate", "fleet", plan_file, "--rates", str(path), "--seeds", "1", "--policy", "stop")
    call(*given).assert_refused(2, "--days 54 have over 5,000,000 faults. Give at most 4.07e-07.")
    assert call(*given, "--days", "4.07e-07", "--json").json["policies"][0]["faults"] == pytest.approx(5e6, rel=0.01)


def test_files_of_rates_that_are_wrong(call, plan_file, tmp_path):
    path = tmp_path / "rates.toml"
    path.write_text(RATES.replace("per_node_hour", "per_hour"))
    call("simulate", "fleet", plan_file, "--rates", str(path)).assert_refused(2, "per_hour is not a field")


def test_plans_that_do_not_train(call, tmp_path):
    generate = (
        "llama3-8b",
        "--on",
        "h100:8x1",
        "--batch",
        "32seq",
        "--seq",
        "4096",
        "--axes",
        "tensor=8",
        "--set",
        "job.kind=decode",
    )
    call("simulate", "fleet", *generate).assert_refused(2, "simulate fleet takes jobs of kind train")
    path = tmp_path / "service.toml"
    asked = ("llama3-8b", "--on", "h100:8x1", "--prompt", "64", "--output", "8", "--top", "1", "-o", str(path))
    assert call("service", *asked).code == 0
    assert call("simulate", "fleet", str(path)).code == 2


def test_the_group_says_what_it_has(call):
    assert "fleet" in call("simulate", "--help").out
    call("simulate", "fleeet").assert_refused(2, "Did you mean 'fleet'")
