"""A new chip is one TOML: planned, priced with its family's numbers, compiled for, found by what it calls itself."""

import msgspec
import pytest

from meshwright.core.errors import CannotRunError
from meshwright.cost.setting import Setting
from meshwright.cost.step_rates import has_grouped_kernels
from meshwright.plan.plan_file import load_plan, save_plan
from meshwright.plan.planner import rank_plans
from meshwright.spec import catalogue
from meshwright.spec import chip as chip_module
from meshwright.spec.chip import chip, chip_of_kind
from meshwright.spec.cluster import parse_cluster, read_cluster
from meshwright.spec.efficiency import family, fitted_calibration
from meshwright.spec.job import Job
from meshwright.verify.targets import target_of

FIGURES = """
full_name = "a made-up GPU"
topology = "switched"
family = "h100"
device_kind = '\\bx900\\b'
hbm_bytes = 160e9
hbm_bytes_per_s = 5e12
nvlink_bytes_per_s = 900e9
domain_chips = 8
chips_per_host = 8
nic_bytes_per_s = 50e9
"""

PEAK = "bf16 = 2e15\n"

COMPILER = """
description = "X900"
capability = "9.0a"
core_count = 160
fpus_per_core = 128
shared_memory_per_core = 233472
shared_memory_per_block_optin = 232448
device_memory_size = 160000000000
l2_cache_size = 52428800
clock_rate_ghz = 1.98
memory_bandwidth = 5000000000000
dnn = "9.10.0"
"""

JOB = Job(batch_seqs=32, seq_len=4096)


def check(cluster, tmp_path):
    """Planned with the numbers of H100s, and compiled for what its table says; its plan file says so too."""
    new = cluster.chip
    assert family(new) == "h100"
    calibration = fitted_calibration(new)
    h100 = fitted_calibration(chip("h100"))
    assert calibration.efficiency == h100.efficiency
    best = rank_plans(Setting(catalogue.load_model("llama3-8b"), cluster, JOB, calibration)).plans[0]
    assert best.cluster == cluster
    save_plan(best, tmp_path / "plan.toml")
    for one in (cluster, load_plan(tmp_path / "plan.toml").cluster):
        target = target_of(one)
        assert (target.platform, target.num_devices) == ("cuda", 8)
        assert 'device_description_str: "X900"' in target.options["target_config"]


def test_in_a_cluster_file(tmp_path):
    path = tmp_path / "new.toml"
    path.write_text(f'shape = [8]\n[chip]\nname = "x900"{FIGURES}[chip.peak_flops]\n{PEAK}[chip.xla_gpu]{COMPILER}')
    check(read_cluster(path), tmp_path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The catalogue with one more file."""
    made = tmp_path / "chips"
    made.mkdir()
    for path in chip_module.CATALOGUE.glob("*.toml"):
        (made / path.name).write_text(path.read_text())
    monkeypatch.setattr(chip_module, "CATALOGUE", made)
    clear()
    yield made
    monkeypatch.undo()
    clear()


def clear():
    chip_module.chips.cache_clear()


def test_in_the_catalogue(folder, tmp_path):
    (folder / "new.toml").write_text(
        f'[[chip]]\nname = "x900"{FIGURES}[chip.peak_flops]\n{PEAK}[chip.xla_gpu]{COMPILER}'
    )
    clear()
    check(parse_cluster("x900:8"), tmp_path)
    assert chip_of_kind("Maker X900-SXM").name == "x900"
    assert chip_of_kind("NVIDIA H200").name == "h200"


def test_more_of_a_name_is_another_chip(folder):
    """ "H100 PCIe" is no H100, and a board that gets a file of its own is no longer unknown."""
    (folder / "new.toml").write_text(
        f"""[[chip]]\nname = "h100-nvl"\n{FIGURES.replace("x900", "h100 nvl")}[chip.peak_flops]\n{PEAK}"""
    )
    clear()
    assert chip_of_kind("NVIDIA H100 NVL").name == "h100-nvl"
    assert chip_of_kind("NVIDIA H100 PCIe").name == "h100-pcie"


def test_a_chip_on_a_base_is_other_hardware():
    """It keeps the fitted numbers, whatever its name; devices that call themselves as its base are none of it."""
    custom = chip_module.chip_from_table({"base": "h100", "hbm_bytes": 1e11})
    assert (family(custom), custom.xla_gpu, custom.device_kind) == ("h100", None, "")
    assert family(chip_module.chip_from_table({"base": "h100", "name": "mine"})) == "h100"
    assert family(chip_module.chip_from_table({"base": "h100", "name": "mine", "family": "v5p"})) == "v5p"
    assert family(msgspec.structs.replace(custom, base="")) == "h100"  # a plan file of an earlier version


@pytest.mark.parametrize("base", ["h100", "v5e"])
def test_a_chip_on_a_base_is_compiled_as_its_base(base):
    """If only its rates, its memory, its price or its power differ."""
    own = chip_module.chip_from_table(
        {"base": base, "hbm_bytes": 4e10, "hbm_bytes_per_s": 1e12, "peak_flops": {"bf16": 1e14}, "power_w": 300}
    )
    shape = "4x2" if base == "v5e" else "8x1"
    cluster = msgspec.structs.replace(parse_cluster(f"{base}:{shape}"), chip=own)
    target, of_base = target_of(cluster), target_of(parse_cluster(f"{base}:{shape}"))
    assert (target.platform, target.topology) == (of_base.platform, of_base.topology)
    assert f"compiled as for {chip(base).full_name}: programs for both are equal" in target.note
    if base == "h100":
        size = round(chip("h100").xla_gpu.device_memory_size * 4e10 / 8e10)
        assert f"device_memory_size: {size}" in target.options["target_config"]
    else:
        assert target.note.endswith("except that libtpu plans with 16.9 GB of memory")
    renamed = msgspec.structs.replace(own, base="", name=f"{base}-custom")  # a plan file of an earlier version
    assert target_of(msgspec.structs.replace(cluster, chip=renamed)) == target


def test_a_chip_with_other_units_than_its_base_needs_a_compiler_of_its_own():
    own = chip_module.chip_from_table({"base": "h100", "num_sms": 100})
    with pytest.raises(CannotRunError, match="no compiler is known for h100 with its own num_sms"):
        target_of(msgspec.structs.replace(parse_cluster("h100:8x1"), chip=own))


def test_experts_of_a_chip_on_a_base_run_in_the_same_kernels():
    own = chip_module.chip_from_table({"base": "h100", "power_w": 500})
    cluster = parse_cluster("h100:8x1")
    assert has_grouped_kernels(msgspec.structs.replace(cluster, chip=own)) == has_grouped_kernels(cluster)


def test_plan_files_of_earlier_versions_name_the_chip_alone():
    bare = msgspec.structs.replace(chip("v5p"), family="", device_kind="", libtpu=None)
    assert family(bare) == "v5p"
    cluster = msgspec.structs.replace(parse_cluster("v5p:2x2x1"), chip=bare)
    assert target_of(cluster).topology == "v5p:2x2x1"
