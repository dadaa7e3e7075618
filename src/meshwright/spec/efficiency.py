"""Fitted numbers: the share of data-sheet rates that real training programs reach, for every chip of the catalogue.

``data/efficiency.toml`` has at most 40 numbers by name, and says on which steps they were fitted. A number is
global, or belongs to a family of chips or a kind of network.
"""

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from meshwright.spec.calibration import SHARES, Calibration, Efficiency
from meshwright.spec.chip import Chip, catalogue_name, catalogued

FILE = Path(__file__).parent / "data" / "efficiency.toml"

KERNEL_NUMBERS = FILE.with_name("kernels.toml")
"""File of the numbers for single kernels, which `cost.work.kernel_times` uses."""

GENERATION_NUMBERS = FILE.with_name("generation.toml")
"""File of the numbers for steps of generation as inference engines run them."""

BLACKWELL_WATTS_PER_FLOPS = 1000 / 2250e12
"""A B200's power over its dense bf16 peak. Power limits the products of Blackwell boards: a board with more peak for
the same power reaches a smaller share of it."""


class FittedNumbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a file of fitted numbers: the numbers by name, their date and source."""

    date: str
    source: str
    numbers: dict[str, float]


@functools.cache
def fitted_numbers(path: Path = FILE) -> FittedNumbers:
    """Returns the numbers of a file shipped with the package."""
    with path.open("rb") as file:
        return msgspec.convert(tomllib.load(file), FittedNumbers)


def fitted_calibration(chip: Chip, numbers: Mapping[str, float] | None = None) -> Calibration | None:
    """Returns a chip's calibration from ``numbers`` (default: the shipped ones); None for a chip without a family."""
    family_name = family(chip)
    if family_name is None:
        return None
    given_numbers = FittedNumbers(date="", source="given numbers", numbers=dict(numbers or {}))
    used_numbers = fitted_numbers() if numbers is None else given_numbers
    value_of = used_numbers.numbers
    return Calibration(
        name="fitted",
        chip=chip.name,
        date=used_numbers.date or None,
        efficiency=efficiency_of(chip, family_name, value_of),
        hop_s={level: value_of[f"hop_s.{level}"] for level in ("nvlink", "network") if f"hop_s.{level}" in value_of},
        sources={"efficiency": used_numbers.source},
    )


SHARED = ("ici", "nvlink", "network", "dcn", "hop_s", "host_kernel_s")
"""First words of the names of numbers (links, and hosts that start kernels) that generation takes from training."""


def generation_numbers() -> FittedNumbers:
    """Returns the numbers for steps of generation: its own file's, and the `SHARED` ones fitted on training steps."""
    served_numbers, training_numbers = fitted_numbers(GENERATION_NUMBERS), fitted_numbers().numbers
    shared_numbers = {name: value for name, value in training_numbers.items() if name.split(".")[0] in SHARED}
    return msgspec.structs.replace(served_numbers, numbers=shared_numbers | served_numbers.numbers)


SERVED_FAMILIES = ("h100", "blackwell")
"""Families of GPUs on which the published steps of generation ran."""


def generation_calibration(chip: Chip) -> Calibration | None:
    """Returns a GPU's calibration for steps of an inference engine; None for a TPU or a chip without a family."""
    numbers = generation_numbers()
    fitted = fitted_calibration(chip, numbers.numbers)
    if fitted is None or chip.topology == "torus":
        return None
    return msgspec.structs.replace(fitted, name="served", date=numbers.date, sources={"efficiency": numbers.source})


def family(chip: Chip) -> str | None:
    """Returns the family whose numbers apply to a chip; None for a chip without a family, such as a CPU."""
    return catalogued(chip, "family", name=catalogue_name(chip)) or None


def power_notes(chip: Chip, rates: Calibration | None) -> list[str]:
    """Returns a note, in a list, if a custom chip has a ``power_w`` that changes no times at these rates; else []."""
    changes_times = family(chip) == "blackwell" and rates is not None and rates.name == "fitted"
    if chip.variant != "custom" or chip.power_w is None or changes_times:
        return []
    return [f"power_w = {chip.power_w:g} changes energy, not times: its effect on times is fitted for Blackwell only"]


def efficiency_of(chip: Chip, base: str, values: Mapping[str, float]) -> Efficiency:
    """Returns a chip's efficiency: each number of its family ``base``, else of its kind of network, else of all."""
    chip_kind = "tpu" if chip.topology == "torus" else "gpu"
    figure_by_name: dict[str, float] = {}
    for name in Efficiency.__struct_fields__:
        key = next((key for key in (f"{name}.{base}", f"{name}.{chip_kind}", name) if key in values), None)
        if key:
            figure_by_name[name] = values[key]
    watts = catalogued(chip, "power_w", name=catalogue_name(chip)) if base == "blackwell" else None
    power_share = watts / chip.peak_flops["bf16"] / BLACKWELL_WATTS_PER_FLOPS if watts is not None else 1.0
    figure_by_name["compute"] = figure_by_name.get("compute", 1.0) * power_share
    figure_by_name.setdefault("attention", figure_by_name["compute"])
    figure_by_name |= {name: min(1.0, figure_by_name[name]) for name in SHARES if name in figure_by_name}
    suffixes = (f".{base}", f".{chip_kind}")
    narrow = {key.split(".")[1]: v for key, v in values.items() if key.startswith("narrow.") and key.endswith(suffixes)}
    seconds_by_engine = {key.split(".", 1)[1]: value for key, value in values.items() if key.startswith("engine_s.")}
    return Efficiency(**figure_by_name, narrow=narrow, engine_s=seconds_by_engine)
