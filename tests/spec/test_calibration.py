"""Rates of a machine: measured figures before efficiencies, efficiencies before the data sheet."""

import pytest

from meshwright.core.errors import InputError
from meshwright.core.toml_file import sealed_toml
from meshwright.plan.plan_file import Plan, load_plan
from meshwright.spec.calibration import (
    SHARES,
    Calibration,
    CollectiveRate,
    Efficiency,
    attention_rate,
    collective_rate,
    datasheet_calibration,
    load_calibration,
    matmul_rate,
    memory_rate,
    reference_peak,
    save_calibration,
)
from meshwright.spec.chip import chip
from meshwright.spec.efficiency import fitted_calibration

H100, V100 = chip("h100"), chip("v100")


def with_efficiency(**fields):
    return Calibration(name="x", chip="h100", efficiency=Efficiency(**fields))


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("share", [0.0, -0.5, 1.01])
def test_shares_are_above_0_and_at_most_1(name, share):
    with pytest.raises(ValueError, match=rf"efficiency {name} is .*give a share in \(0, 1\]"):
        Efficiency(**{name: share})


def test_the_data_sheet_is_the_default():
    sheet = datasheet_calibration(H100)
    assert sheet.is_datasheet
    assert sheet.describe() == "datasheet peaks, no calibration"
    assert matmul_rate(H100, sheet, "bf16") == attention_rate(H100, sheet, "bf16") == H100.peak_flops["bf16"]
    assert memory_rate(H100, sheet) == H100.hbm_bytes_per_s


@pytest.mark.parametrize(
    "fields",
    [{"compute": 0.5}, {"contraction_half": 50.0}, {"kernel_s": 1e-6}, {"low": 0.9}, {"narrow": {"fp8": 0.9}}],
)
def test_any_number_makes_it_more_than_a_data_sheet(fields):
    assert not with_efficiency(**fields).is_datasheet


def test_products_of_narrow_dtypes_have_a_further_share():
    found = with_efficiency(compute=0.5, narrow={"fp8": 0.8})
    assert matmul_rate(H100, found, "bf16") == 0.5 * H100.peak_flops["bf16"]
    assert matmul_rate(H100, found, "fp8") == 0.5 * 0.8 * H100.peak_flops["fp8"]


def test_attention_keeps_16_bits():
    """Where products are narrower; it has a share of the 16-bit peak, or that of products."""
    found = with_efficiency(compute=0.5, attention=0.4, narrow={"fp8": 0.8})
    assert attention_rate(H100, found, "fp8") == attention_rate(H100, found, "bf16") == 0.4 * H100.peak_flops["bf16"]
    assert attention_rate(H100, with_efficiency(compute=0.5), "fp8") == 0.5 * H100.peak_flops["bf16"]
    assert attention_rate(V100, found, "fp16") == 0.4 * V100.peak_flops["fp16"]
    # a chip whose table lacks a 16-bit rate is priced at the one that it has
    assert attention_rate(chip("m3"), found, "int8") == 0.4 * chip("m3").peak_flops["int8"]


def test_what_was_measured_comes_first():
    measured = Calibration(
        name="x", chip="h100", matmul_flops_per_s={"bf16": 1e14}, attention_flops_per_s={"bf16": 2e13},
        memory_bytes_per_s=1e12, efficiency=Efficiency(compute=0.5, attention=0.5, hbm=0.5),
    )  # fmt: skip
    assert matmul_rate(H100, measured, "bf16") == 1e14
    assert attention_rate(H100, measured, "fp8") == 2e13
    assert memory_rate(H100, measured) == 1e12
    assert matmul_rate(H100, measured, "fp8") == 0.5 * H100.peak_flops["fp8"]


def test_measured_calibration(tmp_path):
    made = Calibration(
        name="here",
        chip="cpu",
        machine="two cores",
        date="2025-01-02",
        matmul_flops_per_s={"fp32": 3e10},
        memory_bytes_per_s=4e9,
        memory_bytes=1e9,
        collectives=tuple(
            CollectiveRate(kind="all_gather", group_size=n, latency_s=1e-4 * n, bytes_per_s=1e9) for n in (2, 8)
        ),
        efficiency=Efficiency(ici=0.9),
        sources={"memory_bytes_per_s": "a copy of 64 MB"},
    )
    save_calibration(made, tmp_path / "here.toml")
    read = load_calibration(tmp_path / "here.toml")
    assert read == made
    assert read.describe() == "calibration 'here' on two cores, 2025-01-02"
    assert reference_peak(chip("cpu"), read, "fp32") == matmul_rate(chip("cpu"), read, "fp32") == 3e10
    assert collective_rate(read, "all_gather", 5).group_size == 8
    with pytest.raises(
        InputError, match=r"measured fp32 products, not bf16\..*bench --on cpu:N --dtypes bf16,fp32 -o FILE"
    ):
        matmul_rate(chip("cpu"), read, "bf16")
    with pytest.raises(InputError, match="holds no all_reduce rate"):
        collective_rate(read, "all_reduce", 2)


@pytest.mark.parametrize("name", ["h100", "gb300", "v5p"])
def test_a_fitted_calibration_is_saved_and_read_back(tmp_path, name):
    found = fitted_calibration(chip(name))
    save_calibration(found, tmp_path / "a.toml")
    assert load_calibration(tmp_path / "a.toml") == found


def test_fields_that_are_not_known_or_wrong_have_a_line(tmp_path):
    text = 'name = "x"\nchip = "h100"\n\n[efficiency]\ncompute = 0.9\n'
    for line, message in (
        ("tensor_expose = 0.5", r"a\.toml:6: .*tensor_expose"),
        ("hbm = 1.5", r"a\.toml:.*hbm is 1\.5, give a share in \(0, 1\]"),
    ):
        (tmp_path / "a.toml").write_text(f"{text}{line}\n")
        with pytest.raises(InputError, match=message):
            load_calibration(tmp_path / "a.toml")


HOST = """name = "x"
chip = "cpu"
[host]
loop_byte = 1e-10
product = { flop = 1e-11 }
stream = { byte = 1e-10 }
ops = { softmax = { byte = 1e-10, call = 0 } }
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("flop = 1e-11", "flop = nan"), "host.product.flop is nan: give a finite number, at most 1e.60"),
        (("call = 0", "call = -1.0"), "host.ops.softmax.call is -1, give a number of at least 0"),
        (("loop_byte = 1e-10", "loop_byte = inf"), "host.loop_byte is inf: give a finite number, at most 1e.60"),
        (("loop_byte", "waits = -1.0\nloop_byte"), "host.waits is -1, give a number of at least 0"),
    ],
)
def test_figures_of_a_host_are_checked(tmp_path, change, message):
    path = tmp_path / "a.toml"
    path.write_text(HOST)
    assert load_calibration(path).host is not None
    path.write_text(HOST.replace(*change, 1))
    with pytest.raises(InputError, match=rf"^\S*a\.toml(:\d)?: (calibration 'x': )?{message}\.$"):
        load_calibration(path)


def test_the_plan_file_holds_every_field(call_plan):
    """A plan made with fitted numbers is priced with the same when it is read back."""
    plan = call_plan("--calibration", "datasheet")
    assert plan.calibration.is_datasheet
    assert plan.predicted.step_s_p10 is None
    plan = call_plan()
    assert plan.calibration == fitted_calibration(H100)
    assert plan.predicted.step_s_p10 < plan.predicted.step_s < plan.predicted.step_s_p90


@pytest.fixture
def call_plan(tmp_path):
    from meshwright.cli.main import run

    def made(*args: str) -> Plan:
        path = tmp_path / "plan.toml"
        job = ("--on", "h100:8x1", "--batch", "8seq", "--seq", "512")
        assert run(["plan", "tiny", *job, *args, "-o", str(path)]) == 0
        text = path.read_text()
        found = load_plan(path)
        assert sealed_toml(found) == text
        return found

    return made
