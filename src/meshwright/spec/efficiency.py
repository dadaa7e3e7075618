"""The fitted numbers: how far real training programs stay behind data sheets, for every chip of the catalogue.

At most ``MAX_NUMBERS`` named numbers in all, in ``data/efficiency.toml`` with what they were fitted on. A number is
global, or belongs to a family of chips or a kind of network.
"""

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from meshwright.spec.calibration import Calibration, Efficiency
from meshwright.spec.chip import Chip, catalogued

FILE = Path(__file__).parent / "data" / "efficiency.toml"
MAX_NUMBERS = 40

BLACKWELL_WATTS_PER_FLOPS = 1000 / 2250e12
"""A B200's power over its dense bf16 peak. Blackwell boards run their products as fast as their power allows: those
with more peak for the same power reach less of it."""


class FittedNumbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds: the numbers by name, and what they rest on."""

    date: str
    source: str
    numbers: dict[str, float]


@functools.cache
def fitted_numbers() -> FittedNumbers:
    """The numbers that come with the product."""
    with FILE.open("rb") as file:
        return msgspec.convert(tomllib.load(file), FittedNumbers)


def fitted_calibration(chip: Chip, numbers: Mapping[str, float] | None = None) -> Calibration | None:
    """The calibration of a chip from fitted numbers, its own where none are given; None for a chip without any."""
    base = family(chip)
    if base is None:
        return None
    stored = fitted_numbers() if numbers is None else None
    values = dict(numbers or {}) if stored is None else stored.numbers
    return Calibration(
        name="fitted",
        chip=chip.name,
        date=stored.date if stored else None,
        efficiency=efficiency_of(chip, base, values),
        hop_s={level: values[f"hop_s.{level}"] for level in ("nvlink", "network") if f"hop_s.{level}" in values},
        sources={"efficiency": stored.source if stored else "given numbers"},
    )


def family(chip: Chip) -> str | None:
    """Whose numbers a chip has; None for a chip that nothing is known of, such as a CPU or a made-up one."""
    # figures changed in a file leave a chip the relative that it was
    return catalogued(chip, "family", name=chip.name.removesuffix("-custom")) or None


def efficiency_of(chip: Chip, base: str, values: Mapping[str, float]) -> Efficiency:
    """The numbers that hold for one chip, by the names of `Efficiency`."""
    kind = "tpu" if chip.topology == "torus" else "gpu"

    def pick(name: str, default: float) -> float:
        for key in (f"{name}.{base}", f"{name}.{kind}", name):
            if key in values:
                return values[key]
        return default

    compute = pick("compute", 1.0) * _power_limit(chip, base)
    prefix = "narrow."
    narrow = {key.removeprefix(prefix).removesuffix(f".{base}"): v for key, v in values.items() if _is(key, base, kind)}
    shares = {name: min(1.0, pick(name, 1.0)) for name in ("hbm", "ici", "nvlink", "network", "dcn")}
    others = (
        *("contraction_half", "tile_tail", "head_half", "rows_half", "kernel_s", "host_kernel_s", "host_microbatch_s"),
        "straggler",
    )
    return Efficiency(
        compute=min(1.0, compute),
        attention=min(1.0, pick("attention", compute)),
        narrow=narrow,
        **shares,
        **{name: pick(name, 0.0) for name in others},
        overlap=values.get("overlap"),
        eager_traffic=pick("eager_traffic", 1.0),
        portable=pick("portable", 1.0),
        low=values.get("low"),
        high=values.get("high"),
        low_experts=values.get("low_experts"),
        high_experts=values.get("high_experts"),
    )


def _is(key: str, base: str, kind: str) -> bool:
    """Whether a number is the share of a narrow dtype on this family: ``narrow.fp8.h100``."""
    parts = key.split(".")
    return parts[0] == "narrow" and parts[-1] in (base, kind)


def _power_limit(chip: Chip, base: str) -> float:
    """What of a Blackwell's ceiling its power leaves, relative to a B200."""
    if base != "blackwell" or chip.power_w is None:
        return 1.0
    return chip.power_w / chip.peak_flops["bf16"] / BLACKWELL_WATTS_PER_FLOPS
