"""The answer of `meshwright show CLUSTER`: sums over its chips, and the least batches that its links allow."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from meshwright.cli.output import format_energy, format_power
from meshwright.cli.verbs.show_chip import known_rows, product_dtype
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_count, format_flops, format_params, format_rate
from meshwright.cost.formulas import anatomy, limits
from meshwright.cost.formulas.training_budget import DAY_S, energy_kwh
from meshwright.cost.network.collectives import collective_time, group_rates
from meshwright.cost.network.links import physical_links, torus_width
from meshwright.cost.network.placement import physical_placement
from meshwright.report.answer import Answer, Facts, Piece, Show, Table
from meshwright.spec.cluster import Cluster, bisection_links

LEVELS: Facts = {
    "level": "name",
    "size": "size",
    "chips inside": "chips",
    "a chip, one way": "bytes_per_s",
    "a hop": "hop_s",
}
SLICES: Facts = {
    "cluster": "cluster",
    "rings": "rings",
    "links across": "bisection_links",
    "one way": "bisection_bytes_per_s",
    "AllToAll of 1 GB a chip": "all_to_all_s",
}


def clusters_answer(clusters: Sequence[Cluster]) -> Answer:
    """Returns one cluster as a table; or every shape of a number of chips, with the links that bind."""
    first_cluster = clusters[0]
    if len(clusters) > 1:
        rows = [slice_facts(c) for c in clusters]
        title = f"{first_cluster.num_chips:,} {first_cluster.chip.name}, most links across the middle first"
        return Answer({"slices": rows}, [Table.of(rows, SLICES, title)])
    facts = cluster_facts(first_cluster)
    pieces: list[Piece] = [Table(["", first_cluster.short_name, ""], _rows(first_cluster, facts))]
    if facts["levels"] and len(facts["levels"]) > 1:
        pieces += ["", Table.of(facts["levels"], LEVELS, "Levels")]
    return Answer(facts, pieces, raw=[[facts], facts["levels"]])


def slice_facts(c: Cluster) -> Facts:
    """Returns rings, links across the middle of one slice, and the seconds in which its chips exchange 1 GB each."""
    placement = physical_placement(c)
    link_names = [link.name for link in placement.links if link.level == "ici"]
    rates = group_rates(placement, link_names)
    return {
        "cluster": c.short_name,
        "rings": sum(c.wraps),
        "bisection_links": bisection_links(c),
        "bisection_bytes_per_s": bisection_links(c) * (c.chip.ici_link_bytes_per_s or 0.0),
        "all_to_all_s": collective_time("all_to_all", 1e9 * rates.size, rates),
    }


def cluster_levels(c: Cluster) -> list[Facts] | None:
    """Returns the levels of a switched cluster, innermost first; None for another kind or where a rate is not known."""
    if c.kind != "switched":
        return None
    try:
        links = physical_links(c)
    except InputError:
        return None
    chip_counts = itertools.accumulate(c.shape, operator.mul)
    return [
        {
            "name": link.name,
            "size": link.size,
            "chips": num_chips,
            "bytes_per_s": link.bytes_per_s if link.size > 1 else None,
            "hop_s": link.hop_s,
        }
        for link, num_chips in zip(links, chip_counts, strict=True)
    ]


def cluster_facts(c: Cluster) -> Facts:
    """Returns sums over the chips, and the least batches; None or left out where the chip's figures are not known."""
    chip, dtype = c.chip, product_dtype(c.chip)
    total_by_name: Facts = {"num_chips": c.num_chips, "num_hosts": c.num_hosts}
    if dtype:
        total_by_name = anatomy.pod_totals(c, dtype=dtype)
    facts: Facts = {
        "cluster": c.short_name,
        "chip": chip.name,
        "kind": c.kind,
        "shape": list(c.shape),
        "num_slices": c.num_slices,
        "wraps": list(c.wraps) if c.kind == "torus" else None,
        "twisted": c.twisted if c.kind == "torus" else None,
        "num_islands": c.num_islands,
        "island_bytes_per_s": c.island_bytes_per_s,
        "levels": cluster_levels(c.island),
        "compute_dtype": dtype,
        **total_by_name,
    }
    watts, peak, torus, host_chips = chip.power_w, dtype and chip.peak_flops[dtype], torus_width(c), chip.chips_per_host
    # tokens a step (of a slice) from which plain data parallelism is not bound by the network
    fsdp_tokens = dcn_tokens = None
    if peak and torus:
        alpha = limits.ici_intensity(peak, torus.bytes_per_s)
        fsdp_tokens = limits.data_parallel_min_batch(alpha, sum(torus.axes), c.island.num_chips // c.num_slices)
    if peak and chip.dcn_bytes_per_s_per_host and host_chips:
        dcn_tokens = limits.dcn_min_batch_per_pod(peak, chip.dcn_bytes_per_s_per_host, host_chips)
    return {
        **facts,
        "energy_kwh_per_day": watts and energy_kwh(DAY_S, num_chips=c.num_chips, watts_per_chip=watts),
        "fsdp_min_batch_tokens": fsdp_tokens,
        "width": torus and torus.words,
        "dcn_min_batch_tokens_per_slice": dcn_tokens,
    }


def _rows(c: Cluster, facts: Facts) -> list[list[Any]]:
    """Returns rows of label, value and source."""
    figures: tuple[tuple[str, str, Show, str], ...] = (
        ("chips", "num_chips", "{:,}".format, ""),
        ("hosts", "num_hosts", "{:,}".format, ""),
        ("cores", "num_cores", "{:,}".format, ""),
        ("FP32 lanes", "num_fp32_lanes", _millions, ""),
        ("tensor cores", "num_tensor_cores", _millions, ""),
        ("memory", "hbm_bytes", format_bytes, ""),
        ("FLOP/s", "peak_flops", format_flops, f"dense {facts['compute_dtype']}"),
        ("uplink of an island", "island_bytes_per_s", format_rate, f"one way, of {c.num_islands} islands"),
        ("DCN of all hosts", "dcn_bytes_per_s", format_rate, ""),
        ("power", "power_w", format_power, "the chips alone"),
        ("energy of a day", "energy_kwh_per_day", format_energy, "at that power"),
        ("price of an hour", "price_usd_per_hour", lambda v: f"${v:,.2f}" if v < 100 else f"${v:,.0f}", ""),
        ("least batch, FSDP", "fsdp_min_batch_tokens", lambda v: f"{format_count(v)} tokens",
         f"alpha / axes x chips, W {str(facts['width']).split(',')[0]}"),
        ("least batch over DCN", "dcn_min_batch_tokens_per_slice", lambda v: f"{format_count(v)} tokens",
         "peak x host chips / DCN"),
    )  # fmt: skip
    rows = [["kind", c.kind, ""]]
    if c.kind == "torus":
        rings_text = ", ".join(f"{n} {'ring' if w else 'line'}" for n, w in zip(c.shape, c.wraps, strict=True) if n > 1)
        closed_text = "ring: wraps around" if any(c.wraps) else ""
        rows.append(["axes", rings_text or "one chip", f"{closed_text}, twisted" if c.twisted else closed_text])
    return rows + known_rows(facts, figures)


def _millions(num_units: int) -> str:
    """Returns a number of units: exact below a million, ``"415 M"`` from there."""
    return f"{num_units:,}" if num_units < 1e6 else format_params(num_units)
