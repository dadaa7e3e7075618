"""What `meshwright show CLUSTER` prints: its sums, and the least batches that its links allow."""

from typing import Any

import msgspec

from meshwright.cli.output import emit_json, format_energy, format_power, print_table
from meshwright.cli.show_chip import product_dtype
from meshwright.core.units import format_bytes, format_count, format_flops
from meshwright.cost import anatomy, limits
from meshwright.cost.training_budget import DAY_S, energy_kwh
from meshwright.spec.cluster import Cluster


def print_cluster(c: Cluster, as_json: bool) -> None:
    """One cluster as one JSON object or as a table."""
    facts = cluster_facts(c)
    if as_json:
        emit_json(facts)
    else:
        print_table(["", c.short_name, ""], _rows(c, facts))


def cluster_facts(c: Cluster) -> dict[str, Any]:
    """Sums over the chips, and the least batches; None or left out where the chip's figures are not known."""
    unit, dtype = c.chip, product_dtype(c.chip)
    totals: dict[str, Any] = {"num_chips": c.num_chips, "num_hosts": c.num_hosts}
    if dtype:
        totals = msgspec.structs.asdict(anatomy.pod_totals(c, dtype=dtype))
    facts: dict[str, Any] = {
        "cluster": c.short_name,
        "chip": unit.name,
        "kind": c.kind,
        "shape": list(c.shape),
        "num_slices": c.num_slices,
        "wraps": list(c.wraps) if c.kind == "torus" else None,
        "compute_dtype": dtype,
        **totals,
    }
    watts = unit.power_w
    energy = None if watts is None else energy_kwh(DAY_S, num_chips=c.num_chips, watts_per_chip=watts)
    peak = unit.peak_flops[dtype] if dtype else None
    return {**facts, "energy_kwh_per_day": energy, **_least_batches(c, peak)}


def _least_batches(c: Cluster, peak: float | None) -> dict[str, float | None]:
    """Tokens a step (of a slice) from which plain data parallelism is not bound by the network."""
    unit, chips = c.chip, c.num_chips // c.num_slices
    fsdp = over_dcn = None
    if peak and unit.ici_axis_bytes_per_s and chips > 1:
        alpha = limits.ici_intensity(peak, unit.ici_axis_bytes_per_s)
        fsdp = limits.data_parallel_min_batch(alpha, sum(size > 1 for size in c.shape), chips)
    if peak and unit.dcn_bytes_per_s_per_host and unit.chips_per_host:
        over_dcn = limits.dcn_min_batch_per_pod(peak, unit.dcn_bytes_per_s_per_host, unit.chips_per_host)
    return {"fsdp_min_batch_tokens": fsdp, "dcn_min_batch_tokens_per_slice": over_dcn}


def _rows(c: Cluster, facts: dict[str, Any]) -> list[list[Any]]:
    """Label, value, and where the value comes from."""
    show: tuple[tuple[str, str, Any, str], ...] = (
        ("chips", "num_chips", "{:,}".format, ""),
        ("hosts", "num_hosts", "{:,}".format, ""),
        ("cores", "num_cores", "{:,}".format, ""),
        ("memory", "hbm_bytes", format_bytes, ""),
        ("FLOP/s", "peak_flops", format_flops, f"dense {facts['compute_dtype']}"),
        ("DCN of all hosts", "dcn_bytes_per_s", lambda v: f"{format_bytes(v)}/s", ""),
        ("power", "power_w", format_power, "the chips alone"),
        ("energy of a day", "energy_kwh_per_day", format_energy, "at that power"),
        ("price of an hour", "price_usd_per_hour", lambda v: f"${v:,.2f}" if v < 100 else f"${v:,.0f}", ""),
        ("least batch, FSDP", "fsdp_min_batch_tokens", lambda v: f"{format_count(v)} tokens",
         "alpha / axes x chips"),
        ("least batch over DCN", "dcn_min_batch_tokens_per_slice", lambda v: f"{format_count(v)} tokens",
         "peak x host chips / DCN"),
    )  # fmt: skip
    rows = [["kind", c.kind, ""]]
    if c.kind == "torus":
        rings = ", ".join(f"{n} {'ring' if w else 'line'}" for n, w in zip(c.shape, c.wraps, strict=True) if n > 1)
        rows.append(["axes", rings or "one chip", "ring: wraps around" if any(c.wraps) else ""])
    return rows + [[words, fmt(facts[key]), source] for words, key, fmt, source in show if facts.get(key) is not None]
