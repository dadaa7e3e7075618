"""What `meshwright show CHIP` says of a GPU's inside: its SMs, the die they are cut from, the rates that follow."""

from collections.abc import Iterator
from typing import Any

from meshwright.calculators.chips import anatomy
from meshwright.cli.output import or_dash
from meshwright.core.units import format_bytes, format_flops
from meshwright.report.answer import Fact, Piece, Table
from meshwright.spec.chip import Chip, vector_peak_from_anatomy


def gpu_facts(c: Chip, dtype: str | None) -> dict[str, Any] | None:
    """SMs and what they hold, of the chip and of its whole die, and the peaks they give; None without SMs."""
    sold, die = anatomy.gpu_anatomy(c), anatomy.full_die(c)
    if sold is None:
        return None
    per_sm = sold.tensor_flops_per_sm_cycle
    fp32, clocked = c.peak_flops.get("fp32"), c.clock_hz is not None
    over = anatomy.ratio(c.peak_flops[dtype], fp32) if dtype and fp32 and per_sm else None
    return {
        "sold": _units(sold),
        "die": None if die is None else _units(die),
        "sms_used": None if die is None else anatomy.ratio(sold.num_sms, die.num_sms),
        "tensor_over_fp32_a_cycle": anatomy.ratio(per_sm, sold.vector_flops_per_sm_cycle) if per_sm else None,
        "tensor_over_fp32_peak": over,
        "time_of_one_percent_on_fp32": anatomy.share_after_speedup(0.01, over) if over else None,
        "peak_flops_from_anatomy": anatomy.gpu_peak_from_anatomy(c) if per_sm and clocked else None,
        "fp32_flops_from_anatomy": vector_peak_from_anatomy(c) if clocked else None,
    }


def _units(unit: anatomy.GpuAnatomy) -> dict[str, Any]:
    return {
        "name": unit.name,
        "tpcs": unit.num_tpcs,
        "sms": unit.num_sms,
        "fp32_lanes": unit.num_fp32_lanes,
        "tensor_cores": unit.num_tensor_cores,
        "fp32_flops_per_sm_cycle": unit.vector_flops_per_sm_cycle,
        "tensor_flops_per_sm_cycle": unit.tensor_flops_per_sm_cycle,
        "l2_bytes": unit.l2_bytes,
    }


def gpu_text(c: Chip, g: dict[str, Any], dtype: str | None) -> Iterator[Piece]:
    """What the GPU is made of beside its whole die, then the rates that follow from it."""
    sold, die = g["sold"], g["die"] or {}
    shown = (("TPCs", "tpcs", str), ("SMs", "sms", str), ("FP32 lanes (CUDA cores)", "fp32_lanes", "{:,}".format),
             ("tensor cores", "tensor_cores", "{:,}".format), ("L2 cache", "l2_bytes", format_bytes))  # fmt: skip
    columns = ["", c.name, *([f"whole {die['name']}"] if die else [])]
    rows = [
        [words, or_dash(sold[key] or None, show), *([or_dash(die[key] or None, show)] if die else [])]
        for words, key, show in shown
        if sold[key]
    ]
    title = "Inside the GPU"
    if g["sms_used"] is not None:
        title += f": {g['sms_used']:.0%} of the die's SMs are switched on (floor sweeping)"
    yield ""
    yield Table(columns, rows, title)
    for label, text in _sentences(c, g, dtype):
        yield Fact(label, text)


def _sentences(c: Chip, g: dict[str, Any], dtype: str | None) -> list[tuple[str, str]]:
    sold, lines = g["sold"], []
    each, lanes = sold["tensor_flops_per_sm_cycle"], sold["fp32_flops_per_sm_cycle"]
    if each:
        lines.append(
            ("an SM, a cycle", f"{each:,} FLOPs in its tensor cores, {lanes:,} in its FP32 lanes: "
             f"{g['tensor_over_fp32_a_cycle']:.3g} times as many"),
        )  # fmt: skip
    for label, derived, listed in (
        ("peak from these", g["peak_flops_from_anatomy"], c.peak_flops.get(dtype or "")),
        ("FP32 from these", g["fp32_flops_from_anatomy"], c.peak_flops.get("fp32")),
    ):
        if derived and listed:
            lines.append((label, f"{format_flops(derived)} at {(c.clock_hz or 0) / 1e9:.3g} GHz; the data sheet says "
                          f"{format_flops(listed)}{_off(listed / derived)}"))  # fmt: skip
    if g["tensor_over_fp32_peak"]:
        times, share = g["tensor_over_fp32_peak"], g["time_of_one_percent_on_fp32"]
        lines.append(
            ("beside products", f"tensor cores have {times:.3g} times the FP32 rate of the data sheet: 1% of the FLOPs "
             f"on FP32 lanes takes {share:.0%} of the time")
        )  # fmt: skip
    return lines


def _off(times: float) -> str:
    """How far one figure is from another, where that shows."""
    return f" ({times - 1:+.1%})" if abs(times - 1) >= 5e-4 else ""
