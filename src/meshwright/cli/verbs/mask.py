"""`meshwright mask`: the blocks of scores that an attention mask leaves, their predicted and their measured time."""

import math
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.algebra.sizes import Number
from meshwright.cli.output import busy_words
from meshwright.cli.verb import Count, Options, argument, option, verb
from meshwright.core.errors import CannotRunError
from meshwright.core.units import format_flops, format_seconds
from meshwright.cost.formulas.accounting import attention_work
from meshwright.cost.work.kernel_times import PASSES
from meshwright.cost.work.kernels import ChipRates, chip_rates, partly_hidden
from meshwright.masks.names import MASKS, SCORES, Rule, example_data, mask_named, score_named, usage
from meshwright.masks.table import MARKS, CountedTable, counted_table
from meshwright.masks.user import load_user, table_of_user
from meshwright.report.answer import Answer, Condition, Fact, Facts, Paragraph, Piece, Table
from meshwright.report.arrays.mask import mask_figure
from meshwright.spec.calibration import datasheet_calibration
from meshwright.spec.chip import Chip, compute_dtype
from meshwright.spec.efficiency import fitted_calibration

RUNS = ("forward", "forward + backward")
NAMED = {"name": "a mask"}


class Given(Options):
    name: str | None = argument(metavar="[NAME | module:function]")
    seq_len: Count = option("Queries and keys.", "--seq", default=8192, needs=NAMED)
    block: Count = option("Queries and keys of a block.", default=128, needs=NAMED)
    score: str | None = option("A score rule, such as 'alibi + softcap(30)', for --run.", needs={"run": "--run"})
    num_heads: Count = option("Heads, of queries and of keys.", "--heads", default=4, needs=NAMED)
    head_dim: Count = option("Width of a head.", default=128, needs=NAMED)
    on: Chip = option("A chip, to predict for.", default="h100", needs=NAMED)
    run: bool = option("Measure on this machine too.", needs=NAMED, extra="run")
    png: Path | None = option("Draw the blocks to this file (.png or .svg).", needs=NAMED)


@verb(Given)
def command(given: Given) -> Answer:
    """Show the blocks of an attention mask NAME, such as "causal & document", and predict its time on a chip.

    Without NAME, list the catalogue. module:function is your own mask_mod(b, h, q_idx, kv_idx), from the current
    folder too. Arrays that a mask of the catalogue reads are drawn at random.
    """
    if given.name is None:
        return _catalogue()
    rule = None if ":" in given.name else mask_named(given.name)
    score = None if given.score is None else score_named(given.score)
    table_sizes = {"q_len": given.seq_len, "kv_len": given.seq_len, "block": given.block, "heads": given.num_heads}
    mask_args: tuple[Any, ...]
    if rule is None:
        table, mask_args = table_of_user(given.name, **table_sizes), (partial(load_user, given.name),)
    else:
        mask_arrays = example_data(rule, length=given.seq_len, heads=given.num_heads)
        table, mask_args = counted_table(rule.make(*mask_arrays), **table_sizes), (rule.make, mask_arrays, rule.terms)
    facts = {**_facts(given, table), **(_measured(given, mask_args, score) if given.run else {"measured": None})}
    rows = [{"source": source, **row} for source in ("predicted", "measured") for row in facts[source] or ()]
    pictures = {given.png: lambda: mask_figure(table, title=f"Attention mask {given.name}")}
    return Answer(facts, _text(facts, table), pictures, [rows, [facts]])


def _catalogue() -> Answer:
    rows = [
        {"kind": kind, "name": name, "usage": usage(name, entry.parameters), "arrays": entry.data, "is": entry.summary}
        for kind, entry_by_name in (("mask", MASKS), ("score", SCORES))
        for name, entry in entry_by_name.items()
    ]
    columns: Any = {"name": "usage", "reads": ("arrays", " ".join), "": "is"}
    titles = {"mask": "masks, joined by & and |", "score": "score rules, joined by + from left to right"}
    tables = [Table.of([row for row in rows if row["kind"] == kind], columns, title) for kind, title in titles.items()]
    return Answer({"catalogue": rows}, tables, raw=[rows])


def _facts(given: Given, counted: CountedTable) -> Facts:
    """Returns counts of blocks and pairs, and the predicted seconds of attention of one layer and one sequence in bf16,
    with all blocks and with the non-empty ones."""
    table, chip, all_pairs = counted.table, given.on, given.seq_len**2
    dtype = compute_dtype(chip, "bf16")
    rates = chip_rates(chip, fitted_calibration(chip) or datasheet_calibration(chip), dtype=dtype, state_dtype=dtype)
    work_sizes = {"length": given.seq_len, "heads": given.num_heads, "head_dim": given.head_dim}
    return {
        "mask": given.name,
        **{name: getattr(given, name) for name in ("score", "seq_len", "block", "num_heads", "head_dim")},
        "sparsity": table.sparsity(),
        **{f"{name}_blocks": table.count(kind) for kind, name in enumerate(MARKS)},
        "visible_pairs": counted.visible_pairs,
        "pairs_in_blocks": table.pairs(),
        "pairs": all_pairs,
        "table_s": counted.table_s,
        "chip": chip.name,
        "attention_flops_per_s": float(rates.attention_flops_per_s / (1 + rates.efficiency.head_half / given.head_dim)),
        "kernel_s": float(rates.efficiency.kernel_s),
        "predicted": [
            _row(run, *(float(_seconds(rates, run, pairs=pairs, **work_sizes)) for pairs in (all_pairs, table.pairs())))
            for run in RUNS
        ],
    }


def _seconds(rates: ChipRates, run: str, *, length: int, pairs: Number, heads: int, head_dim: int) -> Number:
    """Returns the predicted seconds of one sequence of ``length`` positions; ``pairs`` are in non-empty blocks, ``run``
    is "forward" or "forward + backward".

    4 N H FLOPs a pair, 10 N H backward, at the rate of attention, and the exposed traffic of queries, keys, values,
    results and their cotangents. Masking partial blocks costs nothing.
    """
    work = attention_work(queries=length, keys=length, heads=heads, kv_heads=heads, head_dim=head_dim)
    scores_s, factors = 4.0 * pairs * heads * head_dim / rates.attention_flops_per_s, rates.efficiency
    total_s: Number = 0.0
    for phase in run.split(" + "):
        math_s = scores_s * PASSES[phase] * (1 + factors.head_half / head_dim)
        num_bytes = work.num_bytes * (2 if phase == "backward" else 1)
        total_s = total_s + partly_hidden(math_s, num_bytes / rates.hbm_bytes_per_s, factors.overlap) + factors.kernel_s
    return total_s


def _row(run: str, dense_s: float, blocks_s: float) -> Facts:
    return {"pass": run, "dense_s": dense_s, "blocks_s": blocks_s, "ratio": blocks_s / dense_s}


def _measured(given: Given, mask_args: tuple[Any, ...], score: Rule | None) -> Facts:
    """Returns the medians of runs on this machine, in float32 on a CPU and in bf16 elsewhere."""
    import jax
    import jax.numpy as jnp

    from meshwright.bench.timing import NO_TIME, Call, budget_of, time_together
    from meshwright.nn.attention.call import AttentionCall
    from meshwright.nn.attention.choice import attention, attention_backward
    from meshwright.nn.attention.kernels.xla import LISTED, ROWS, block_size
    from meshwright.nn.attention.tiles import Mod

    seq_len, num_heads = given.seq_len, given.num_heads
    score_mod = score and Mod(score.make, example_data(score, length=seq_len, heads=num_heads), score.terms)
    make_call = partial(AttentionCall, scale=given.head_dim**-0.5, score=score_mod)
    call_by_column = {"dense_s": make_call(), "blocks_s": make_call(mask=Mod(*mask_args))}
    dtype = jnp.float32 if call_by_column["dense_s"].platform == "cpu" else jnp.bfloat16
    operands = jax.random.normal(jax.random.key(0), (4, 1, seq_len, num_heads, given.head_dim), dtype)

    def program(call: AttentionCall, run: str) -> Any:
        def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
            o, lse = attention(call, q, k, v)
            return o if run == "forward" else attention_backward(call, (dout, o, lse), q, k, v)

        return Call(run=jax.jit(both), arguments=lambda repeat: tuple(operands))

    programs = {(run, column): program(call, run) for run in RUNS for column, call in call_by_column.items()}
    # a user's module may print, while the answer goes to standard output
    with redirect_stdout(sys.stderr):
        timings, reasons = time_together(programs, budget_of(60.0), max_repeats=5)
    if reasons:
        hint_text = (
            "a smaller --seq or fewer --heads" if NO_TIME in reasons.values() else "operators and jax.numpy in a mask"
        )
        raise CannotRunError(f"not measured: {next(iter(reasons.values()))}. Use {hint_text}.")
    rows = [_row(run, *(timings[run, column].median_s for column in call_by_column)) for run in RUNS]
    sizes = [block_size(seq_len, max_block) for max_block in (ROWS, LISTED)]
    share = 1 - call_by_column["blocks_s"].placed(seq_len, seq_len).blocks(1, num_heads, *sizes).sparsity()
    return {"measured": rows, "kernel_blocks": sizes, "kernel_share": share, "device": jax.devices()[0].device_kind}


SECONDS: Facts = {"pass": "pass", "all blocks": "dense_s", "non-empty": "blocks_s", "ratio": ("ratio", "{:.3f}".format)}


def _text(facts: Facts, counted: CountedTable) -> Iterator[Piece]:
    seq_len, block_len, shape = facts["seq_len"], facts["block"], counted.table.kinds.shape[:2]
    yield f"{facts['mask']}: {seq_len:,} queries and keys, in blocks of {block_len} x {block_len}"
    yield Paragraph(counted.table.text(width=48), None)
    yield ""
    heads_text = "" if math.prod(shape) == 1 else f", over {shape[1]} heads; heads differ, the picture is the first"
    yield Fact("sparsity", f"{facts['sparsity']:.1%} of blocks are empty")
    count_texts = (f"{facts[f'{kind}_blocks']:,} {kind} {mark}" for kind, mark in MARKS.items())
    yield Fact("blocks", ", ".join(count_texts) + heads_text)
    visible_share = facts["visible_pairs"] / facts["pairs"]
    yield Fact("visible pairs", f"{facts['visible_pairs']:,.0f} of {facts['pairs']:,} ({visible_share:.1%})")
    shape_text = f"one sequence, {facts['num_heads']} heads of {facts['head_dim']}"
    yield Table.of(facts["predicted"], SECONDS, f"Predicted for {facts['chip']}: attention of one layer, {shape_text}")
    rate = format_flops(facts["attention_flops_per_s"])
    start = format_seconds(facts["kernel_s"])
    yield Condition(
        f"prediction: FLOPs of non-empty blocks (4 heads x width a pair forward, 10 backward) at the rate of such "
        f"heads, {rate}, exposed memory traffic, and {start} to start a kernel; masking a partial block costs nothing"
    )
    yield Condition(f"the table of blocks was made in {format_seconds(facts['table_s'])}")
    if facts["measured"]:
        yield Table.of(facts["measured"], SECONDS, f"Measured here ({facts['device']}), medians")
        yield from map(Condition, busy_words())
        block_text, share = " x ".join(map(str, facts["kernel_blocks"])), facts["kernel_share"]
        yield Fact("1 - sparsity", f"{1 - facts['sparsity']:.3f}; in XLA's blocks of {block_text} it is {share:.3f}")
