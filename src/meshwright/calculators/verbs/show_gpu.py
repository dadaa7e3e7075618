"""What `meshwright show CHIP` says of a GPU's inside: its SMs, the die they are cut from, the rates that follow."""

from collections.abc import Callable, Iterator
from typing import Any

from meshwright.calculators.chips import anatomy
from meshwright.cli.output import or_dash
from meshwright.core.units import format_bytes, format_flops
from meshwright.report.answer import Fact, Piece, Table
from meshwright.spec.chip import Chip, vector_peak_from_anatomy

UNITS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("TPCs", "tpcs", str),
    ("SMs", "sms", str),
    ("FP32 lanes (CUDA cores)", "fp32_lanes", "{:,}".format),
    ("tensor cores", "tensor_cores", "{:,}".format),
    ("L2 cache", "l2_bytes", format_bytes),
)


def gpu_facts(c: Chip, dtype: str | None) -> dict[str, Any] | None:
    """SMs and what they hold, of the chip and of its whole die, and the peaks they give; None without SMs."""
    sold, die = anatomy.gpu_anatomy(c), anatomy.full_die(c)
    if sold is None:
        return None
    per_sm = sold.tensor_flops_per_sm_cycle
    fp32, clocked = c.peak_flops.get("fp32"), c.clock_hz is not None
    over = anatomy.ratio(c.peak_flops[dtype], fp32) if dtype and fp32 and per_sm else None
    return {
        "sold": sold,
        "die": die,
        "sms_used": anatomy.ratio(sold.sms, die.sms) if die else None,
        "tensor_over_fp32_a_cycle": anatomy.ratio(per_sm, sold.fp32_flops_per_sm_cycle) if per_sm else None,
        "tensor_over_fp32_peak": over,
        "time_of_one_percent_on_fp32": anatomy.share_after_speedup(0.01, over) if over else None,
        "peak_flops_from_anatomy": anatomy.gpu_peak_from_anatomy(c) if per_sm and clocked else None,
        "fp32_flops_from_anatomy": vector_peak_from_anatomy(c) if clocked else None,
    }


def gpu_text(c: Chip, g: dict[str, Any], dtype: str | None) -> Iterator[Piece]:
    """What the GPU is made of beside its whole die, then the rates that follow from it."""
    sold, die = g["sold"], g["die"]
    units = [sold, die] if die else [sold]
    rows = [
        [words, *(or_dash(getattr(unit, field) or None, show) for unit in units)]
        for words, field, show in UNITS
        if getattr(sold, field)
    ]
    title = "Inside the GPU"
    if g["sms_used"] is not None:
        title += f": {g['sms_used']:.0%} of the die's SMs are switched on (floor sweeping)"
    yield ""
    yield Table(["", c.name, *([f"whole {die.name}"] if die else [])], rows, title)
    if sold.tensor_flops_per_sm_cycle:
        each, lanes = sold.tensor_flops_per_sm_cycle, sold.fp32_flops_per_sm_cycle
        more = f"{g['tensor_over_fp32_a_cycle']:.3g} times as many"
        yield Fact("an SM, a cycle", f"{each:,} FLOPs in its tensor cores, {lanes:,} in its FP32 lanes: {more}")
    yield from _peak_text("peak from these", g["peak_flops_from_anatomy"], c.peak_flops.get(dtype or ""), c.clock_hz)
    yield from _peak_text("FP32 from these", g["fp32_flops_from_anatomy"], c.peak_flops.get("fp32"), c.clock_hz)
    if g["tensor_over_fp32_peak"]:
        yield Fact(
            "beside products",
            f"tensor cores have {g['tensor_over_fp32_peak']:.3g} times the FP32 rate of the data sheet: 1% of the "
            f"FLOPs on FP32 lanes takes {g['time_of_one_percent_on_fp32']:.0%} of the time",
        )


def _peak_text(label: str, derived: float | None, listed: float | None, clock_hz: float | None) -> Iterator[Fact]:
    """A peak that follows from units and clock beside the data sheet's, with the difference where it shows."""
    if derived and listed and clock_hz:
        more = listed / derived - 1
        off = f" ({more:+.1%})" if abs(more) >= 5e-4 else ""
        sheet = f"the data sheet says {format_flops(listed)}{off}"
        yield Fact(label, f"{format_flops(derived)} at {clock_hz / 1e9:.3g} GHz; {sheet}")
