"""Descriptions of GPUs for the compiler, beside the catalogue of chips."""

import re

import msgspec
import pytest

from meshwright.spec.chip import chips
from meshwright.verify.targets import target_config

GPUS = {name: one.xla_gpu for name, one in chips().items() if one.xla_gpu}


@pytest.mark.parametrize("name", sorted(GPUS))
def test_the_text_says_every_figure_once(name):
    gpu = GPUS[name]
    text, figures = target_config(gpu), msgspec.to_builtins(gpu)
    fields = re.findall(r"(\w+): ([\d.]+)", text)
    for key in ("core_count", "device_memory_size", "memory_bandwidth", "clock_rate_ghz", "l2_cache_size"):
        assert [value for field, value in fields if field == key] == [str(figures[key])]
    assert text.count("{") == text.count("}")
    major, minor = re.search(r"major: (\d+) minor: (\d+)", text).groups()
    assert f"{major}.{minor}" == str(figures["capability"]).rstrip("a")
    assert ("ACCELERATED_FEATURES" in text) == str(figures["capability"]).endswith("a")


@pytest.mark.parametrize("name", sorted(GPUS))
def test_figures_agree_with_the_data_sheets(name):
    """Memory within a tenth: the compiler is told GiB that the driver leaves. Bandwidth within 5%."""
    chip, gpu = chips()[name], GPUS[name]
    assert gpu.device_memory_size == pytest.approx(chip.hbm_bytes, rel=0.1)
    assert gpu.memory_bandwidth == pytest.approx(chip.hbm_bytes_per_s, rel=0.05)
