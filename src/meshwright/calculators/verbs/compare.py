"""`meshwright compare`: models side by side: sizes and ratios, state and activation memory, chips that hold them."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from meshwright.calculators.training.comparison import RESULTS_PER_LAYER, ModelRow, model_row
from meshwright.calculators.verbs.compare_memory import activations_view, bytes_view, hold_view, zero_view
from meshwright.cli.output import format_flop_count
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.core.errors import InputError
from meshwright.core.units import format_bytes, format_params
from meshwright.report.answer import Answer, Fact, Piece, Table
from meshwright.spec.catalogue import load_model, models
from meshwright.spec.chip import Chip
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES, Strategy

VIEWS = {"zero": zero_view, "by_state": bytes_view, "hold": hold_view, "activations": activations_view}
FLAGS = {"by_state": "bytes"}
ZERO, HOLD, BYTES, ACTIVATIONS = (
    {one: f"--{FLAGS.get(one, one)}"} for one in ("zero", "hold", "by_state", "activations")
)
"""The ``needs`` of options that belong to one view."""


class Given(Options):
    names: tuple[str, ...] = argument(metavar="[MODEL]...")
    every: bool = option("All models of the catalogue.", "--all")
    seq_len: Count = option("Tokens of a sequence.", "--seq", default="4096", needs=ACTIVATIONS | {"sizes": "no view"})
    zero: bool = option("Bytes of a device by ZeRO stage, over --shards devices.")
    by_state: bool = option("Bytes of every training state, and the largest model of --on.", "--bytes")
    hold: bool = option("Fewest chips of each kind that hold a training run.")
    activations: bool = option("Activations kept: the published closed form beside the derived count.")
    shards: Count = option("Data-parallel devices, for --zero.", default="64", needs=ZERO)
    state: str | None = option(f"Training state, for --zero and --hold: {', '.join(STATE_BYTES)}.", needs=ZERO | HOLD)
    average: Literal["none", "bf16", "fp32"] = option(
        "A running average of the weights, kept in this dtype, for --zero and --hold.",
        default="none",
        needs=ZERO | HOLD,
    )
    batch_tokens: Count | None = option("Tokens a step, for --hold: adds kept activations.", "--batch", needs=HOLD)
    results_per_layer: float = option(
        "Results of width D that a layer keeps, for --hold.",
        default=RESULTS_PER_LAYER,
        needs={"batch_tokens": "--hold with --batch"},
    )
    num_chips: Count | None = option("For --hold: also the bytes of one of this many chips.", "--chips", needs=HOLD)
    micro: Count = option("Sequences of a microbatch, for --activations.", default="1", needs=ACTIVATIONS)
    tensor: Count = option("Tensor parallelism, for --activations.", default="1", needs=ACTIVATIONS)
    on: tuple[Chip, ...] = option(
        "Chips, for --bytes and --hold; repeatable [default: all that are known].", needs=BYTES | HOLD
    )

    @property
    def sizes(self) -> bool:
        """True if no view is asked for."""
        return not any(getattr(self, name) for name in VIEWS)

    @property
    def used_state(self) -> str:
        return self.state or Strategy(mesh={}).state


@verb(Given)
def command(given: Given) -> Answer:
    """Compare MODELs (names or config.json files): hyperparameters, or one of the views of memory."""
    chosen = _models(given)
    views = [name for name in VIEWS if getattr(given, name)]
    if len(views) > 1:
        first, second = (FLAGS.get(name, name) for name in views[:2])
        raise InputError(f"--{first} and --{second} are two views. Ask for one at a time.")
    return VIEWS[views[0]](chosen, given) if views else _sizes(chosen, given.seq_len)


def _models(given: Given) -> list[Model]:
    if given.every and given.names:
        raise InputError(f"--all and {given.names[0]} do not go together. Name models, or ask for all of them.")
    if not given.every and not given.names:
        raise InputError("no model is named. Name some, such as llama3-8b gemma-7b, or give --all.")
    return [load_model(name) for name in (models() if given.every else dict.fromkeys(given.names))]


LETTERS = {
    "model": "name", "L": "num_layers", "D": "d_model", "F": "d_ff", "N": "num_heads", "K": "num_kv_heads",
    "H": "head_dim", "V": "vocab_size",
}  # fmt: skip
COUNTS: dict[str, Any] = {
    "model": "name",
    "params": ("num_params", format_params),
    "active": ("num_active_params", format_params),
    "F / D": ("ff_ratio", lambda ratio: f"{ratio:.2f}"),
    "D / L": ("aspect", lambda ratio: f"{ratio:.0f}"),
    "KV a token": ("kv_bytes_per_token", format_bytes),
    "FLOPs a token": ("train_flops_per_token", format_flop_count),
    "attention": ("attention_share", lambda share: f"{share:.1%}"),
}
EXPERTS = {
    "model": "name", "experts": "num_experts", "a token": "experts_per_token", "width of one": "d_ff_expert",
    "shared width": "d_ff_shared",
}  # fmt: skip
"""Columns of the three tables: fields of `ModelRow`."""


def _sizes(chosen: Sequence[Model], seq_len: int) -> Answer:
    rows = [model_row(one, seq_len=seq_len) for one in chosen]
    return Answer({"seq_len": seq_len, "models": rows}, _text(rows, seq_len), raw=[rows])


def _text(rows: Sequence[ModelRow], seq_len: int) -> Iterator[Piece]:
    yield Table.of(rows, LETTERS)
    yield Table.of(rows, COUNTS)
    experts = [row for row in rows if row.num_experts]
    if experts:
        yield Table.of(experts, EXPERTS)
    yield Fact("F / D", "what a token passes: k Fe + Fs over D with experts")
    yield Fact(
        "FLOPs a token",
        f"training, 6 N with N without the look-up; attention's own products at {seq_len:,} "
        "positions come on top, without causal discount: their share of both",
    )
    yield Fact("KV a token", "bf16, all layers")
