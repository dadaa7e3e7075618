"""Rates measured on a machine, or taken from the data sheet, each with its source."""

import math
from pathlib import Path

import msgspec

from meshwright.core.dims import DTYPE_BYTES, CollectiveKind
from meshwright.core.errors import InputError
from meshwright.core.fields import check_figures
from meshwright.core.files import write_text_whole
from meshwright.core.toml_file import load_toml, sealed_toml
from meshwright.spec.chip import Chip, known, peak, require_dtypes


class CollectiveRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured kind of collective over ``group_size`` devices: ``latency_s`` plus bytes over the rate.

    ``bytes_per_s`` counts the bytes each device must receive: (n-1)/n of the gathered array for all_gather.
    """

    kind: CollectiveKind
    group_size: int
    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        check_figures(self, f"{self.kind} over {self.group_size}:", may_be_zero=("latency_s",))


SHARES = ("compute", "attention", "hbm", "ici", "nvlink", "network", "dcn")
"""Fields of `Efficiency` that are shares of a data-sheet rate."""

PENALTIES = (
    *("contraction_half", "tile_tail", "head_half", "rows_half", "kernel_s", "host_kernel_s", "host_microbatch_s"),
    *("straggler", "straggler_s", "engine_s"),
)
"""Fields of `Efficiency` that make work slower; they are 0 for the data sheet."""


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of data-sheet rates that programs reach; the defaults are the data sheet itself.

    Shares of rates that large enough work reaches: ``compute`` (matrix products), ``attention`` (of the same peak, by
    fused kernels; None: as products), ``hbm``, and every level of the network. ``narrow`` is a further factor per dtype
    below 16 bits, ``portable`` a further factor for attention in kernels that are not written for the chip. Shapes slow
    work: a product that sums over K by the factor 1 + contraction_half / K, a product with few output tiles by 1 +
    tile_tail x processors x tile / outputs, attention with heads of width H by 1 + head_half / H, attention over T
    positions by 1 + rows_half / T. ``eager_traffic`` is the memory traffic of elementwise ops with eager dispatch over
    the traffic of fused ones. Seconds: ``kernel_s`` on the device for every kernel; with eager dispatch the host needs
    ``host_kernel_s`` for each, and ``host_microbatch_s`` for each microbatch. ``overlap`` is an exponent p: two things
    that partly hide each other (compute and memory in a kernel, compute and communication in a layer, a pass and the
    collectives of a step) take (a^p + b^p)^(1/p). None is the data sheet's view: the longer of the two, with exposed
    communication added in full. ``overlap_weights`` is the exponent for gathers of weights in a pass (None: the same).
    For every doubling of hosts a step takes ``straggler_s`` longer, and ``straggler`` times as long again. ``low`` and
    ``high`` are the measured step time over the predicted one at the 10th and the 90th percentile, for dense models;
    ``low_experts`` and ``high_experts`` are these for models with experts. An engine that serves needs ``engine_s`` (by
    its name) between two steps.
    """

    compute: float = 1.0
    attention: float | None = None
    hbm: float = 1.0
    ici: float = 1.0
    nvlink: float = 1.0
    network: float = 1.0
    dcn: float = 1.0
    narrow: dict[str, float] = {}
    contraction_half: float = 0.0
    tile_tail: float = 0.0
    portable: float = 1.0
    head_half: float = 0.0
    rows_half: float = 0.0
    eager_traffic: float = 1.0
    kernel_s: float = 0.0
    host_kernel_s: float = 0.0
    host_microbatch_s: float = 0.0
    overlap: float | None = None
    straggler: float = 0.0
    straggler_s: float = 0.0
    engine_s: dict[str, float] = {}
    overlap_weights: float | None = None
    low: float | None = None
    high: float | None = None
    low_experts: float | None = None
    high_experts: float | None = None

    @property
    def hiding(self) -> float | None:
        """The exponent with which a pass hides gathers of weights: ``overlap_weights`` or, if None, ``overlap``."""
        return self.overlap if self.overlap_weights is None else self.overlap_weights

    def interval(self, *, has_experts: bool) -> tuple[float | None, float | None]:
        """Returns ``low`` and ``high`` for dense models or for models with experts, or (None, None)."""
        return (self.low_experts, self.high_experts) if has_experts else (self.low, self.high)

    def __post_init__(self) -> None:
        check_figures(self, "efficiency", may_be_zero=PENALTIES, shares=SHARES)


class Pace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that ops of one kind take, inside a step, for each unit of work; an op's time is the sum.

    ``flop`` is for each FLOP, ``score`` for each score of attention, ``byte`` for each byte read or written,
    ``kept_byte`` for each byte of a result that is also copied into the stack that layers keep for their backward pass,
    ``call`` for each call of a kernel.
    """

    flop: float = 0.0
    score: float = 0.0
    byte: float = 0.0
    kept_byte: float = 0.0
    call: float = 0.0


class HostRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of one emulated device inside a step, while all others compute. No overlap: times add up.

    ``product`` is the pace of matrix products, ``ops`` the paces of other kinds of ops (each pass of attention is one),
    and ``stream`` the pace of kinds that ``ops`` lacks. Loops over layers copy their inputs and saved results into and
    out of stacks, in ``loop_byte`` seconds for each byte. Inside a step devices start a collective at different times:
    its bytes take ``waits`` times, its latency ``meets`` times as long as in a benchmark that only runs collectives.
    ``kernel_s`` is the gap before each op where there is only one device.
    """

    product: Pace
    ops: dict[str, Pace]
    stream: Pace
    loop_byte: float
    waits: float = 1.0
    meets: float = 1.0
    kernel_s: float = 0.0


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured rates of a machine. Anything not measured falls back on the chip's data sheet.

    Rates are per device; where ``devices`` share one machine, they are measured with all of them at work.
    ``matmul_flops_per_s`` are the rates of products as a step has them, ``peak_flops_per_s`` the rates of the best
    product measured: without a data sheet, MFU is a share of these. ``weight_bytes_per_s`` are the rates at which
    products of few rows read their weight, on devices with ``host`` rates. ``hop_s`` maps a level of the network to the
    latency of a hop. ``sources`` says where each figure came from; a measured figure names the command or the paper.
    """

    name: str
    chip: str
    machine: str | None = None
    date: str | None = None
    devices: int | None = None
    matmul_flops_per_s: dict[str, float] = {}
    peak_flops_per_s: dict[str, float] = {}
    attention_flops_per_s: dict[str, float] = {}
    weight_bytes_per_s: dict[str, float] = {}
    memory_bytes_per_s: float | None = None
    memory_bytes: float | None = None
    collectives: tuple[CollectiveRate, ...] = ()
    hop_s: dict[str, float] = {}
    efficiency: Efficiency = Efficiency()
    host: HostRates | None = None
    sources: dict[str, str] = {}

    def __post_init__(self) -> None:
        check_figures(self, f"calibration {self.name!r}:", may_be_zero=("hop_s", "host"))
        for name in ("matmul_flops_per_s", "peak_flops_per_s", "attention_flops_per_s", "weight_bytes_per_s"):
            require_dtypes(getattr(self, name), f"{name}: ")

    @property
    def is_datasheet(self) -> bool:
        """True if efficiencies are defaults and no rate but ``host`` and ``peak_flops_per_s`` is measured."""
        rates = (self.matmul_flops_per_s, self.attention_flops_per_s, self.memory_bytes_per_s, self.memory_bytes)
        measured_rates = (*rates, self.collectives, self.hop_s)
        return not any(measured_rates) and self.efficiency == Efficiency()

    def describe(self) -> str:
        """Returns the source of the rates in words, such as "calibration 'mine' on MACHINE, DATE"."""
        if self.is_datasheet:
            return "datasheet peaks, no calibration"
        source_by_name = {"fitted": "training steps", "served": "times per output token"}
        if self.name in source_by_name:
            return f"numbers fitted on published {source_by_name[self.name]}{f', {self.date}' if self.date else ''}"
        machine_text = f" on {self.machine}" if self.machine else ""
        return f"calibration {self.name!r}{machine_text}{f', {self.date}' if self.date else ''}"


def datasheet_calibration(chip: Chip) -> Calibration:
    """Returns the chip's data sheet as a calibration: every efficiency is the default, no rate is measured."""
    return Calibration(name="datasheet", chip=chip.name, sources={"efficiency": "1.0: data-sheet rates"})


def load_calibration(path: Path | str) -> Calibration:
    """Reads a calibration from a TOML file. Raises InputError with file:line."""
    return load_toml(Path(path), Calibration)


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Writes the calibration atomically."""
    write_text_whole(path, sealed_toml(calibration))


def host_rates_in(calibration: Calibration, dtype: str) -> HostRates | None:
    """Returns the calibration's ``host`` rates, measured in float32, with products scaled to ``dtype`` by the ratio of
    ``matmul_flops_per_s``; unscaled if one of the two dtypes was not measured."""
    host, rate_of = calibration.host, calibration.matmul_flops_per_s
    if host is None or not {dtype, "fp32"} <= rate_of.keys():
        return host
    product_rates = msgspec.structs.replace(host.product, flop=host.product.flop * rate_of["fp32"] / rate_of[dtype])
    return msgspec.structs.replace(host, product=product_rates)


def matmul_rate(chip: Chip, calibration: Calibration, dtype: str) -> float:
    """Returns FLOP/s of large matrix products: measured, else peak x efficiency. Raises InputError without either."""
    measured_flops_per_s = calibration.matmul_flops_per_s.get(dtype)
    if measured_flops_per_s is not None:
        return measured_flops_per_s
    if not chip.peak_flops and calibration.matmul_flops_per_s:
        names, number = ", ".join(sorted(calibration.matmul_flops_per_s)), calibration.devices or "N"
        raise InputError(
            f"calibration {calibration.name!r} measured {names} products, not {dtype}. Choose one of these, or measure "
            f"the other: bench --on cpu:{number} --dtypes {dtype},{names.replace(' ', '')} -o FILE, then --calibration "
            f"FILE."
        )
    return peak(chip, dtype) * calibration.efficiency.compute * calibration.efficiency.narrow.get(dtype, 1.0)


def attention_rate(chip: Chip, calibration: Calibration, dtype: str, *, narrow: bool = False) -> float:
    """Returns FLOP/s of attention, softmax included: as measured, else its share of the peak.

    Attention runs in bf16 if ``dtype`` has fewer than 16 bits, except with ``narrow`` kernels. Without a share for
    attention it has the rate of products.
    """
    if not narrow and DTYPE_BYTES[dtype] < DTYPE_BYTES["bf16"] and peak_known(chip, "bf16"):
        dtype = "bf16"
    measured_flops_per_s, peak_share = calibration.attention_flops_per_s.get(dtype), calibration.efficiency.attention
    if measured_flops_per_s or peak_share is None or not chip.peak_flops:
        return measured_flops_per_s or matmul_rate(chip, calibration, dtype)
    return peak(chip, dtype) * peak_share


def peak_known(chip: Chip, dtype: str) -> bool:
    """True if the chip's ``peak_flops`` has this dtype, or is empty."""
    return dtype in chip.peak_flops or not chip.peak_flops


def reference_peak(chip: Chip, calibration: Calibration, dtype: str) -> float:
    """Returns the FLOP/s that MFU is a share of: the data-sheet peak, else the rate of the best product measured."""
    if chip.peak_flops:
        return peak(chip, dtype)
    return max(calibration.peak_flops_per_s.get(dtype, 0.0), matmul_rate(chip, calibration, dtype))


def memory_rate(chip: Chip, calibration: Calibration) -> float:
    """Returns bytes/s of streams through main memory: as measured, else data sheet x efficiency."""
    if calibration.memory_bytes_per_s is not None:
        return calibration.memory_bytes_per_s
    return known(chip, "hbm_bytes_per_s") * calibration.efficiency.hbm


def memory_bytes(chip: Chip, calibration: Calibration) -> float:
    """Returns the bytes a program may allocate on one device: as measured, else what the chip offers."""
    if calibration.memory_bytes is not None:
        return calibration.memory_bytes
    return chip.memory_bytes if chip.memory_bytes is not None else known(chip, "hbm_bytes")


def collective_rate(calibration: Calibration, kind: CollectiveKind, group_size: int) -> CollectiveRate:
    """Returns the measured rate of ``kind`` with the group size closest by ratio. Raises InputError if it has none."""
    rates_of_kind = [rate for rate in calibration.collectives if rate.kind == kind]
    if not rates_of_kind:
        raise InputError(
            f"calibration {calibration.name!r} of {calibration.chip} holds no {kind} rate."
            " Measure this machine first (make demo does), or name a calibration file."
        )
    return min(rates_of_kind, key=lambda rate: abs(math.log(rate.group_size / group_size)))
