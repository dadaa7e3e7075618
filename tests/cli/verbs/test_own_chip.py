"""A chip of one's own, a file that says what differs from a known one, wherever a chip or a cluster is named."""

from pathlib import Path

import pytest

from meshwright.plan.plan_file import load_plan
from meshwright.spec.cluster import parse_cluster
from meshwright.verify.targets import target_of
from tests.tier import sampled
from tests.verify.compiled import need_compiler

PLAN = ("--batch", "64seq", "--seq", "4096", "--top", "1", "--tokens", "1T")


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("big.toml").write_text('base = "h100"\nhbm_bytes = 96e9\nhbm_bytes_per_s = 2e12\n')


def test_show_and_roofline(call):
    said = call("show", "big.toml")
    assert "memory 96 GB" in said.words
    assert "not known: price_usd_per_hour, power_w (the base's figures are of other hardware)" in said.words
    assert "times: fitted numbers of h100" in said.words
    sizes = ("--dims", "B=128,D=8192,F=8192", "--json")
    found = call("roofline", "bf16[B,D] * bf16[D,F] -> bf16[B,F]", "--on", "big.toml", *sizes).json
    assert found["bytes_per_s"] == 2e12
    assert found["critical_batch_wide"] == pytest.approx(989.4e12 / 2e12)
    assert call("show", "big.toml:8x4", "--json").json["hbm_bytes"] == 32 * 96e9


def test_a_chip_without_a_base_has_the_rates_of_its_data_sheet(call):
    figures = 'topology = "switched"\npeak_flops = {bf16 = 1e15}\nhbm_bytes = 8e10\nhbm_bytes_per_s = 3e12\n'
    Path("own.toml").write_text(f'name = "own"\n{figures}')
    said = call("show", "own.toml").words
    assert "not known: price_usd_per_hour, power_w times: rates of the data sheet" in said


def test_a_plan_has_a_price_only_where_one_is_given(call):
    free = call("plan", "llama3-8b", "--on", "big.toml:8x4", *PLAN)
    assert "no price known (--price)" in free.words
    assert "power not known for this chip (power_w)" in free.words
    found = call("plan", "llama3-8b", "--on", "big.toml:8x4", *PLAN, "--price", "2.5", "--json").json["training"]
    assert found["cost_usd"] == pytest.approx(2.5 * found["chip_hours"])
    assert (found["power_w"], found["energy_kwh"]) == (None, None)


def test_a_price_alone_gives_the_cost_of_a_token(call):
    asked = ("plan", "llama3-8b", "--on", "big.toml:8x4", *PLAN[:-2], "--price", "2.5")
    found = call(*asked, "--json").json
    step_s = found["strategies"][0]["step_s"]
    assert found["usd_per_token"] == pytest.approx(2.5 * 32 / 3600 * step_s / (64 * 4096))
    assert f"${1e6 * found['usd_per_token']:.3g} a million tokens, at $2.50 a chip-hour" in call(*asked).words


@pytest.mark.parametrize(
    ("base", "rates", "said"),
    sampled(
        [("h100", (), True), ("b200", (), False), ("b200", ("--calibration", "datasheet"), True)],
        *(("h100", (), True), ("b200", (), False)),
    ),
)
def test_a_power_that_changes_no_time_is_said_to(call, base, rates, said):
    """It slows the products of Blackwell, by fitted numbers."""
    steps = []
    for watts in (400, 800):
        Path("own.toml").write_text(f'base = "{base}"\npower_w = {watts}\n')
        found = call("plan", "llama3-8b", "--on", "own.toml:8x4", *PLAN, *rates, "-o", "plan.toml")
        note = f"power_w = {watts} changes energy, not times: its effect on times is fitted for Blackwell only"
        texts = found.printed("text").words, call("explain", "plan.toml", "--notes").words
        assert [note in text for text in texts] == [said, said]
        steps.append(load_plan(Path("plan.toml")).predicted.step_s)
    assert (steps[0] == steps[1]) == said
    assert ("changes energy" in call("show", "own.toml").words) == (base != "b200")


@pytest.mark.aot
@pytest.mark.parametrize(("base", "shape", "fits"), [("h100", "4x1", 5e10), ("v5e", "2x2", 3.2e10)])
def test_a_chip_is_verified_with_its_own_memory(call, base, shape, fits):
    """The step runs on a chip that has room for it, also if its base has not, and on no smaller one."""
    asked = ("verify", "llama3.2-1b", "--batch", "8seq", "--seq", "2048", "--axes", "data=4")
    asked += ("--set", "strategy.remat=none", "--json")
    for size, runs in ((fits, True), (1.5e10, False)):
        Path("own.toml").write_text(f'base = "{base}"\nhbm_bytes = {size}\npower_w = 300\n')
        need_compiler(target_of(parse_cluster(f"{base}:{shape}")))
        found = call(*asked, "--on", f"own.toml:{shape}").json
        assert (found["runs"], found["memory"]["available"]) == (runs, size)
        assert "compiled as for" in found["note"]
        assert 1.7e10 < found["memory"]["needed"] < 3.2e10
