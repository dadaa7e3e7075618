"""`plan --pareto` and `plan --breakdown`: tables, JSON and pictures beside the ranked strategies."""

import pytest

PLAN = ("plan", "llama3-8b", "--on", "v5p:2x2x4", "--batch", "64seq", "--seq", "4096", "--top", "1")


@pytest.mark.slow
def test_the_frontier(call, tmp_path):
    said = call(*PLAN, "--pareto", "--png", "f.svg")
    assert "Step time against cost, on all chips and on parts ($4.20 a chip and hour)" in said.words
    assert (tmp_path / "f.svg").stat().st_size > 3000
    found = said.printed("json")
    front = found.json["pareto"]
    sizes = [one["hbm_bytes_per_chip"] for one in front["memory"]]
    assert sizes == sorted(sizes, reverse=True)
    assert front["memory"][0]["step_s"] == pytest.approx(found.json["strategies"][0]["step_s"], rel=2e-3)
    assert front["cost"][0]["usd_per_token"] > 0


def test_the_tables_fit(call):
    said = call(*PLAN, "--axes", "tensor=4", "--pareto", "--breakdown", "--png", "b.svg")
    assert "Plans that nothing beats in both step time and memory" in said.out
    assert "Communication of one step: " in said.words
    assert max(map(len, said.out.splitlines())) <= 80


@pytest.mark.slow
def test_a_chip_without_a_price(call):
    said = call("plan", "llama3-8b", "--on", "b300:8x1", "--batch", "64seq", "--seq", "4096", "--pareto")
    assert "b300 has no price (--price), so step time is not weighed against cost" in said.words


def test_the_breakdown(call, tmp_path):
    found = call(*PLAN, "--axes", "tensor=4", "--breakdown", "--png", "b.svg", "--json").json
    assert (tmp_path / "b.svg").stat().st_size > 3000
    step = found["strategies"][0]["step_s"]
    assert sum(found["breakdown"]["parts"].values()) == pytest.approx(step, rel=1e-3)
    assert {row["op"] for row in found["breakdown"]["traffic"]} >= {"all_gather", "reduce_scatter"}


def test_the_breakdown_says_whose_bytes_it_has(call):
    assert "hidden; bytes that a device sends" in call(*PLAN, "--axes", "tensor=4", "--breakdown").words


def test_one_chip_has_no_traffic(call):
    said = call("plan", "tiny", "--on", "h100:1x1", "--batch", "8seq", "--seq", "64", "--breakdown", "--png", "b.svg")
    assert said.code == 0, said.err
    assert "Communication" not in said.out
