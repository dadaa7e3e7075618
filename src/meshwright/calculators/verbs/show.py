"""`meshwright show`: the catalogues, and what follows from one entry of them."""

from pathlib import Path
from typing import Any

import click

from meshwright.calculators.verbs.show_chip import chip_facts, print_chip
from meshwright.calculators.verbs.show_cluster import print_cluster, print_slices
from meshwright.calculators.verbs.show_model import print_model
from meshwright.cli.output import emit_json, json_option, or_dash, print_table
from meshwright.core.errors import InputError, nearest
from meshwright.core.toml_file import read_toml
from meshwright.core.units import format_bytes, format_flops, format_params
from meshwright.spec.catalogue import model, models
from meshwright.spec.chip import chip, chips
from meshwright.spec.slices import parse_clusters
from meshwright.spec.weights import num_active_params, num_params


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
        _refuse_plan_file(thing)
        clusters = parse_clusters(thing)
        if len(clusters) > 1:
            print_slices(clusters, as_json)
        else:
            print_cluster(clusters[0], as_json)
    elif thing.lower() in _chip_names():
        print_chip(chip(thing), as_json)
    elif thing and (thing in models() or Path(thing).exists() or "/" in thing or thing.endswith(".json")):
        print_model(model(thing), as_json)
    else:
        options = ("models", "chips", *models(), *_chip_names())
        hint = nearest(thing, options) or " Try meshwright show models, or meshwright show chips."
        raise InputError(f"{thing!r} is no model, chip or cluster.{hint}")


def _refuse_plan_file(thing: str) -> None:
    """A plan file has another reader: say so instead of naming its keys one by one."""
    if thing.endswith(".toml") and {"version", "strategy"} <= read_toml(Path(thing)).data.keys():
        raise InputError(f"{thing} is a plan. Use meshwright explain {thing}, or show the cluster it names.")


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
        emit_json({"chips": [chip_facts(c) for c in entries]})
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
