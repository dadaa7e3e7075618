"""Rates of an emulated device that were made up, so that no test waits for measurements, and a small model for it."""

from pathlib import Path

from meshwright.core.dims import COLLECTIVES
from meshwright.spec.calibration import Calibration, CollectiveRate, save_calibration

SMALL = [
    "--set", "model.num_layers=2", "--set", "model.d_model=32", "--set", "model.d_ff=64", "--set", "model.head_dim=4",
    "--set", "model.vocab_size=512", "--batch", "8seq", "--seq", "32", "--on", "cpu:8",
]  # fmt: skip
"""Arguments behind `tiny`: two layers, a batch of 8 x 32 tokens, on eight emulated devices."""


def write_rates(folder: Path) -> Path:
    """A calibration file of emulated devices in ``folder``."""
    path = folder / "cpu.toml"
    made = Calibration(
        name="made up",
        chip="cpu",
        matmul_flops_per_s={"fp32": 1e10},
        weight_bytes_per_s={"fp32": 1e10, "bf16": 1e10},
        memory_bytes_per_s=1e10,
        memory_bytes=1e9,
        collectives=tuple(CollectiveRate(kind=k, group_size=8, latency_s=1e-4, bytes_per_s=1e9) for k in COLLECTIVES),
    )
    save_calibration(made, path)
    return path
