"""`meshwright compare`: models side by side: sizes and ratios, state and activation memory, chips that hold them."""

from collections.abc import Iterator
from typing import Literal

from meshwright.algebra.sizes import Number
from meshwright.cli.output import format_flop_count
from meshwright.cli.sweeps.fields import model_or_size
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.cli.verbs.compare_memory import (
    RESULTS_PER_LAYER,
    activations_view,
    bytes_view,
    hold_view,
    zero_view,
)
from meshwright.core.errors import InputError
from meshwright.cost.formulas.accounting import kv_cache_bytes, score_flops
from meshwright.cost.letters import feed_forward_width
from meshwright.cost.work.ops import token_flops
from meshwright.report.answer import Answer, Fact, Facts, Piece, Table
from meshwright.spec.catalogue import models
from meshwright.spec.chip import Chip
from meshwright.spec.model import Model
from meshwright.spec.strategy import STATE_BYTES
from meshwright.spec.weights import num_active_params, num_params

VIEWS = {"zero": zero_view, "by_state": bytes_view, "hold": hold_view, "activations": activations_view}
FLAGS = {"by_state": "bytes"}
ZERO, HOLD, BYTES, ACTIVATIONS = (
    {view: f"--{FLAGS.get(view, view)}"} for view in ("zero", "hold", "by_state", "activations")
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


@verb(Given)
def command(given: Given) -> Answer:
    """Compare MODELs (names or config.json files): hyperparameters, or one of the views of memory."""
    if given.every and given.names:
        raise InputError(f"--all and {given.names[0]} do not go together. Name models, or ask for all of them.")
    if not given.every and not given.names:
        raise InputError("no model is named. Name some, such as llama3-8b gemma-7b, or give --all.")
    chosen_models = [model_or_size(name) for name in (models() if given.every else dict.fromkeys(given.names))]
    view_names = [name for name in VIEWS if getattr(given, name)]
    if len(view_names) > 1:
        flag, other_flag = (FLAGS.get(name, name) for name in view_names[:2])
        raise InputError(f"--{flag} and --{other_flag} are two views. Ask for one at a time.")
    if view_names:
        return VIEWS[view_names[0]](chosen_models, given)
    rows = [model_row(model, seq_len=given.seq_len) for model in chosen_models]
    return Answer({"seq_len": given.seq_len, "models": rows}, _text(rows, given.seq_len), raw=[rows])


LETTERS = {
    "model": "name", "L": "num_layers", "D": "d_model", "F": "d_ff", "N": "num_heads", "K": "num_kv_heads",
    "H": "head_dim", "V": "vocab_size",
}  # fmt: skip
COUNTS: Facts = {
    "model": "name",
    "params": "num_params",
    "active": "num_active_params",
    "F / D": ("ff_ratio", lambda ratio: f"{ratio:.2f}"),
    "D / L": ("aspect", lambda ratio: f"{ratio:.0f}"),
    "KV a token": "kv_bytes_per_token",
    "FLOPs a token": ("train_flops_per_token", format_flop_count),
    "attention": ("attention_share", lambda share: f"{share:.1%}"),
}
EXPERTS = {
    "model": "name", "experts": "num_experts", "a token": "experts_per_token", "width of one": "d_ff_expert",
    "shared width": "d_ff_shared",
}  # fmt: skip
"""Columns of the three tables."""


def model_row(model: Model, *, seq_len: int) -> Facts:
    """Returns sizes, ratios and the cost of a token of a model at a sequence length, before anything is split.

    None where a model has no such part. ``ff_ratio`` is the feed-forward width that a token passes over D: F / D, or
    (k Fe + Fs) / D with experts, and ``aspect`` is D / L. FLOPs per token are 6 per active parameter, and attention's
    own products come on top: ``attention_share`` is their part of both.
    """
    matmul_flops, attention_flops = token_flops(model), attention_train_flops(model, seq_len) / seq_len
    return {
        **{name: getattr(model, name) for name in ("name", "family", *LETTERS.values())},
        **{name: getattr(model, name) or None for name in EXPERTS.values() if name != "name"},
        "num_params": num_params(model),
        "num_active_params": num_active_params(model),
        "ff_ratio": feed_forward_width(model) / model.d_model,
        "aspect": model.d_model / model.num_layers,
        "kv_bytes_per_token": kv_cache_bytes(model, 1),
        "train_flops_per_token": matmul_flops,
        "attention_flops_per_token": attention_flops,
        "attention_share": attention_flops / (attention_flops + matmul_flops),
    }


def attention_train_flops(model: Model, seq_len: Number) -> Number:
    """Returns FLOPs of attention's own products for one sequence of training: 6 T S N (H + Hv) a layer.

    12 T^2 N H with values as wide as keys; a layer with a window sees at most that many keys. No causal discount.
    Source: How to Scale Your Model, section 4.3.
    """
    return 3 * score_flops(model, seq_len)


def _text(rows: list[Facts], seq_len: int) -> Iterator[Piece]:
    yield Table.of(rows, LETTERS)
    yield Table.of(rows, COUNTS)
    expert_rows = [row for row in rows if row["num_experts"]]
    if expert_rows:
        yield Table.of(expert_rows, EXPERTS)
    yield Fact("F / D", "what a token passes: k Fe + Fs over D with experts")
    yield Fact(
        "FLOPs a token",
        f"training, 6 N with N without the look-up; attention's own products at {seq_len:,} "
        "positions come on top, without causal discount: their share of both",
    )
    yield Fact("KV a token", "bf16, all layers")
