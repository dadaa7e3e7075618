"""`meshwright show`: the catalogues, and what follows from one entry of them."""

from pathlib import Path
from typing import Any

from meshwright.calculators.verbs.show_chip import chip_answer, chip_facts
from meshwright.calculators.verbs.show_cluster import clusters_answer
from meshwright.calculators.verbs.show_model import model_answer
from meshwright.cli.verb import Options, argument, verb
from meshwright.core.errors import InputError, nearest
from meshwright.core.toml_file import read_toml
from meshwright.core.units import format_bytes, format_flops, format_params, format_rate
from meshwright.report.answer import Answer, Table
from meshwright.spec.catalogue import model, models
from meshwright.spec.chip import chip, chips
from meshwright.spec.slices import parse_clusters
from meshwright.spec.weights import num_active_params, num_params


class Given(Options):
    thing: str = argument()


@verb(Given)
def command(given: Given) -> Answer:
    """THING is: models, chips, a model (name or config.json), a chip, or a cluster such as v5p:16x20x28."""
    thing = given.thing
    if thing == "models":
        return _models()
    if thing == "chips":
        return _chips()
    if ":" in thing or thing.endswith(".toml"):
        _refuse_plan_file(thing)
        return clusters_answer(parse_clusters(thing))
    if thing.lower() in _chip_names():
        return chip_answer(chip(thing))
    if thing and (thing in models() or Path(thing).exists() or "/" in thing or thing.endswith(".json")):
        return model_answer(model(thing))
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


MODELS: dict[str, Any] = {
    "model": "name",
    "family": "family",
    "params": ("params", format_params),
    "active": ("active_params", format_params),
    "L": "layers",
    "D": "d_model",
    "runs here": ("runs", lambda runs: "yes" if runs else "counted"),
}
CHIPS: dict[str, Any] = {
    "chip": "name",
    "bf16, dense": ("bf16", format_flops),
    "memory": ("hbm_bytes", format_bytes),
    "memory rate": ("hbm_bytes_per_s", format_rate),
    "link, one way": ("link", format_rate),
    "figures": "variant",
}


def _models() -> Answer:
    rows = [
        {
            "name": m.name,
            "family": m.family,
            "params": num_params(m),
            "active_params": num_active_params(m),
            "layers": m.num_layers,
            "d_model": m.d_model,
            "runs": m.runs_here,
        }
        for m in map(model, models())
    ]
    return Answer({"models": rows}, [Table.of(rows, MODELS)])


def _chips() -> Answer:
    rows = [chip_facts(c) for c in chips().values()]
    shown = [
        {
            **one,
            "bf16": one["peak_flops"].get("bf16"),
            "link": one["ici_link_bytes_per_s"] or one["nvlink_bytes_per_s"],
        }
        for one in rows
    ]
    return Answer({"chips": rows}, [Table.of(shown, CHIPS)])
