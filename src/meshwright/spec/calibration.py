"""Rates as measured on a machine, or the data sheet's, with where each came from."""

import math
from pathlib import Path
from typing import Literal

import msgspec

from meshwright.core.errors import InputError
from meshwright.core.files import write_text_whole
from meshwright.spec.chip import Chip, known, peak
from meshwright.spec.toml_file import dump_toml, load_toml

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]


class CollectiveRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured kind of collective over ``group_size`` devices: ``latency_s`` plus bytes over the rate.

    ``bytes_per_s`` counts the bytes each device must receive: (n-1)/n of the gathered array for all_gather.
    """

    kind: CollectiveKind
    group_size: int
    latency_s: float
    bytes_per_s: float


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Share of each data-sheet rate that programs reach; exactly 1 means the data sheet as it stands."""

    compute: float = 1.0
    hbm: float = 1.0
    ici: float = 1.0
    nvlink: float = 1.0
    network: float = 1.0
    dcn: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"efficiency {name} is {getattr(self, name)}, give a share in (0, 1]")


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine really does. Anything not measured falls back on the chip's data sheet.

    Rates are per device. ``sources`` says where each figure came from; a figure that was measured names the
    command or the paper.
    """

    name: str
    chip: str
    machine: str | None = None
    date: str | None = None
    matmul_flops_per_s: dict[str, float] = {}
    attention_flops_per_s: dict[str, float] = {}
    memory_bytes_per_s: float | None = None
    memory_bytes: float | None = None
    collectives: tuple[CollectiveRate, ...] = ()
    hop_s: dict[str, float] = {}
    efficiency: Efficiency = Efficiency()
    sources: dict[str, str] = {}

    @property
    def is_datasheet(self) -> bool:
        """True when nothing was measured and no efficiency differs from 1."""
        rates = (self.matmul_flops_per_s, self.attention_flops_per_s, self.memory_bytes_per_s, self.memory_bytes)
        measured = (*rates, self.collectives, self.hop_s)
        return not any(measured) and self.efficiency == Efficiency()

    def describe(self) -> str:
        """One line for the output: what the times rest on."""
        if self.is_datasheet:
            return "datasheet peaks, no calibration"
        where = f" on {self.machine}" if self.machine else ""
        return f"calibration {self.name!r}{where}{f', {self.date}' if self.date else ''}"


def datasheet_calibration(chip: Chip) -> Calibration:
    """The chip's data sheet as it stands: every factor exactly 1, nothing measured."""
    return Calibration(name="datasheet", chip=chip.name, sources={"efficiency": "1.0: data-sheet rates"})


def load_calibration(path: Path) -> Calibration:
    """The calibration of a TOML file; faults come back with file:line."""
    return load_toml(path, Calibration)


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write the calibration; the file is whole or as it was."""
    write_text_whole(path, dump_toml(calibration))


def matmul_rate(chip: Chip, calibration: Calibration, dtype: str) -> float:
    """FLOP/s that large products reach: as measured, else peak x efficiency."""
    measured = calibration.matmul_flops_per_s.get(dtype)
    if measured is not None:
        return measured
    if not chip.peak_flops and calibration.matmul_flops_per_s:
        have = ", ".join(sorted(calibration.matmul_flops_per_s))
        raise InputError(
            f"calibration {calibration.name!r} measured {have} products, not {dtype}. Choose one of these."
        )
    return peak(chip, dtype) * calibration.efficiency.compute


def attention_rate(chip: Chip, calibration: Calibration, dtype: str) -> float:
    """FLOP/s that attention reaches, its softmax included: as measured, else the rate of large products."""
    return calibration.attention_flops_per_s.get(dtype) or matmul_rate(chip, calibration, dtype)


def reference_peak(chip: Chip, calibration: Calibration, dtype: str) -> float:
    """The FLOP/s that utilisation (MFU) is a share of: the data-sheet peak, else the measured rate."""
    return peak(chip, dtype) if chip.peak_flops else matmul_rate(chip, calibration, dtype)


def memory_rate(chip: Chip, calibration: Calibration) -> float:
    """Bytes/s of the main memory that streams reach: as measured, else data sheet x efficiency."""
    if calibration.memory_bytes_per_s is not None:
        return calibration.memory_bytes_per_s
    return known(chip, "hbm_bytes_per_s") * calibration.efficiency.hbm


def memory_bytes(chip: Chip, calibration: Calibration) -> float:
    """Bytes a program may fill on one device: as measured, else what the chip offers."""
    if calibration.memory_bytes is not None:
        return calibration.memory_bytes
    return chip.memory_bytes if chip.memory_bytes is not None else known(chip, "hbm_bytes")


def collective_rate(calibration: Calibration, kind: CollectiveKind, group_size: int) -> CollectiveRate:
    """The measurement of that kind whose group is closest in size (as a ratio)."""
    same = [rate for rate in calibration.collectives if rate.kind == kind]
    if not same:
        raise InputError(
            f"calibration {calibration.name!r} of {calibration.chip} holds no {kind} rate."
            " Measure this machine first (make demo does), or name a calibration file."
        )
    return min(same, key=lambda rate: abs(math.log(rate.group_size / group_size)))
