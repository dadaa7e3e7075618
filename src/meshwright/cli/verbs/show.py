"""`meshwright show`: the catalogues, and figures that follow from one entry."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.output import format_flop_count, four_digits
from meshwright.cli.sweeps.crossover import mlp_work
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.cli.verbs.show_chip import chip_answer, chip_facts
from meshwright.cli.verbs.show_cluster import clusters_answer
from meshwright.cli.verbs.show_model import model_answer
from meshwright.core.errors import InputError, nearest
from meshwright.core.toml_file import read_toml
from meshwright.core.units import format_params
from meshwright.report.answer import Answer, Detail, Fact, Facts, Table
from meshwright.spec.catalogue import load_model, models, weights_of
from meshwright.spec.chip import chip, chips
from meshwright.spec.cluster import parse_clusters
from meshwright.spec.weights import num_active_params, num_params


class Given(Options):
    thing: str = argument()
    seq_len: Count | None = option("For a model: FLOPs by part and bytes that a layer sends, at this length.", "--seq")


@verb(Given)
def command(given: Given) -> Answer:
    """Show THING: models, chips, a model (name, config.json, mlp:DxF), a chip (name, .toml), a cluster (v5p:4x4x4)."""
    thing = given.thing
    if thing == "models":
        model_rows = [
            {
                "name": m.name,
                "family": m.family,
                "params": num_params(m),
                "active_params": num_active_params(m),
                "layers": m.num_layers,
                "d_model": m.d_model,
                "runs": m.runs_here,
            }
            for m in map(load_model, models())
        ]
        table, names = Table.of(model_rows, MODELS), _in_columns(model_rows, ("model", "size"), 3, NAMES)
        return Answer({"models": model_rows}, [names, Detail("family, layers and width", [table])], raw=[table])
    if thing == "chips":
        chip_rows = [chip_facts(c) for c in chips().values()]
        sold_rows = [row for row in chip_rows if "-book" not in row["name"] and row["hbm_bytes"]]
        names = _in_columns(sold_rows, ("chip", "bf16 or fp16", "memory"), 2, CHIPS, "Dense TFLOP/s, and memory")
        table = Table.of(chip_rows, CHIPS, "Dense TFLOP/s by dtype, memory and the fastest link")
        return Answer(
            {"chips": chip_rows},
            [names, Detail("every dtype, memory and link rates", [table, BOOK_WORDS])],
            raw=[table],
        )
    if thing.endswith(".toml"):
        top_keys = read_toml(Path(thing)).data.keys()
        if {"version", "strategy"} <= top_keys:
            raise InputError(f"{thing} is a plan. Use meshwright explain {thing}, or show the cluster it names.")
        if not {"shape", "levels"} & top_keys:
            return chip_answer(chip(thing))
    if (layer := mlp_work(thing)) is not None:
        params = 2 * layer.dims["D"] * layer.d_ff
        flops = {"forward": 2 * params, "training": 6 * params}
        facts = {"name": thing, "d_model": layer.dims["D"], "d_ff": layer.d_ff, "params": params, "token_flops": flops}
        heading = f"{thing}: Win[D,F] and Wout[F,D], {format_params(params)} parameters"
        flops_text = " a token forward, ".join(map(format_flop_count, flops.values()))
        return Answer(facts, [heading, Fact("FLOPs", f"{flops_text} in training")])
    if ":" in thing or thing.endswith(".toml"):
        return clusters_answer(parse_clusters(thing))
    if thing.lower() in _chip_names():
        return chip_answer(chip(thing))
    if thing and (thing in models() or Path(thing).exists() or "/" in thing or thing.endswith(".json")):
        return model_answer(load_model(thing), given.seq_len, weights_of(thing))
    known_names = ("models", "chips", *models(), *_chip_names())
    hint_text = nearest(thing, known_names) or " Try meshwright show models, or meshwright show chips."
    raise InputError(f"{thing!r} is no model, chip or cluster.{hint_text}")


def _in_columns(
    rows: Sequence[Facts], heads: Sequence[str], num_columns: int, columns: Facts, title: str = ""
) -> Table:
    """Returns a table of the columns ``heads``, whose rows stand in ``num_columns`` groups beside each other."""
    part = Table.of(rows, {head: columns[head] for head in heads})
    num_lines = -(-len(rows) // num_columns)
    shown = [[cell for row in part.shown()[n::num_lines] for cell in row] for n in range(num_lines)]
    width = num_columns * len(heads)
    return Table([*heads] * num_columns, [row + [""] * (width - len(row)) for row in shown], title)


def _chip_names() -> tuple[str, ...]:
    return tuple(name for c in chips().values() for name in (c.name, *c.aliases))


BOOK_WORDS = (
    "rows that end in -book, such as v5e-book, have the rounded figures of How to Scale Your Model in place of the "
    "data sheet's, so that its worked answers come out to the digit (-book-section1: of one section)"
)
MODELS: Facts = {
    "model": "name",
    "family": "family",
    "params": "params",
    "active": "active_params",
    "L": "layers",
    "D": "d_model",
    "runs here": ("runs", lambda runs: "yes" if runs else "counted"),
}


NAMES: Facts = {**MODELS, "size": ("params", lambda count: format_params(count).replace(" ", ""))}


def _teraflops(flops: float) -> str:
    return four_digits(flops / 1e12)


CHIPS: Facts = {
    "chip": "name",
    "bf16 or fp16": (
        lambda row: row["peak_flops"].get("bf16") or row["peak_flops"].get("fp16"),
        _teraflops,
        "peak_flops.bf16",
    ),
    **{dtype: (f"peak_flops/{dtype}", _teraflops) for dtype in ("fp8", "int8", "fp4")},
    "memory": "hbm_bytes",
    "memory rate": "hbm_bytes_per_s",
    "link, one way": "link_bytes_per_s",
}
