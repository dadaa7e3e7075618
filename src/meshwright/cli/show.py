"""`meshwright show`: the catalogues, and what follows from one entry of them."""

from pathlib import Path
from textwrap import fill
from typing import Any

import click
import msgspec

from meshwright.cli.output import emit_json, json_option, or_dash, print_table, width
from meshwright.core.errors import InputError, nearest
from meshwright.core.units import format_bytes, format_count, format_flops, format_params
from meshwright.cost import accounting, anatomy, limits, roofline
from meshwright.spec.catalogue import entry, model, models
from meshwright.spec.chip import Chip, chip, chips
from meshwright.spec.cluster import Cluster, parse_cluster
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES
from meshwright.spec.weights import num_active_params, num_params, params_by_part, weight_table


@click.command()
@click.argument("thing")
@json_option
def command(thing: str, as_json: bool) -> None:
    """THING is: models, chips, a model (name or config.json), a chip, or a cluster such as v5p:16x20x28."""
    if thing == "models":
        _models(as_json)
    elif thing == "chips":
        _chips(as_json)
    elif ":" in thing or thing.endswith(".toml"):
        _cluster(parse_cluster(thing), as_json)
    elif thing in _chip_names():
        _chip(chip(thing), as_json)
    elif thing in models() or Path(thing).exists() or "/" in thing or thing.endswith(".json"):
        _model(model(thing), as_json)
    else:
        options = ("models", "chips", *models(), *_chip_names())
        hint = nearest(thing, options) or " Try meshwright show models, or meshwright show chips."
        raise InputError(f"{thing!r} is no model, chip or cluster.{hint}")


def _chip_names() -> tuple[str, ...]:
    return tuple(name for c in chips().values() for name in (c.name, *c.aliases))


# -- the catalogues ------------------------------------------------------------------------------------


def _models(as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for name in models():
        m = model(name)
        rows.append(
            {
                "name": name,
                "family": m.family,
                "params": num_params(m),
                "active_params": num_active_params(m),
                "layers": m.num_layers,
                "d_model": m.d_model,
                "runs": m.runs_here,
            }
        )
    if as_json:
        emit_json({"models": rows})
        return
    print_table(
        ["model", "family", "params", "active", "L", "D", "runs here"],
        [
            [r["name"], r["family"], format_params(r["params"]), format_params(r["active_params"]), r["layers"],
             r["d_model"], "yes" if r["runs"] else "counted"]
            for r in rows
        ],
    )  # fmt: skip


def _chips(as_json: bool) -> None:
    entries = list(chips().values())
    if as_json:
        emit_json({"chips": [_chip_facts(c) for c in entries]})
        return
    rows = [
        [
            c.name,
            or_dash(c.peak_flops.get("bf16"), format_flops),
            or_dash(c.hbm_bytes, format_bytes),
            or_dash(c.hbm_bytes_per_s, lambda v: f"{format_bytes(v)}/s"),
            or_dash(c.ici_link_bytes_per_s or c.nvlink_bytes_per_s, lambda v: f"{format_bytes(v)}/s"),
            c.variant,
        ]
        for c in entries
    ]
    print_table(["chip", "bf16, dense", "memory", "memory rate", "link, one way", "figures"], rows)


# -- one chip -------------------------------------------------------------------------------------------


def _chip_facts(c: Chip) -> dict[str, Any]:
    facts = msgspec.structs.asdict(c)
    facts["critical_intensity"] = _intensity(c, c.hbm_bytes_per_s)
    facts["ici_intensity"] = _intensity(c, c.ici_axis_bytes_per_s)
    facts["dcn_bytes_per_s"] = c.dcn_bytes_per_s
    return facts


def _intensity(c: Chip, bytes_per_s: float | None) -> float | None:
    bf16 = c.peak_flops.get("bf16")
    return roofline.critical_intensity(bf16, bytes_per_s) if bf16 and bytes_per_s else None


_CHIP_ROWS: tuple[tuple[str, str, Any], ...] = (
    ("memory", "hbm_bytes", format_bytes),
    ("memory that programs may fill", "usable_hbm_bytes", format_bytes),
    ("memory rate", "hbm_bytes_per_s", lambda v: f"{format_bytes(v)}/s"),
    ("on-chip memory rate", "vmem_bytes_per_s", lambda v: f"{format_bytes(v)}/s"),
    ("ICI link, one way", "ici_link_bytes_per_s", lambda v: f"{format_bytes(v)}/s"),
    ("ICI axes", "num_ici_axes", str),
    ("NVLink or its like, one way", "nvlink_bytes_per_s", lambda v: f"{format_bytes(v)}/s"),
    ("chips of a domain", "domain_chips", str),
    ("network, one way", "nic_bytes_per_s", lambda v: f"{format_bytes(v)}/s"),
    ("DCN of a host", "dcn_bytes_per_s_per_host", lambda v: f"{format_bytes(v)}/s"),
    ("DCN of a chip", "dcn_bytes_per_s", lambda v: f"{format_bytes(v)}/s"),
    ("chips of a host", "chips_per_host", str),
    ("PCIe", "pcie_bytes_per_s", lambda v: f"{format_bytes(v)}/s"),
    ("power", "power_w", lambda v: f"{v:g} W"),
    ("price of an hour", "price_usd_per_hour", lambda v: f"${v:g}"),
    ("FLOPs/byte at which memory stops binding", "critical_intensity", lambda v: f"{v:.4g}"),
    ("tokens/chip for data parallelism on one ICI axis", "ici_intensity", lambda v: f"{v:.4g}"),
)
_SOURCE_OF = {"critical_intensity": "bf16 peak / memory rate", "ici_intensity": "bf16 peak / two-way ICI axis",
              "dcn_bytes_per_s": "DCN of a host / chips of a host"}  # fmt: skip


def _chip(c: Chip, as_json: bool) -> None:
    facts = _chip_facts(c)
    if as_json:
        emit_json(facts)
        return
    notes: list[str] = []

    def note(source: str) -> str:
        if source and source not in notes:
            notes.append(source)
        return f"{notes.index(source) + 1}" if source else ""

    rows: list[list[Any]] = [
        [f"{dtype}, dense", format_flops(flops), note(c.sources.get(f"peak_flops.{dtype}", c.sources["peak_flops"]))]
        for dtype, flops in c.peak_flops.items()
    ]
    for words, key, show in _CHIP_ROWS:
        if facts[key] is not None:
            rows.append([words, show(facts[key]), note(_SOURCE_OF.get(key, c.sources.get(key, "")))])
    rows += [[words, value, note(source)] for words, value, source in _anatomy_rows(c)]
    print_table(["", c.name, "source"], rows, c.full_name)
    for number, source in enumerate(notes, 1):
        click.echo(fill(f"{number}  {source}", width(), subsequent_indent="   "))


def _anatomy_rows(c: Chip) -> list[list[Any]]:
    rows: list[list[Any]] = []
    if c.mxu_dim and c.mxus_per_core and c.num_cores and c.clock_hz:
        each = anatomy.units_flops_per_s(1, anatomy.mxu_flops_per_cycle(c.mxu_dim), c.clock_hz)
        rows.append(["one MXU", format_flops(each), f"{c.mxu_dim} x {c.mxu_dim} at {c.clock_hz / 1e9:g} GHz"])
        what = f"{c.num_cores} cores x {c.mxus_per_core} MXUs"
        rows.append(["all MXUs", format_flops(anatomy.tpu_peak_from_anatomy(c)), what])
    if c.num_sms and c.tensor_cores_per_sm:
        rows.append(["tensor cores", f"{c.num_sms * c.tensor_cores_per_sm:,}", f"{c.num_sms} SMs"])
    if c.num_sms and c.fp32_lanes_per_sm:
        rows.append(["FP32 lanes", f"{c.num_sms * c.fp32_lanes_per_sm:,}", f"{c.fp32_lanes_per_sm} a SM"])
    return rows


# -- one cluster ----------------------------------------------------------------------------------------


def _cluster(c: Cluster, as_json: bool) -> None:
    unit = c.chip
    totals: dict[str, Any] = {"num_chips": c.num_chips, "num_hosts": c.num_hosts}
    if unit.peak_flops:
        dtype = "bf16" if "bf16" in unit.peak_flops else next(iter(unit.peak_flops))
        totals = msgspec.structs.asdict(anatomy.pod_totals(c, dtype=dtype))
    facts: dict[str, Any] = {
        "cluster": c.short_name,
        "chip": unit.name,
        "kind": c.kind,
        "shape": list(c.shape),
        "num_slices": c.num_slices,
        "wraps": list(c.wraps) if c.kind == "torus" else None,
        **totals,
    }
    if unit.peak_flops.get("bf16"):
        facts |= _limits(c)
    if as_json:
        emit_json(facts)
        return
    print_table(["", c.short_name], _cluster_rows(c, facts))


def _limits(c: Cluster) -> dict[str, Any]:
    """The least batches (tokens) for which plain data parallelism is not bound by the network."""
    found: dict[str, Any] = {}
    peak = c.chip.peak_flops["bf16"]
    if c.chip.ici_axis_bytes_per_s and c.kind == "torus":
        alpha = limits.ici_intensity(peak, c.chip.ici_axis_bytes_per_s)
        axes = sum(size > 1 for size in c.shape) or 1
        found["fsdp_min_batch_tokens"] = limits.data_parallel_min_batch(alpha, axes, c.num_chips // c.num_slices)
    if c.chip.dcn_bytes_per_s_per_host and c.chip.chips_per_host:
        dcn = limits.dcn_min_batch_per_pod(peak, c.chip.dcn_bytes_per_s_per_host, c.chip.chips_per_host)
        found["dcn_min_batch_tokens_per_slice"] = dcn
    return found


def _cluster_rows(c: Cluster, facts: dict[str, Any]) -> list[list[Any]]:
    show: tuple[tuple[str, str, Any], ...] = (
        ("chips", "num_chips", lambda v: f"{v:,}"),
        ("hosts", "num_hosts", lambda v: f"{v:,}"),
        ("cores", "num_cores", lambda v: f"{v:,}"),
        ("memory", "hbm_bytes", format_bytes),
        ("FLOP/s, dense bf16", "peak_flops", format_flops),
        ("DCN of all hosts", "dcn_bytes_per_s", lambda v: f"{format_bytes(v)}/s"),
        ("power of the chips", "power_w", lambda v: f"{v / 1e6:.3g} MW"),
        ("price of an hour", "price_usd_per_hour", lambda v: f"${v:,.0f}"),
        ("least batch for FSDP alone, tokens", "fsdp_min_batch_tokens", lambda v: format_count(v)),
        ("least batch of a slice over DCN, tokens", "dcn_min_batch_tokens_per_slice", lambda v: format_count(v)),
    )
    rows = [["kind", c.kind]]
    if c.kind == "torus":
        rings = ", ".join(f"{n} {'ring' if w else 'line'}" for n, w in zip(c.shape, c.wraps, strict=True))
        rows.append(["axes", rings])
    rows += [[words, fmt(facts[key])] for words, key, fmt in show if facts.get(key) is not None]
    return rows


# -- one model ------------------------------------------------------------------------------------------


def _model(m: Model, as_json: bool) -> None:
    published = entry(m.name).published if m.name in models() else None
    facts: dict[str, Any] = {
        "name": m.name,
        "family": m.family,
        "runs_here": m.runs_here,
        "dims": m.dims,
        "params": num_params(m),
        "active_params": num_active_params(m),
        "params_by_part": params_by_part(m),
        "published_params": published.params if published else None,
        "train_flops_per_token": accounting.train_flops_per_param() * num_active_params(m),
        "kv_cache_bytes_per_token": accounting.kv_cache_bytes(m, 1),
        "attention_equal_len": accounting.attention_equal_len(m),
        "state_bytes": {s: accounting.state_bytes(num_params(m), state=s) for s in STATE_BYTES},
        "weights": [
            {"name": w.name, "dims": list(w.dims), "shape": list(w.shape), "repeat": w.repeat, "tied_to": w.tied_to}
            for w in weight_table(m)
        ],
    }
    if as_json:
        emit_json(facts)
        return
    rows: list[list[Any]] = [
        [w.name, f"[{','.join(w.dims)}]", " x ".join(map(str, w.shape)), w.repeat,
         f"= {w.tied_to}" if w.tied_to else format_params(w.num_params)]
        for w in weight_table(m)
    ]  # fmt: skip
    letters = "  ".join(f"{k}={v}" for k, v in m.dims.items())
    print_table(["weight", "dims", "shape", "layers", "params"], rows, f"{m.name} ({m.family})  {letters}")
    _print_model_totals(m, facts)


def _print_model_totals(m: Model, facts: dict[str, Any]) -> None:
    published = facts["published_params"]
    active = facts["active_params"]
    said = f", published as {published}" if published else ""
    click.echo(f"parameters        {facts['params']:,} ({format_params(facts['params'])}{said})")
    if active != facts["params"]:
        click.echo(f"active per token  {active:,} ({format_params(active)})")
    click.echo(f"training          {format_flops(facts['train_flops_per_token'], unit='FLOP')} a token (6 x active)")
    click.echo(f"KV cache          {format_bytes(facts['kv_cache_bytes_per_token'])} a token in bf16")
    click.echo(f"attention         equals the layers' matmul FLOPs at {facts['attention_equal_len']:,.0f} positions")
    states = ", ".join(f"{s} {format_bytes(v)}" for s, v in facts["state_bytes"].items())
    click.echo(fill(f"training state    {states}", width(), subsequent_indent=" " * 18))
    click.echo(
        f"here              {'trains' if m.runs_here else 'counted; only the llama family runs in this version'}"
    )
