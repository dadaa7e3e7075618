"""The answer of `meshwright show CHIP`: its figures with their sources, and figures that follow from them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from meshwright.cli.output import or_dash
from meshwright.core.dims import DTYPE_BYTES
from meshwright.core.units import counted, format_bytes, format_flops, format_params, format_rate, format_seconds
from meshwright.cost.formulas import accounting, anatomy, limits, roofline
from meshwright.cost.formulas.roofline import vector_peak
from meshwright.cost.network import collectives as network
from meshwright.report.answer import Answer, Detail, Fact, Facts, Paragraph, Piece, PlainPiece, Show, Table
from meshwright.spec.chip import PAID_FOR, Chip
from meshwright.spec.efficiency import family, fitted_calibration, power_notes
from meshwright.spec.strategy import STATE_BYTES

MAX_DERIVED = 9
"""Figures that follow, of which a text lists so many without --all."""


def chip_answer(c: Chip) -> Answer:
    """Returns one chip as two tables: figures of the catalogue, then what follows from them."""
    facts = chip_facts(c)
    return Answer(facts, _text(c, facts), raw=[[facts]])


def _text(c: Chip, facts: Facts) -> Iterator[Piece]:
    yield from _figures_text(c)
    rows = _derived_rows(c, facts)
    if c.mxu_dim and c.mxus_per_core and c.num_cores and c.clock_hz:
        mxu_rate = anatomy.mxu_flops_per_cycle(c.mxu_dim) * c.clock_hz
        rows.append(["one MXU", format_flops(mxu_rate), f"{c.mxu_dim} x {c.mxu_dim} at {c.clock_hz / 1e9:g} GHz"])
        formula_text = f"{counted(c.num_cores, 'core')} x {counted(c.mxus_per_core, 'MXU')}"
        rows.append(["all MXUs", format_flops(anatomy.tpu_peak_from_anatomy(c)), formula_text])
    if rows:
        links_text = "link: one way; W: a torus axis, both ways" if c.topology == "torus" else "link: one way"
        yield Table(
            ["", "", "formula"], rows, f"What follows, {facts['compute_dtype']} products ({links_text})", MAX_DERIVED
        )
    if facts["gpu"]:
        yield Detail("inside the GPU", [*_gpu_text(c, facts["gpu"], facts["compute_dtype"])])
    if facts["max_params"]:
        states_text = ", ".join(f"{state} {format_params(size)}" for state, size in facts["max_params"].items())
        text = f"whose training state fills one chip, in parameters: {states_text}"
        yield Detail("largest model", [Fact("largest model", text)])


def chip_facts(c: Chip) -> Facts:
    """Returns every figure of a chip and those that follow; None for those that need an unknown figure."""
    dtype = product_dtype(c)
    peak_rate = c.peak_flops[dtype] if dtype else None
    link_rate, hop_s = _link(c)
    alpha = _over(limits.ici_intensity, peak_rate, c.ici_axis_bytes_per_s)
    mem_bytes = c.memory_bytes
    return {
        **msgspec.structs.asdict(c),
        "dcn_bytes_per_s": c.dcn_bytes_per_s,
        "compute_dtype": dtype,
        "critical_intensity": _over(roofline.critical_intensity, peak_rate, c.hbm_bytes_per_s),
        "critical_batch": _critical_batches(c, dtype),
        "critical_batch_pcie": _over(roofline.critical_batch, peak_rate, c.pcie_bytes_per_s),
        "critical_split_dim": _over(roofline.critical_split_dim, peak_rate, link_rate),
        "ici_intensity": alpha,
        "reduce_after_min_dim": None if alpha is None else limits.reduce_after_min_dim(alpha),
        "int8_over_bf16": _over(anatomy.ratio, c.peak_flops.get("int8"), c.peak_flops.get("bf16")),
        "link_bytes_per_s": link_rate,
        "memory_over_link": _over(anatomy.ratio, c.hbm_bytes_per_s, link_rate),
        "latency_bound_bytes": None if link_rate is None else network.latency_bound_bytes(link_rate, hop_s=hop_s),
        "gpu": _gpu_facts(c, dtype),
        "max_params": {} if mem_bytes is None else {s: accounting.max_params(mem_bytes, state=s) for s in STATE_BYTES},
    }


def product_dtype(c: Chip) -> str | None:
    """Returns the dtype of products in figures: bf16, else fp16, else the first of its table; None without one."""
    return next((d for d in ("bf16", "fp16", *c.peak_flops) if d in c.peak_flops), None)


def _over(formula: Any, above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else formula(above, below)


def _link(c: Chip) -> tuple[float | None, float]:
    """Returns the one-way bytes/s (None if not known) and the seconds of a hop of its fastest link to another chip."""
    if c.topology == "torus":
        return c.ici_link_bytes_per_s, c.ici_hop_s
    return c.nvlink_bytes_per_s, c.nvlink_hop_s


def _critical_batches(c: Chip, dtype: str | None) -> dict[str, float]:
    """Returns tokens from which [B,D] x [D,F] is compute-bound, for B far below D and F, by both arrays' dtypes."""
    if dtype is None or c.hbm_bytes_per_s is None:
        return {}
    dtype_pairs = [(dtype, dtype), *([("int8", dtype)] if DTYPE_BYTES[dtype] > 1 else [])]
    dtype_pairs += [("int8", "int8")] if "int8" in c.peak_flops else []
    return {
        f"{math_dtype} x {weight_dtype}": roofline.critical_batch(
            c.peak_flops[math_dtype], c.hbm_bytes_per_s, weight_bytes=DTYPE_BYTES[weight_dtype]
        )
        for weight_dtype, math_dtype in dtype_pairs
    }


# -- text -----------------------------------------------------------------------------------------------


_FIGURES: tuple[tuple[str, str, Any], ...] = (
    ("memory", "hbm_bytes", format_bytes),
    ("memory that programs may fill", "usable_hbm_bytes", format_bytes),
    ("memory rate", "hbm_bytes_per_s", format_rate),
    ("on-chip memory (VMEM)", "vmem_bytes", format_bytes),
    ("on-chip memory rate", "vmem_bytes_per_s", format_rate),
    ("L2 cache", "l2_bytes", format_bytes),
    ("L2 rate", "l2_bytes_per_s", format_rate),
    ("L1 and shared memory of an SM", "l1_bytes_per_sm", format_bytes),
    ("registers of an SM", "register_bytes_per_sm", format_bytes),
    ("ICI link, one way", "ici_link_bytes_per_s", format_rate),
    ("ICI axes", "num_ici_axes", str),
    ("NVLink or its like, one way", "nvlink_bytes_per_s", format_rate),
    ("chips of a domain", "domain_chips", str),
    ("chips of a pod", "max_chips", "{:,}".format),
    ("network, one way", "nic_bytes_per_s", format_rate),
    ("DCN of a host", "dcn_bytes_per_s_per_host", format_rate),
    ("chips of a host", "chips_per_host", str),
    ("host link, one way", "pcie_bytes_per_s", format_rate),
    ("power", "power_w", lambda v: f"{v:g} W"),
    ("price of an hour", "price_usd_per_hour", lambda v: f"${v:g}"),
    ("cores", "num_cores", str),
    ("MXUs of a core", "mxus_per_core", str),
    ("cells of an MXU", "mxu_dim", lambda v: f"{v} x {v}"),
    ("VPU lanes of a core", "vpu_lanes_per_core", "{:,}".format),
    ("ALUs of a VPU lane", "vpu_alus_per_lane", str),
    ("clock", "clock_hz", lambda v: f"{v / 1e9:.4g} GHz"),
)


def _figures_text(c: Chip) -> Iterator[Piece]:
    sources: list[str] = []

    def note(source: str) -> str:
        if source and source not in sources:
            sources.append(source)
        return f"{sources.index(source) + 1}" if source else ""

    usual_source = c.sources.get("peak_flops", "")
    rows: list[list[Any]] = [
        [f"{dtype}, dense", format_flops(flops), note(c.sources.get(f"peak_flops.{dtype}", usual_source))]
        for dtype, flops in c.peak_flops.items()
    ]
    for row_name, field, show in _FIGURES:
        figure = getattr(c, field)
        if figure is not None:
            rows.append([row_name, show(figure), note(c.sources.get(field, ""))])
    yield Table(["", c.name, "source"], rows, c.full_name)
    if c.variant == "custom":
        if missing_fields := [name for name in PAID_FOR if getattr(c, name) is None]:
            base_text = " (the base's figures are of other hardware)" if c.base else ""
            yield Paragraph(f"not known: {', '.join(missing_fields)}{base_text}", indent=4)
        label = family(c)
        yield Paragraph(f"times: {f'fitted numbers of {label}' if label else 'rates of the data sheet'}", indent=4)
        yield from (Paragraph(note, indent=4) for note in power_notes(c, fitted_calibration(c)))
    lines = [Paragraph(f"{source_number:>2}  {source}", indent=4) for source_number, source in enumerate(sources, 1)]
    yield Detail(counted(len(lines), "source"), lines)


def known_rows(facts: Mapping[str, Any], table: Iterable[tuple[str, str, Show, str]]) -> list[list[Any]]:
    """Returns (words, value, source) of the known facts; ``table`` has (words, key, format, source)."""
    return [[label, show(facts[field]), source] for label, field, show, source in table if facts.get(field) is not None]


def _derived_rows(c: Chip, facts: Facts) -> list[list[Any]]:
    """Returns rows of label, value and formula."""
    batch_rows = []
    for name in facts["critical_batch"]:
        math_dtype, weight_dtype = name.split(" x ")
        formula = f"{'int8 ' * (math_dtype == 'int8')}peak / memory rate{' / 2' * (DTYPE_BYTES[weight_dtype] == 1)}"
        batch_rows.append((f"least batch, {name}", name, "{:.4g} tokens".format, formula))
    figures: tuple[tuple[str, str, Show, str], ...] = (
        ("critical intensity", "critical_intensity", "{:.4g} FLOPs/byte".format, "peak / memory rate"),
        *batch_rows,
        ("least batch, weights from host", "critical_batch_pcie", "{:,.0f} tokens".format, "peak / host link"),
        ("FSDP on one ICI axis, from", "ici_intensity", "{:,.0f} tokens a chip".format, "alpha = peak / W"),
        ("slice and sum, no gather, from", "reduce_after_min_dim", "D = {:,.0f}".format, "2 alpha"),
        ("split in two along D, from", "critical_split_dim", "D = {:,.0f}".format, "2 peak / link"),
        (
            "bound by latency",
            "latency_bound_bytes",
            lambda v: f"transfers < {format_bytes(v)}",
            f"link x {format_seconds(_link(c)[1])}",
        ),
        ("int8 over bf16 peak", "int8_over_bf16", "{:.3g} times".format, ""),
        ("memory over link rate", "memory_over_link", "{:.3g} times".format, "memory rate / link"),
        ("DCN of a chip", "dcn_bytes_per_s", format_rate, "of a host / its chips"),
    )
    return known_rows(facts | facts["critical_batch"], figures)


# -- the inside of a GPU --------------------------------------------------------------------------------


UNITS: tuple[tuple[str, str, Show], ...] = (
    ("TPCs", "tpcs", str),
    ("SMs", "sms", str),
    ("FP32 lanes (CUDA cores)", "fp32_lanes", "{:,}".format),
    ("tensor cores", "tensor_cores", "{:,}".format),
    ("L2 cache", "l2_bytes", format_bytes),
)


def _gpu_facts(c: Chip, dtype: str | None) -> Facts | None:
    """Returns the parts of the chip and of its whole die, and the peaks that follow; None without SMs."""
    sold_chip, die = anatomy.gpu_anatomy(c), anatomy.full_die(c)
    if sold_chip is None:
        return None
    sm_flops = sold_chip.tensor_flops_per_sm_cycle
    fp32_peak, has_clock = c.peak_flops.get("fp32"), c.clock_hz is not None
    peak_ratio = anatomy.ratio(c.peak_flops[dtype], fp32_peak) if dtype and fp32_peak and sm_flops else None
    return {
        "sold": sold_chip,
        "die": die,
        "sms_used": anatomy.ratio(sold_chip.sms, die.sms) if die else None,
        "tensor_over_fp32_a_cycle": anatomy.ratio(sm_flops, sold_chip.fp32_flops_per_sm_cycle) if sm_flops else None,
        "tensor_over_fp32_peak": peak_ratio,
        "time_of_one_percent_on_fp32": anatomy.share_after_speedup(0.01, peak_ratio) if peak_ratio else None,
        "peak_flops_from_anatomy": anatomy.gpu_peak_from_anatomy(c) if sm_flops and has_clock else None,
        "fp32_flops_from_anatomy": vector_peak(c) if has_clock else None,
    }


def _gpu_text(c: Chip, gpu: Facts, dtype: str | None) -> Iterator[PlainPiece]:
    """Yields the parts of the GPU beside its whole die, then the rates that follow from them."""
    sold_chip, die = gpu["sold"], gpu["die"]
    gpus = [sold_chip, die] if die else [sold_chip]
    rows = [
        [label, *(or_dash(getattr(one_gpu, field) or None, show) for one_gpu in gpus)]
        for label, field, show in UNITS
        if getattr(sold_chip, field)
    ]
    title = "Inside the GPU"
    if gpu["sms_used"] is not None:
        title += f": {gpu['sms_used']:.0%} of the die's SMs are switched on (floor sweeping)"
    yield ""
    yield Table(["", c.name, *([f"whole {die.name}"] if die else [])], rows, title)
    if sold_chip.tensor_flops_per_sm_cycle:
        in_cores, in_lanes = sold_chip.tensor_flops_per_sm_cycle, sold_chip.fp32_flops_per_sm_cycle
        ratio = f"{gpu['tensor_over_fp32_a_cycle']:.3g} times as many"
        yield Fact("an SM, a cycle", f"{in_cores:,} FLOPs in its tensor cores, {in_lanes:,} in its FP32 lanes: {ratio}")
    yield from _peak_text("peak from these", gpu["peak_flops_from_anatomy"], c.peak_flops.get(dtype or ""), c.clock_hz)
    yield from _peak_text("FP32 from these", gpu["fp32_flops_from_anatomy"], c.peak_flops.get("fp32"), c.clock_hz)
    if gpu["tensor_over_fp32_peak"]:
        yield Fact(
            "beside products",
            f"tensor cores have {gpu['tensor_over_fp32_peak']:.3g} times the FP32 rate of the data sheet: 1% of the "
            f"FLOPs on FP32 lanes takes {gpu['time_of_one_percent_on_fp32']:.0%} of the time",
        )


def _peak_text(label: str, our_rate: float | None, sheet_rate: float | None, clock_hz: float | None) -> Iterator[Fact]:
    """Yields a peak that follows from units and clock beside the data sheet's, and the difference if it shows."""
    if our_rate and sheet_rate and clock_hz:
        difference = sheet_rate / our_rate - 1
        difference_text = f" ({difference:+.1%})" if abs(difference) >= 5e-4 else ""
        sheet_text = f"the data sheet says {format_flops(sheet_rate)}{difference_text}"
        yield Fact(label, f"{format_flops(our_rate)} at {clock_hz / 1e9:.3g} GHz; {sheet_text}")
