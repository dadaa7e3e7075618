"""`meshwright compare`: models side by side: sizes and ratios, state and activation memory, chips that hold them."""

from typing import Any

import click
import msgspec

from meshwright.calculators.training.comparison import AVERAGE_BYTES, RESULTS_PER_LAYER, ModelRow, model_row
from meshwright.calculators.verbs.compare_memory import MemoryTable, activations_view, bytes_view, hold_view, zero_view
from meshwright.cli.output import emit_json, json_option, print_fact, print_table, print_text
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_flops, format_params, parse_count
from meshwright.report.plain_tables import as_csv, as_markdown
from meshwright.spec.catalogue import model as find_model
from meshwright.spec.catalogue import models
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES, Strategy

FORMATS = ("text", "csv", "markdown", "json")
VIEWS = ("zero", "bytes", "hold", "activations")
LETTERS = "L D F N K H V"


@click.command()
@click.argument("names", nargs=-1, metavar="[MODEL]...")
@click.option("--all", "every", is_flag=True, help="All models of the catalogue.")
@click.option("--seq", "seq_len", default="4096", show_default=True, help="Tokens of a sequence.")
@click.option("--zero", is_flag=True, help="Bytes of a device by ZeRO stage, over --shards devices.")
@click.option("--bytes", "by_state", is_flag=True, help="Bytes of every training state, and the largest model of --on.")
@click.option("--hold", is_flag=True, help="Fewest chips of each kind that hold a training run.")
@click.option(
    "--activations", is_flag=True, help="Activations kept: the published closed form beside the derived count."
)
@click.option("--shards", default="64", show_default=True, help="Data-parallel devices, for --zero.")
@click.option("--state", help=f"Training state: {', '.join(STATE_BYTES)}.")
@click.option("--average", type=click.Choice(tuple(AVERAGE_BYTES)), default="none", show_default=True,
              help="A running average of the weights, kept in this dtype.")  # fmt: skip
@click.option("--batch", "batch_tokens", default="0", help="Tokens a step, for --hold: adds kept activations.")
@click.option("--results-per-layer", type=float, default=RESULTS_PER_LAYER, show_default=True,
              help="Results of width D that a layer keeps, for --hold.")  # fmt: skip
@click.option("--chips", "num_chips", help="For --hold: what one of so many chips holds, too.")
@click.option("--micro", type=int, default=1, show_default=True, help="Sequences of a microbatch, for --activations.")
@click.option("--tensor", type=int, default=1, show_default=True, help="Tensor parallelism, for --activations.")
@click.option(
    "--on", "on", multiple=True, help="Chips, for --bytes and --hold; repeatable [default: all that are known]."
)
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@json_option
def command(
    names: tuple[str, ...],
    every: bool,
    seq_len: str,
    zero: bool,
    by_state: bool,
    hold: bool,
    activations: bool,
    shards: str,
    state: str | None,
    average: str,
    batch_tokens: str,
    results_per_layer: float,
    num_chips: str | None,
    micro: int,
    tensor: int,
    on: tuple[str, ...],
    form: str,
    as_json: bool,
) -> None:
    """Compare MODELs (names or config.json files): hyperparameters, or one of the views of memory."""
    chosen = _models(names, every)
    length = _positive(seq_len, "--seq")
    view = [name for name, given in zip(VIEWS, (zero, by_state, hold, activations), strict=True) if given]
    if len(view) > 1:
        raise InputError(f"--{view[0]} and --{view[1]} are two views. Ask for one at a time.")
    form = "json" if as_json else form
    if not view:
        _emit_rows([model_row(m, seq_len=length) for m in chosen], length, form)
        return
    used = state or Strategy(mesh={}).state
    if view == ["zero"]:
        facts, tables = zero_view(chosen, shards=_positive(shards, "--shards"), state=state)
    elif view == ["bytes"]:
        facts, tables = bytes_view(chosen, chips=on)
    elif view == ["hold"]:
        tokens = parse_count(batch_tokens, what="--batch")
        facts, tables = hold_view(
            chosen,
            chips=on,
            state=used,
            average=average,
            batch_tokens=tokens,
            results_per_layer=results_per_layer,
            num_chips=None if num_chips is None else _positive(num_chips, "--chips"),
        )
    else:
        facts, tables = activations_view(chosen, seq_len=length, microbatch_seqs=micro, tensor=tensor)
    _emit(facts, tables, form)


def _models(names: tuple[str, ...], every: bool) -> list[Model]:
    if every and names:
        raise InputError(f"--all and {names[0]} do not go together. Name models, or ask for all of them.")
    if not every and not names:
        raise InputError("no model is named. Name some, such as llama3-8b gemma-7b, or give --all.")
    return [find_model(name) for name in (models() if every else dict.fromkeys(names))]


def _positive(text: str, what: str) -> int:
    value = parse_count(text, what=what)
    if value < 1:
        raise InputError(f"{what} {text} must be at least 1.")
    return value


# -- hyperparameters ------------------------------------------------------------------------------------


def _emit_rows(rows: list[ModelRow], seq_len: int, form: str) -> None:
    if form == "json":
        emit_json({"seq_len": seq_len, "models": rows})
        return
    if form != "text":
        fields = ModelRow.__struct_fields__
        raw = [[getattr(row, field) for field in fields] for row in rows]
        click.echo((as_csv if form == "csv" else as_markdown)(fields, raw), nl=False)
        return
    print_table(
        ["model", *LETTERS.split()],
        [
            [r.name, r.num_layers, r.d_model, r.d_ff, r.num_heads, r.num_kv_heads, r.head_dim, r.vocab_size]
            for r in rows
        ],
    )
    print_table(
        ["model", "params", "active", "F / D", "D / L", "KV a token", "FLOPs a token", "attention"],
        [
            [r.name, format_params(r.num_params), format_params(r.num_active_params), f"{r.ff_ratio:.2f}",
             f"{r.aspect:.0f}", format_bytes(r.kv_bytes_per_token),
             format_flops(r.train_flops_per_token, unit="FLOP"), f"{r.attention_share:.1%}"]
            for r in rows
        ],
    )  # fmt: skip
    experts = [r for r in rows if r.num_experts]
    if experts:
        print_table(
            ["model", "experts", "a token", "width of one", "shared width"],
            [[r.name, r.num_experts, r.experts_per_token, r.d_ff_expert, r.d_ff_shared] for r in experts],
        )
    print_fact("F / D", "what a token passes: k Fe + Fs over D with experts")
    print_fact("FLOPs a token", f"training, 6 x active; attention's own products at {seq_len:,} positions come on top, "
               "without causal discount: their share of both")  # fmt: skip
    print_fact("KV a token", "bf16, all layers")


# -- views of memory ------------------------------------------------------------------------------------


def _emit(facts: dict[str, Any], tables: list[MemoryTable], form: str) -> None:
    """The facts as JSON, or every table in the form that was asked for."""
    if form == "json":
        emit_json({key: msgspec.to_builtins(value) for key, value in facts.items()})
        return
    for number, one in enumerate(tables):
        if form == "text":
            print_table(one.columns, one.shown(), one.title)
            continue
        made = as_csv(one.columns, one.rows) if form == "csv" else as_markdown(one.columns, one.shown())
        heading = f"{one.title}\n\n" if form == "markdown" else ""
        click.echo(("\n" if number else "") + heading + made, nl=False)
    if form == "text" and facts.get("note"):
        print_text(str(facts["note"]), indent=0)
